"""DAPO (arXiv 2503.14476): clip-higher, token mean, and prompts drawn until every group has right and wrong answers.

The paper: 16 minibatches a rollout, G = 16, 512 prompts, learning rate 1e-6, soft overlong penalty; its script adds a
dual clip of 10.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'token_mean'
    algorithm.clip_high, collection.dead_groups, collection.gate = 0.28, 'resample', 'outcome'
