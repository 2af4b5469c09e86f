"""RLOO (arXiv 2402.14740): leave-one-out baseline and the ratio of whole sequences.

The paper: one update a rollout, G = 2 to 8, and a KL penalty inside the reward, which is left out here.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.ratio = 'leave_one_out', 'sequence_product'
    algorithm.surrogate, algorithm.weights = 'clip', 'sequence_mean'
