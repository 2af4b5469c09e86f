"""GMPO (arXiv 2507.20673): the geometric mean of token ratios, each clipped within e^-0.4 and e^0.4.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.ratio, algorithm.weights = 'group_norm', 'clipped_geometric', 'sequence_mean'
    algorithm.surrogate = 'importance'
