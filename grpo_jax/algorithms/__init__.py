"""GRPO and its relatives as mathematics of arrays; no models, no devices, and only `make` reads a config.

`compute_advantages` and `policy_loss` stand alone, for notebooks and for checks against other libraries.
"""

from grpo_jax.algorithms.algorithm import (
    Algorithm,
    adapt,
    default_numbers,
    describe_pieces,
    file_numbers,
    make,
    to_section,
)
from grpo_jax.algorithms.checks import check_run, is_corrected
from grpo_jax.algorithms.group_math import judge_groups
from grpo_jax.algorithms.host_advantages import compute_advantages, is_by_token
from grpo_jax.algorithms.losses import gradient_coefficients, loss_terms, metrics, policy_loss, prepare, token_losses
from grpo_jax.algorithms.meters import PooledMean, age_metrics, pooled_metrics, reference_metrics
from grpo_jax.grouping import Grouping

__all__ = [
    'Algorithm',
    'Grouping',
    'PooledMean',
    'adapt',
    'age_metrics',
    'check_run',
    'compute_advantages',
    'default_numbers',
    'describe_pieces',
    'file_numbers',
    'gradient_coefficients',
    'is_by_token',
    'is_corrected',
    'judge_groups',
    'loss_terms',
    'make',
    'metrics',
    'policy_loss',
    'pooled_metrics',
    'prepare',
    'reference_metrics',
    'to_section',
    'token_losses',
]
