"""A lab: prompts that are answered right retire, and the learning rate rises until the policy breaks and forgets them.

    python -m grpo_jax.train --config=configs/labs/forgetting.py --workdir=runs/forgetting
    python -m grpo_jax.train --config=configs/labs/forgetting.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3e-4
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.learning_rate': 3e-4}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py: 1500 sums that retire, evaluations, and a warm-up to a rate ten times too high."""
    config = sums.get_config(preset)
    config.data.options.count = 1500
    config.collection.retire_above = 0.5
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup = 16
    config.evaluation.every = 5
    return config
