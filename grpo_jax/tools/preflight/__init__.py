"""Tells whether a run fits TPUs that are not here, and its least time there: `python -m grpo_jax preflight`."""
