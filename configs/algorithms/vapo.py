"""VAPO (arXiv 2504.05118): PPO with lambda by length, clip-higher, and NLL on correct completions; no reference.

The paper also: the critic trained alone at first (critic_warmup), 512 prompts x 16.
"""


def apply(algorithm):
    algorithm.advantage, algorithm.surrogate, algorithm.weights = 'gae_by_length', 'clip', 'token_mean'
    algorithm.clip_high, algorithm.regularizers, algorithm.critic_lambda = 0.28, ('positive_nll',), 1.0
