"""Rollouts: sampling completions with the policy's own forward pass."""

from grpo_jax.sampler.generate import generate, row_keys
from grpo_jax.sampler.sampling import Sampling

__all__ = ['Sampling', 'generate', 'row_keys']
