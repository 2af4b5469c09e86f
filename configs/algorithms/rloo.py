"""RLOO (arXiv 2402.14740): leave-one-out baseline, the ratio of whole sequences, the KL in the reward.

The paper: one update a rollout, G = 2 to 8.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.ratio = 'leave_one_out', 'sequence_product'
    algorithm.surrogate, algorithm.weights = 'clip', 'sequence_mean'
    algorithm.kl, algorithm.kl_placement, algorithm.kl_coef = 'k1', 'reward_sequence', 0.05
