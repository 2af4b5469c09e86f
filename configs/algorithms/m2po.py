"""M2PO (arXiv 2510.01161): of very stale tokens, those with the largest squared log ratio are dropped.

The bound of the second moment, 0.04, is not verified.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'importance', 'token_mean'
    algorithm.ratio_base, algorithm.selection = 'sampler', 'm2po'
