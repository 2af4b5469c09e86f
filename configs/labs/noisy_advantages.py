"""A lab: a meaningless reward of up to 0.001, divided by the spread of its group, is an advantage of full size.

    python -m grpo_jax.train --config=configs/labs/noisy_advantages.py --workdir=runs/noisy
    python -m grpo_jax.train --config=configs/labs/noisy_advantages.py --workdir=runs/mended \
        --config.algorithm.advantage=batch_centred_std

Divided by the spread of the whole batch, which has right answers in it, such a reward stays small.
"""
from grpo_jax.configs.labs import shaped_reward

REMEDY = {'algorithm.advantage': 'batch_centred_std'}


def get_config(preset='grpo'):
    """The config of labs/shaped_reward.py without its term for length, and with careless.py's `hair`."""
    config = shaped_reward.get_config(preset)
    config.steps = 32
    config.reward.length_shaping = ''
    config.reward.parts = (('numeric', 1.0), ('configs/labs/careless.py:hair', 1.0))
    config.collection.gate = 'reward'
    return config
