"""Processes that can be killed: a Pool that calls functions, and a Sandbox that runs untrusted programs.

They know nothing of rewards.
"""

from grpo_jax.workers.pool import Died, Expired, Pool
from grpo_jax.workers.sandbox import Sandbox

__all__ = ['Died', 'Expired', 'Pool', 'Sandbox']
