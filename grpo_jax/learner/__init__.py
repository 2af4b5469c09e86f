"""The learner: completion logprobs in chunks, and the update of the policy from experience."""
from grpo_jax.learner.logprobs import completion_logprobs
from grpo_jax.learner.update import update

__all__ = ['completion_logprobs', 'update']
