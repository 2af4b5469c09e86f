"""Group Relative Policy Optimization of language models in JAX. Start reading at grpo_jax/train.py."""
