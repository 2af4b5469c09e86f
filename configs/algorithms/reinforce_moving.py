"""REINFORCE (Williams 1992; Sutton and Barto, section 13.4): reward less a moving average of earlier rewards.

Advantage `prompt_moving_mean` takes the average of each prompt's own earlier rewards.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'moving_mean', 'policy_gradient', 'sequence_sum'
