"""GRPO with process rewards (DeepSeekMath, arXiv 2402.03300, section 4.1.3): a step is paid for what it leads to.

Needs a reward with steps: reward.step_rewards names it. Otherwise as grpo.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'process', 'clip', 'sequence_mean'
    algorithm.kl, algorithm.kl_coef = 'k3', 0.04
