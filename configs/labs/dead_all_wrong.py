"""A lab: after a cold start that has hardly begun, one completion in some hundreds is right.

    python -m grpo_jax.train --config=configs/labs/dead_all_wrong.py --workdir=runs/wrong
    python -m grpo_jax.train --config=configs/labs/dead_all_wrong.py --workdir=runs/mended \
        --config.supervised.updates=200
"""
from grpo_jax.configs.labs import sums

REMEDY = {'supervised.updates': 200}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py after 40 updates on demonstrations."""
    config = sums.get_config(preset)
    config.supervised.updates = 40
    config.optimizer.learning_rate = 3e-5
    return config
