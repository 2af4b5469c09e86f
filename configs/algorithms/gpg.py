"""GPG (arXiv 2504.02546): the plain policy gradient, groups that differ weighed up for those that do not.

The factor is the authors' B / (B - M) over dead groups; verl's is over rewards of 0, another number.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_mean', 'policy_gradient', 'sequence_mean'
    collection.dead_groups = 'reweight'
