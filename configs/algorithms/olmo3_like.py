"""What open-instruct, OLMo 3's trainer, does by default: centred advantages, clip-higher, k3, capped sampler ratio.

OLMo's published recipes often set kl_coef to 0.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_mean', 'clip', 'token_mean'
    algorithm.clip_high, collection.dead_groups, algorithm.correction = 0.272, 'drop', 'truncated'
    algorithm.kl, algorithm.kl_coef = 'k3', 0.05
