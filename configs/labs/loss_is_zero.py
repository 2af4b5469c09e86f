"""A lab: GRPO with one update a rollout, whose loss is 0 from the first step on while the policy learns.

    python -m grpo_jax.train --config=configs/labs/loss_is_zero.py --workdir=runs/zero
    python -m grpo_jax.train --config=configs/labs/loss_is_zero.py --workdir=runs/four --config.learner.minibatches=4

Nothing is wrong. With four updates a rollout the loss is another number, which says no more about learning.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'learner.minibatches': 4}


def get_config(preset='grpo'):
    """The config of labs/sums.py with means over completions, so that the loss is the mean advantage, and no KL."""
    config = sums.get_config(preset)
    config.steps = 5
    config.algorithm.kl, config.algorithm.kl_coef = 'none', 0.0
    return config
