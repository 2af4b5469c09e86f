"""SAPO (arXiv 2511.20347): a sigmoid gate in place of the clip, steeper for negative advantages.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'sapo', 'sequence_mean'
