"""A lab: after steps that are too large every sum gets the same wrong answer, and groups have no differences left.

    python -m grpo_jax.train --config=configs/labs/stagnation.py --workdir=runs/stagnation
    python -m grpo_jax.train --config=configs/labs/stagnation.py --workdir=runs/mended \
        --config.optimizer.learning_rate=6.7e-5
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.learning_rate': 6.7e-5}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py for 40 steps at a learning rate of 2e-3."""
    config = sums.get_config(preset)
    config.steps = 40
    config.optimizer.learning_rate = 2e-3
    return config
