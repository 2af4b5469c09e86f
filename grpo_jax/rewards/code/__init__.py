"""The reward `code`: the share of an example's tests that the completion's program passes, in a sandbox."""

from grpo_jax.rewards.code.blocks import find_program
from grpo_jax.rewards.code.verifier import COLUMNS, READS_ANSWERS, extract, gold, reward

__all__ = ['COLUMNS', 'READS_ANSWERS', 'extract', 'find_program', 'gold', 'reward']
