"""GSPO-token (arXiv 2507.18071, section 4.3): the value of gspo with each token's own gradient and advantage.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.ratio, algorithm.weights = 'group_norm', 'sequence_geometric_token', 'sequence_mean'
    algorithm.surrogate, algorithm.clip_low, algorithm.clip_high = 'clip', 3e-4, 4e-4
