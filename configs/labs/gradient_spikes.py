"""A lab: one sum in forty pays in cents. Each time that it comes, its gradient drowns the others.

    python -m grpo_jax.train --config=configs/labs/gradient_spikes.py --workdir=runs/spikes
    python -m grpo_jax.train --config=configs/labs/gradient_spikes.py --workdir=runs/mended \
        --config.algorithm.advantage=group_norm

Divided by the spread of its group, a reward in cents is worth what one in dollars is.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'algorithm.advantage': 'group_norm'}


def get_config(preset='dr_grpo'):
    """The sums with careless.py's reward in cents."""
    config = sums.get_config(preset)
    config.optimizer.learning_rate = 1e-4
    config.reward.parts = (('configs/labs/careless.py:cents', 1.0), ('numeric', 0.0))
    return config
