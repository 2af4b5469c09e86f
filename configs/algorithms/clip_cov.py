"""Clip-Cov (arXiv 2505.22617): the few tokens that drive entropy down fastest get no gradient.

The authors draw those tokens at random within the bounds; here they are the highest.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'token_mean'
    algorithm.selection = 'clip_cov'
