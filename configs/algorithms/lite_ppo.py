"""Lite PPO (arXiv 2508.08221): group mean, std of the batch, token mean, no reference.

The paper: G = 8, temperature 0.99, top-p 0.99, top-k 100.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'hybrid', 'clip', 'token_mean'
