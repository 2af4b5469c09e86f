"""GRPO with outcome rewards (DeepSeekMath, arXiv 2402.03300, eq. 3-4).

The paper: G = 64, one update a rollout, learning rate 1e-6, 1024 completion tokens, frozen reference.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'sequence_mean'
    algorithm.kl, algorithm.kl_coef = 'k3', 0.04
