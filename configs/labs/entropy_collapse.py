"""A lab: at a learning rate of 1 the first update breaks the policy, and it says one thing for ever.

    python -m grpo_jax.train --config=configs/labs/entropy_collapse.py --workdir=runs/collapse
    python -m grpo_jax.train --config=configs/labs/entropy_collapse.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3.3e-4

The run names this rate, and not a thirtieth of its own, which would break the policy too.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.learning_rate': 3.3e-4}


def get_config(preset='dr_grpo'):
    """The sums with a learning rate that no policy stands."""
    config = sums.get_config(preset)
    config.optimizer.learning_rate = 1.0
    return config
