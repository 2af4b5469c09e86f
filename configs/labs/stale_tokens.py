"""A lab: completions that are sampled eight steps ahead, at a learning rate that moves the policy far in eight steps.

    python -m grpo_jax.train --config=configs/labs/stale_tokens.py --workdir=runs/stale
    python -m grpo_jax.train --config=configs/labs/stale_tokens.py --workdir=runs/mended \
        --config.collection.staleness=2

When a step learns from them, a few completions weigh as much as all others.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'collection.staleness': 2}


def get_config(preset='dr_grpo'):
    """The sums, sampled eight steps ahead."""
    config = sums.get_config(preset)
    config.collection.staleness = 8
    config.algorithm.correction = 'truncated'
    return config
