"""Iterative GRPO (DeepSeekMath, arXiv 2402.03300, algorithm 1): grpo whose reference is renewed every iteration.

An iteration is reference_every steps. Where the reward is learned too, grpo-jax iterate trains it between iterations.
"""


def apply(algorithm, collection):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'sequence_mean'
    algorithm.kl, algorithm.kl_coef = 'k3', 0.04
    collection.reference, collection.reference_every = 'hard', 100
