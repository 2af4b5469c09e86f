"""Killable processes, which know nothing of rewards: a Pool of functions, a Sandbox of programs that nobody trusts."""

from grpo_jax.workers.pool import Died, Expired, Pool
from grpo_jax.workers.sandbox import Sandbox

__all__ = ['Died', 'Expired', 'Pool', 'Sandbox']
