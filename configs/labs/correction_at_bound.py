"""A lab: completions of the last step's policy, and a correction that drops all but the nearly on-policy ones.

    python -m grpo_jax.train --config=configs/labs/correction_at_bound.py --workdir=runs/dropped
    python -m grpo_jax.train --config=configs/labs/correction_at_bound.py --workdir=runs/mended \
        --config.algorithm.correction=truncated

The bounds, 0.999 and 1.002 by default, allow for rounding alone; one update moves the policy further.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'algorithm.correction': 'truncated'}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py, sampled one step ahead, with the correction masked_geometric."""
    config = sums.get_config(preset)
    config.steps = 6
    config.collection.staleness = 1
    config.algorithm.correction = 'masked_geometric'
    return config
