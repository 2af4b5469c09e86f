"""The reward `math`: 1 if the completion's answer equals the gold one, else 0.

`extract` brings a completion's answer into canonical form; `decide` and `are_equivalent` compare two canonical texts.
The package imports nothing else of grpo_jax but Example, expressions and workers. grpo_jax.rewards looks for the other
names in a reward's module, see grpo_jax/rewards/__init__.py.
"""

from grpo_jax.rewards.math.extraction import extract, extract_strict
from grpo_jax.rewards.math.verifier import are_equivalent, decide, reward, same, strict

__all__ = ['are_equivalent', 'decide', 'extract', 'extract_strict', 'reward', 'same', 'strict']
