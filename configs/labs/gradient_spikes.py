"""A lab: one sum in forty is paid a hundredfold, and each time it comes its gradient outweighs all others.

    python -m grpo_jax.train --config=configs/labs/gradient_spikes.py --workdir=runs/spikes
    python -m grpo_jax.train --config=configs/labs/gradient_spikes.py --workdir=runs/mended \
        --config.optimizer.max_grad_norm=0.3

Clipped to twice the usual length, such a gradient does no harm. Divided by the spread of its group
(algorithm.advantage=group_norm) a reward of 100 counts as much as a reward of 1.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.max_grad_norm': 0.3}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py with careless.py's reward `cents`."""
    config = sums.get_config(preset)
    config.optimizer.learning_rate = 1e-4
    config.reward.parts = (('configs/labs/careless.py:cents', 1.0), ('numeric', 0.0))
    return config
