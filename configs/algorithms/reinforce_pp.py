"""REINFORCE++ (arXiv 2501.03262): returns with the KL by token, whitened over the batch; no critic, any G.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'reinforce_pp', 'clip', 'token_mean'
    algorithm.kl, algorithm.kl_placement, algorithm.kl_coef = 'k1', 'reward_token', 0.01
