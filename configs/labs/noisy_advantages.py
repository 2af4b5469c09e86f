"""A lab: the run of shaped_reward. Every group has differences of full size, nearly all of them worth a thousandth.

    python -m grpo_jax.train --config=configs/labs/noisy_advantages.py --workdir=runs/noisy
    python -m grpo_jax.train --config=configs/labs/noisy_advantages.py --workdir=runs/mended \
        --config.algorithm.advantage=batch_centred_std

Divided by the spread of the whole batch, in which right answers are, a thousandth stays what it is worth.
"""
from grpo_jax.configs.labs.shaped_reward import get_config

__all__ = ['REMEDY', 'get_config']
REMEDY = {'algorithm.advantage': 'batch_centred_std'}
