"""A lab: completions that are sampled eight steps ahead, at a learning rate that makes them too old in three.

    python -m grpo_jax.train --config=configs/labs/stale_tokens.py --workdir=runs/stale
    python -m grpo_jax.train --config=configs/labs/stale_tokens.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3.3e-4

A few tokens then weigh as much as all others. At the lower rate completions of sixteen steps before would still teach.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.learning_rate': 3.3e-4}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py, sampled eight steps ahead, at a learning rate of 1e-3."""
    config = sums.get_config(preset)
    config.collection.staleness = 8
    config.algorithm.correction = 'truncated'
    config.optimizer.learning_rate = 1e-3
    return config
