"""A lab: at a learning rate of 1 the first update breaks the policy, whose completions are all the same from then on.

    python -m grpo_jax.train --config=configs/labs/entropy_collapse.py --workdir=runs/collapse
    python -m grpo_jax.train --config=configs/labs/entropy_collapse.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3.3e-4

The diagnosis names this rate: a thirtieth of the run's own rate would break the policy too.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.learning_rate': 3.3e-4}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py with a learning rate at which every policy breaks."""
    config = sums.get_config(preset)
    config.optimizer.learning_rate = 1.0
    return config
