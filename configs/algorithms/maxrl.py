"""MaxRL (arXiv 2602.02710): advantages divided by the pass rate, so that hard prompts count most. Rewards of 0 or 1.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'maxrl', 'clip', 'token_mean'
