"""The reward `code`: the share of an example's tests that the completion's program passes, in a sandbox."""

from grpo_jax.rewards.code.blocks import find_program
from grpo_jax.rewards.code.verifier import COLUMNS, extract, gold, reward

__all__ = ['COLUMNS', 'extract', 'find_program', 'gold', 'reward']
