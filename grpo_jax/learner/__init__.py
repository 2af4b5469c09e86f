"""The learner: completion logprobs in chunks, and the update of the policy from experience."""

from grpo_jax.learner.critic import values
from grpo_jax.learner.logprobs import completion_logprobs
from grpo_jax.learner.update import new_aux, update

__all__ = ['completion_logprobs', 'new_aux', 'update', 'values']
