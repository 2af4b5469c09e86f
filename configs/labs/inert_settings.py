"""A lab: GSPO's ratio of sequences with one update a rollout: all ratios are 1, as in GRPO.

    python -m grpo_jax.train --config=configs/labs/inert_settings.py --workdir=runs/inert
    python -m grpo_jax.train --config=configs/labs/inert_settings.py --workdir=runs/four --config.learner.minibatches=4
"""
from grpo_jax.configs.labs import sums

REMEDY = {'learner.minibatches': 4}


def get_config(preset='gspo'):
    """The config of labs/sums.py with GSPO."""
    config = sums.get_config(preset)
    config.steps = 5
    return config
