"""Tools around runs: `grpo-jax COMMAND` and `python -m grpo_jax COMMAND` find them; the core imports none of them."""
