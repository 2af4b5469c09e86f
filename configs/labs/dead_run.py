"""A lab: a cold start of twenty updates, after which no completion is right: every group is dead, to the run's end.

    python -m grpo_jax.train --config=configs/labs/dead_run.py --workdir=runs/dead
    python -m grpo_jax.train --config=configs/labs/dead_run.py --workdir=runs/mended \
        --config.supervised.updates=200
"""
from grpo_jax.configs.labs import dead_all_wrong

REMEDY = {'supervised.updates': 200}


def get_config(preset='dr_grpo'):
    """The config of labs/dead_all_wrong.py with half of its cold start, and the same learning rate."""
    config = dead_all_wrong.get_config(preset)
    config.supervised.updates = 20
    return config
