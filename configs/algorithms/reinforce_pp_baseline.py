"""REINFORCE++-baseline (arXiv 2501.03262): reward less the group's mean, whitened over tokens, k2 in the loss.

The paper gives no coefficient for k2; 1e-3 stands here.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_mean_batch_std', 'clip', 'token_mean'
    algorithm.kl, algorithm.kl_coef = 'k2', 1e-3
