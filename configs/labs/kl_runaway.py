"""A lab: rewards from a coin, and no KL term that holds the policy near its start.

    python -m grpo_jax.train --config=configs/labs/kl_runaway.py --workdir=runs/runaway
    python -m grpo_jax.train --config=configs/labs/kl_runaway.py --workdir=runs/mended \
        --config.algorithm.kl=k3 --config.algorithm.kl_coef=0.3

Meaningless advantages move the policy all the same, each step in another direction.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'algorithm.kl': 'k3', 'algorithm.kl_coef': 0.3}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py with the reward coin; the KL to the reference is measured in every step."""
    config = sums.get_config(preset)
    config.reward.parts = (('coin', 1.0), ('numeric', 0.0))
    config.optimizer.learning_rate = 1e-3
    config.log.kl_every = 1
    return config
