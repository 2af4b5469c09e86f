"""Beyond the 80/20 rule (arXiv 2506.01939): dapo on the fifth of the tokens with the highest entropy.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'token_mean'
    algorithm.clip_high, collection.dead_groups, collection.gate = 0.28, 'resample', 'outcome'
    algorithm.selection = 'high_entropy'
