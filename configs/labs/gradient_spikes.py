"""A lab: one sum in forty pays in cents. Each time that it comes, its gradient drowns the others.

    python -m grpo_jax.train --config=configs/labs/gradient_spikes.py --workdir=runs/spikes
    python -m grpo_jax.train --config=configs/labs/gradient_spikes.py --workdir=runs/mended \
        --config.optimizer.max_grad_norm=0.3

Clipped to twice the usual length, such a gradient drowns nothing. Divided by the spread of its group
(algorithm.advantage=group_norm) a reward in cents is worth what one in dollars is.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.max_grad_norm': 0.3}


def get_config(preset='dr_grpo'):
    """The sums with careless.py's reward in cents."""
    config = sums.get_config(preset)
    config.optimizer.learning_rate = 1e-4
    config.reward.parts = (('configs/labs/careless.py:cents', 1.0), ('numeric', 0.0))
    return config
