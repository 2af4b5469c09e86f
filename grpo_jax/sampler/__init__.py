"""Rollouts: sampling completions with the policy's own forward pass."""
from grpo_jax.sampler.generate import generate, row_keys

__all__ = ['generate', 'row_keys']
