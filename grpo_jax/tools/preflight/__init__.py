"""Whether a run fits TPUs that are not here, and what it would cost them: `python -m grpo_jax preflight`."""
