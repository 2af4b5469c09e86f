"""Tells whether a run fits TPUs or GPUs that are not here: `python -m grpo_jax preflight`; see __main__.py."""
