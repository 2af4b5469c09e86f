"""A lab: the run of gradient_spikes, twice as long. Rewards of a hundredfold lead each step, and no sum is learned.

    python -m grpo_jax.train --config=configs/labs/noisy_advantages.py --workdir=runs/noisy
    python -m grpo_jax.train --config=configs/labs/noisy_advantages.py --workdir=runs/mended \
        --config.algorithm.advantage=batch_centred_std
"""
from grpo_jax.configs.labs import gradient_spikes

REMEDY = {'algorithm.advantage': 'batch_centred_std'}


def get_config(preset='dr_grpo'):
    """The lab gradient_spikes for 40 steps."""
    config = gradient_spikes.get_config(preset)
    config.steps = 40
    return config
