"""A lab: the run of hacked_part. The reward grows, and held-out sums, judged without brackets, get worse.

    python -m grpo_jax.train --config=configs/labs/falling_evaluation.py --workdir=runs/falling
    python -m grpo_jax.train --config=configs/labs/falling_evaluation.py --workdir=runs/mended \
        --config.reward.parts="(('numeric', 1.0), ('configs/labs/careless.py:bracketed', 0.1))"
"""
from grpo_jax.configs.labs.hacked_part import REMEDY, get_config

__all__ = ['REMEDY', 'get_config']
