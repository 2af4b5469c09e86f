"""GRPO and its relatives as array mathematics: no models, no devices, no configs past `make`.

`compute_advantages` and `policy_loss` stand alone, for notebooks and for checks against other libraries.
"""
from grpo_jax.algorithms.algorithm import (
    Algorithm,
    compute_advantages,
    dead_groups,
    make,
    metrics,
    policy_loss,
    token_losses,
)

__all__ = ['Algorithm', 'compute_advantages', 'dead_groups', 'make', 'metrics', 'policy_loss', 'token_losses']
