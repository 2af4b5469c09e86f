"""OPO (arXiv 2505.23585): the baseline is the group's mean weighted by lengths; meant for one update a rollout.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'opo', 'policy_gradient', 'token_mean'
