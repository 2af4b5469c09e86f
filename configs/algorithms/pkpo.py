"""PKPO (arXiv 2505.15201): the reward of a completion is its share in pass@k. Rewards of 0 or 1, G of 8 or more.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'pkpo', 'clip', 'token_mean'
