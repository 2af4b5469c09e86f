"""A lab: completions of the last step's policy, and a correction that drops all but the nearly on-policy ones.

    python -m grpo_jax.train --config=configs/labs/correction_at_bound.py --workdir=runs/dropped
    python -m grpo_jax.train --config=configs/labs/correction_at_bound.py --workdir=runs/mended \
        --config.algorithm.correction=truncated

Its bounds, 0.999 and 1.002 by default, are for the rounding of one policy, which one update exceeds.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'algorithm.correction': 'truncated'}


def get_config(preset='dr_grpo'):
    """The sums, sampled one step ahead, with masked_geometric."""
    config = sums.get_config(preset)
    config.steps = 6
    config.collection.staleness = 1
    config.algorithm.correction = 'masked_geometric'
    return config
