"""What this project recommends to start from with rewards that verify; every part is in two or more frameworks.

G = 8 to 16, learning rate 1e-6, temperature 1, no truncation of the distribution.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_mean', 'dual_clip', 'token_mean'
    algorithm.clip_high, collection.dead_groups, algorithm.correction = 0.28, 'drop', 'truncated'
