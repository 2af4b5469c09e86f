"""The reward `math`: 1 if the completion's answer equals the gold one, else 0.

A package that could be one of its own: `decide` and `equivalent` compare two texts in canonical form, `extract` brings
a completion's answer into it. Besides, it has what rewards are asked for by name, see grpo_jax.rewards.
"""

from grpo_jax.rewards.math.verifier import decide, equivalent, extract, extract_strict, reward, same, strict

__all__ = ['decide', 'equivalent', 'extract', 'extract_strict', 'reward', 'same', 'strict']
