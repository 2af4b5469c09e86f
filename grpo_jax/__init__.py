"""Group Relative Policy Optimization of language models in JAX. Start reading at grpo_jax/train.py."""

import os

PACKAGE = os.path.dirname(os.path.abspath(__file__))  # its folder, which holds configs/
