"""Live diagnosis: monitors read a run's metrics so far and say what goes wrong, why, and what to do."""

from grpo_jax.diagnose.advice import PUBLISHED, advise
from grpo_jax.diagnose.monitors import MONITORS, history, new_diagnoses
from grpo_jax.diagnose.options import DiagnoseOptions
from grpo_jax.diagnose.signs import Context

__all__ = ['MONITORS', 'PUBLISHED', 'Context', 'DiagnoseOptions', 'advise', 'history', 'new_diagnoses']
