"""A lab: prompts retire as soon as half of their completions are right, while too high a rate spoils what they taught.

    python -m grpo_jax.train --config=configs/labs/forgetting.py --workdir=runs/forgetting
    python -m grpo_jax.train --config=configs/labs/forgetting.py --workdir=runs/mended \
        --config.collection.retire_above=0.0 --config.optimizer.learning_rate=1e-4
"""
from grpo_jax.configs.labs import sums

REMEDY = {'collection.retire_above': 0.0, 'optimizer.learning_rate': 1e-4}


def get_config(preset='dr_grpo'):
    """The sums, evaluated every five steps, with a curriculum of a thousand of them."""
    config = sums.get_config(preset)
    config.data.options.count = 1000
    config.collection.retire_above = 0.5
    config.optimizer.learning_rate = 1e-3
    config.evaluation.every = 5
    return config
