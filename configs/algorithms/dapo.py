"""DAPO's loss (arXiv 2503.14476): clip-higher and the token mean, no reference.

The paper also: 16 minibatches a rollout, G = 16, 512 prompts, soft overlong penalty, and sampling until
every group has both right and wrong completions; here dead groups are dropped instead of replaced.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'token_mean'
    algorithm.clip_high, algorithm.dead_groups = 0.28, 'drop'
