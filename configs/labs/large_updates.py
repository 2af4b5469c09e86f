"""A lab: at a learning rate of 1e-2 the first update breaks the policy. All that is seen then follows from it.

    python -m grpo_jax.train --config=configs/labs/large_updates.py --workdir=runs/large
    python -m grpo_jax.train --config=configs/labs/large_updates.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3.3e-4

The run prints the second command, with a folder of its own. At 1e-3 it is still too high, which the monitor says too.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.learning_rate': 3.3e-4}


def get_config(preset='dr_grpo'):
    """The sums for 12 steps, with a learning rate thirty times too high."""
    config = sums.get_config(preset)
    config.steps = 12
    config.optimizer.learning_rate = 1e-2
    return config
