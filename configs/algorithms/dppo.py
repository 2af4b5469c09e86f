"""DPPO (arXiv 2602.04879) as prime-rl runs it: tokens whose probability moved too far from the sampler's are dropped.

The ratio is taken to the sampler's logprobs, and the policy is pulled to them by 1e-3 of the squared difference.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_mean', 'dppo_tv', 'token_mean'
    algorithm.ratio_base, algorithm.regularizers = 'sampler', ('behaviour_k2',)
