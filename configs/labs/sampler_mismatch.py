"""A lab: a sampler in int8 beside a learner in float32, so that their logprobs of the same tokens differ too much.

    python -m grpo_jax.train --config=configs/labs/sampler_mismatch.py --workdir=runs/mismatch
    python -m grpo_jax.train --config=configs/labs/sampler_mismatch.py --workdir=runs/mended \
        --config.rollout.weights_dtype= --config.rollout.cache_dtype=

In so small a model int8 changes little: 0.003 nats a token, where two float32 programs differ by 4e-7. So the lab's
threshold is 0.001, in place of 0.02 for large models in bfloat16.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'rollout.weights_dtype': '', 'rollout.cache_dtype': ''}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py, sampled with weights and cache in int8."""
    config = sums.get_config(preset)
    config.steps = 6
    config.rollout.weights_dtype = config.rollout.cache_dtype = 'int8'
    config.rollout.accept_bias = True
    config.diagnose.sampler_gap = 1e-3
    return config
