"""A lab: the only reward is a judge that likes the look of a quick answer, and no verifier checks the answers.

    python -m grpo_jax.train --config=configs/labs/unverified_reward.py --workdir=runs/unverified
    python -m grpo_jax.train --config=configs/labs/unverified_reward.py --workdir=runs/mended \
        --config.algorithm.kl=k3 --config.algorithm.kl_coef=1.0

The lab overoptimization has the same judge, and a verifier that shows what becomes of the answers.
"""
from grpo_jax.configs.labs import hacked_part

REMEDY = {'algorithm.kl': 'k3', 'algorithm.kl_coef': 1.0}


def get_config(preset='dr_grpo'):
    """The config of labs/hacked_part.py, paid by careless.py's `judge` alone; the KL is measured every two steps."""
    config = hacked_part.get_config(preset)
    config.evaluation.every = 0
    config.reward.parts = (('configs/labs/careless.py:judge', 1.0),)
    config.reward.verifier = ''
    config.log.kl_every = 2
    return config
