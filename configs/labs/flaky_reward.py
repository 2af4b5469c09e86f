"""A lab: a judge that gives no answer to every eighth completion, as one behind a rate limit does.

    python -m grpo_jax.train --config=configs/labs/flaky_reward.py --workdir=runs/flaky
    python -m grpo_jax.train --config=configs/labs/flaky_reward.py --workdir=runs/mended \
        --config.reward.parts="(('numeric', 1.0),)"
"""
from grpo_jax.configs.labs import sums

REMEDY = {'reward.parts': (('numeric', 1.0),)}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py with careless.py's unreliable judge as the only reward, and no verifier."""
    config = sums.get_config(preset)
    config.steps = 6
    config.reward.parts = (('configs/labs/careless.py:unreliable', 1.0),)
    config.reward.verifier = ''
    return config
