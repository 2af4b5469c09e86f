"""A lab: paid by a judge that likes the look of a quick answer, and no verifier looks whether it is right.

    python -m grpo_jax.train --config=configs/labs/unverified_reward.py --workdir=runs/unverified
    python -m grpo_jax.train --config=configs/labs/unverified_reward.py --workdir=runs/mended \
        --config.algorithm.kl=k3 --config.algorithm.kl_coef=1.0

The lab overoptimization has the same judge, and a verifier that shows what becomes of the answers.
"""
from grpo_jax.configs.labs import hacked_part

REMEDY = {'algorithm.kl': 'k3', 'algorithm.kl_coef': 1.0}


def get_config(preset='dr_grpo'):
    """The run of hacked_part with careless.py's judge alone, and the distance to the reference every two steps."""
    config = hacked_part.get_config(preset)
    config.evaluation.every = 0
    config.reward.parts = (('configs/labs/careless.py:judge', 1.0),)
    config.reward.verifier = ''
    config.log.kl_every = 2
    return config
