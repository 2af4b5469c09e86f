"""Online RFT (DeepSeekMath, arXiv 2402.03300, section 5.2.1): rft on samples of the policy as it learns.
"""


def apply(algorithm):
    algorithm.advantage = 'correct'
    algorithm.surrogate, algorithm.weights = 'policy_gradient', 'sequence_mean'
