"""GSPO (arXiv 2507.18071): the ratio is the geometric mean over the sequence, clipped within 4e-4.

The paper: 4 minibatches a rollout; with one update a rollout it has no effect.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.ratio, algorithm.weights = 'group_norm', 'sequence_geometric', 'sequence_mean'
    algorithm.surrogate, algorithm.clip_low, algorithm.clip_high = 'clip', 3e-4, 4e-4
