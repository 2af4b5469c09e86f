"""CISPO (MiniMax-M1, arXiv 2506.13585): the ratio only weighs, and is capped; no token loses its gradient.

The paper does not print the cap; 5 is in ScaleRL's range of 4 to 8.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'cispo', 'token_mean'
