"""DeepSeek-V3.2's GRPO (arXiv 2512.02556): unbiased KL, and negative completions that drifted are masked.

The paper publishes neither delta nor the KL's coefficient; 0.5 and 1e-3 stand here.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'clip', 'sequence_mean'
    algorithm.kl, algorithm.kl_coef, algorithm.correction = 'k3_importance', 1e-3, 'opsm'
