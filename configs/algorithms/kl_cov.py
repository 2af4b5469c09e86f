"""KL-Cov (arXiv 2505.22617): the tokens that drive entropy down fastest are held to the old policy; no clip.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'group_norm', 'importance', 'token_mean'
    algorithm.regularizers, algorithm.covariance_share = ('kl_cov',), 2e-3
