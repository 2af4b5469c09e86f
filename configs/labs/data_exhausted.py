"""A lab: 200 sums, which are seen every sixth step and soon retired. More of them are the remedy.

    python -m grpo_jax.train --config=configs/labs/data_exhausted.py --workdir=runs/exhausted
    python -m grpo_jax.train --config=configs/labs/data_exhausted.py --workdir=runs/mended \
        --config.data.options.count=6000
"""
from grpo_jax.configs.labs import sums

REMEDY = {'data.options.count': 6000}


def get_config(preset='dr_grpo'):
    """The sums, 200 of them; a prompt retires when a quarter of its completions is right."""
    config = sums.get_config(preset)
    config.data.options.count = 200
    config.collection.retire_above = 0.25
    return config
