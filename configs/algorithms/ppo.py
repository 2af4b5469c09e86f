"""PPO for language models (arXiv 1707.06347, 2203.02155): a critic, GAE, and the KL by token in the reward.

Usual settings: learning rate 1e-6, the critic's 1e-5, 4 epochs, kl_coef 0.05 (learned rewards) or 0.001 (rules).
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'gae', 'clip', 'token_mean'
    algorithm.kl, algorithm.kl_placement, algorithm.kl_coef = 'k1', 'reward_token', 0.05
