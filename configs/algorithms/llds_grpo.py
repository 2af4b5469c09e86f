"""GRPO with LLDS (arXiv 2512.04220): likelihood that good completions lose is paid back.

The authors: 2 or more updates a rollout (with one it is 0), G = 5, 512 prompts, minibatches of 256.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'token_mean'
    algorithm.kl, algorithm.kl_coef, algorithm.regularizers = 'k3', 1e-3, ('llds',)
