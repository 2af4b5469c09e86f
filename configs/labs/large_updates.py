"""A lab: at a learning rate of 1e-2 the first update breaks the policy. All later signs follow from that.

    python -m grpo_jax.train --config=configs/labs/large_updates.py --workdir=runs/large
    python -m grpo_jax.train --config=configs/labs/large_updates.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3.3e-4

The run prints the second command, with a folder of its own. A rate of 1e-3 is still too high, and the monitor says so.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.learning_rate': 3.3e-4}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py for 12 steps, with a learning rate thirty times too high."""
    config = sums.get_config(preset)
    config.steps = 12
    config.optimizer.learning_rate = 1e-2
    return config
