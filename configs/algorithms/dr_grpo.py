"""Dr. GRPO (arXiv 2503.20783): no division by the std, rows divided by a constant, no reference.

The paper: fixed_length = the completion budget (3000), G = 8, 128 prompts a step, learning rate 1e-6.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_mean', 'clip', 'fixed_length'
