"""Live diagnosis: monitors read a run's metrics so far and say what goes wrong, why, and what to do."""

from grpo_jax.diagnose.advice import PUBLISHED, advise
from grpo_jax.diagnose.monitors import MONITORS, describe_remedy, history, new_diagnoses
from grpo_jax.diagnose.options import DiagnoseOptions
from grpo_jax.diagnose.remedies import Limits, command_with, find_amended, is_command, overrides
from grpo_jax.diagnose.signs import Context

__all__ = [
    'MONITORS',
    'PUBLISHED',
    'Context',
    'DiagnoseOptions',
    'Limits',
    'advise',
    'command_with',
    'describe_remedy',
    'find_amended',
    'history',
    'is_command',
    'new_diagnoses',
    'overrides',
]
