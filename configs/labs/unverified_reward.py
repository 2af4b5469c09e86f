"""A lab: the run of overoptimization without a verifier. The stand-in for a reward model is pleased, and nobody looks.

    python -m grpo_jax.train --config=configs/labs/unverified_reward.py --workdir=runs/unverified
    python -m grpo_jax.train --config=configs/labs/unverified_reward.py --workdir=runs/mended \
        --config.algorithm.kl=k3 --config.algorithm.kl_coef=1.0
"""
from grpo_jax.configs.labs import overoptimization

REMEDY = {'algorithm.kl': 'k3', 'algorithm.kl_coef': 1.0}


def get_config(preset='dr_grpo'):
    """The lab overoptimization, paid by careless.py's model alone; the KL to the reference is measured all the same."""
    config = overoptimization.get_config(preset)
    config.reward.parts = (('configs/labs/careless.py:model', 1.0),)
    config.reward.verifier = ''
    return config
