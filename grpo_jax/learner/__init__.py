"""The learner: completion logprobs in chunks, and the update of the policy from experience."""

from grpo_jax.learner.critic import values
from grpo_jax.learner.logprobs import completion_logprobs
from grpo_jax.learner.optimizer import Optimization, Optimizers, build_optimizer, learning_rates
from grpo_jax.learner.options import ExtraMetrics, Learning
from grpo_jax.learner.update import UpdateSpec, new_aux, update

__all__ = [
    'ExtraMetrics', 'Learning', 'Optimization', 'Optimizers', 'UpdateSpec', 'build_optimizer', 'completion_logprobs',
    'learning_rates', 'new_aux', 'update', 'values',
]  # fmt: skip
