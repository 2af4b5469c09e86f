"""A lab: a budget of 16 tokens is too small to work most sums out, and the policy does so all the same.

    python -m grpo_jax.train --config=configs/labs/truncation.py --workdir=runs/truncation
    python -m grpo_jax.train --config=configs/labs/truncation.py --workdir=runs/mended \
        --config.rollout.max_tokens=32 --config.algorithm.fixed_length=32

Demonstrations that are longer than the budget are left out of the cold start: what it shows are the sums that fit.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'rollout.max_tokens': 32, 'algorithm.fixed_length': 32}


def get_config(preset='dr_grpo'):
    """The sums, nearly all of them worked out, in 16 tokens; worked out in full they take 15 to 20."""
    config = sums.get_config(preset)
    config.steps = 6
    config.data.options.blurts = 0.1
    config.rollout.max_tokens = 16
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 16
    return config
