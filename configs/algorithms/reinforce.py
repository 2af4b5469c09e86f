"""REINFORCE (Williams 1992): the reward less a constant, summed over a completion's tokens.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'reward', 'policy_gradient', 'sequence_sum'
