"""A lab: a sampler in int8 beside a learner in float32, for weights that have grown too large for 8 bits.

    python -m grpo_jax.train --config=configs/labs/sampler_mismatch.py --workdir=runs/mismatch
    python -m grpo_jax.train --config=configs/labs/sampler_mismatch.py --workdir=runs/mended \
        --config.rollout.weights_dtype= --config.rollout.cache_dtype=
"""
from grpo_jax.configs.labs import sums

REMEDY = {'rollout.weights_dtype': '', 'rollout.cache_dtype': ''}


def get_config(preset='dr_grpo'):
    """The sums, whose cold start and updates are at high rates."""
    config = sums.get_config(preset)
    config.steps = 10
    config.supervised.optimizer.learning_rate = 2e-2
    config.rollout.weights_dtype = 'int8'
    config.rollout.cache_dtype = 'int8'
    config.rollout.accept_bias = True
    return config
