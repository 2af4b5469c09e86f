"""A lab: a sampler in int8 beside a learner in float32, whose logprobs of the same tokens it misses by far.

    python -m grpo_jax.train --config=configs/labs/sampler_mismatch.py --workdir=runs/mismatch
    python -m grpo_jax.train --config=configs/labs/sampler_mismatch.py --workdir=runs/mended \
        --config.rollout.weights_dtype= --config.rollout.cache_dtype=

So small a model rounds little: 0.003 nats a token, where two float32 programs differ by 4e-7. The lab therefore has a
threshold of 0.001 in place of 0.02, which is for large models in bfloat16.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'rollout.weights_dtype': '', 'rollout.cache_dtype': ''}


def get_config(preset='dr_grpo'):
    """The sums, sampled with weights and cache in int8."""
    config = sums.get_config(preset)
    config.steps = 6
    config.rollout.weights_dtype = config.rollout.cache_dtype = 'int8'
    config.rollout.accept_bias = True
    config.diagnose.sampler_gap = 1e-3
    return config
