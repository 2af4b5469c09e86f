"""Group Relative Policy Optimization of language models in JAX. Start reading at grpo_jax/train.py."""

import os

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of the repository
