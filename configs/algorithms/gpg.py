"""GPG (arXiv 2504.02546): the plain policy gradient, in which living groups weigh more to make up for dead ones.

The factor is the authors' B / (B - M) over dead groups; verl's M counts rewards of 0 instead.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_mean', 'policy_gradient', 'sequence_mean'
    collection.dead_groups = 'reweight'
