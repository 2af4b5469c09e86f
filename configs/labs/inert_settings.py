"""A lab: GSPO's ratio of sequences with one update a rollout, which is GRPO by another name.

    python -m grpo_jax.train --config=configs/labs/inert_settings.py --workdir=runs/inert
    python -m grpo_jax.train --config=configs/labs/inert_settings.py --workdir=runs/four --config.learner.minibatches=4
"""
from grpo_jax.configs.labs import sums

REMEDY = {'learner.minibatches': 4}


def get_config(preset='gspo'):
    """The sums with GSPO."""
    config = sums.get_config(preset)
    config.steps = 5
    return config
