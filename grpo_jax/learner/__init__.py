"""The learner: logprobs of completions in chunks, and the update of the policy from experience (update.py)."""

from grpo_jax.learner.logprobs import completion_logprobs
from grpo_jax.learner.options import ExtraMetrics, Learning, Optimization, Optimizers, build_optimizer, learning_rates

__all__ = [
    'ExtraMetrics',
    'Learning',
    'Optimization',
    'Optimizers',
    'build_optimizer',
    'completion_logprobs',
    'learning_rates',
]
