"""A lab: at a temperature of 0.1 the eight completions of a sum are equal, and most sums are all right or all wrong.

    python -m grpo_jax.train --config=configs/labs/low_diversity.py --workdir=runs/cold
    python -m grpo_jax.train --config=configs/labs/low_diversity.py --workdir=runs/mended \
        --config.rollout.temperature=1
"""
from grpo_jax.configs.labs import sums

REMEDY = {'rollout.temperature': 1.0}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py after a shorter cold start, and at a low temperature."""
    config = sums.get_config(preset)
    config.supervised.updates = 250
    config.rollout.temperature = 0.1
    return config
