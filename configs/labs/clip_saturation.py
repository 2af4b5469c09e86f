"""A lab: the clip of GSPO's paper, meant for ratios of sequences, on ratios of tokens. Most updates teach nothing.

    python -m grpo_jax.train --config=configs/labs/clip_saturation.py --workdir=runs/clipped
    python -m grpo_jax.train --config=configs/labs/clip_saturation.py --workdir=runs/mended \
        --config.algorithm.clip_low=0.2 --config.algorithm.clip_high=0.2
"""
from grpo_jax.configs.labs import sums

REMEDY = {'algorithm.clip_low': 0.2, 'algorithm.clip_high': 0.2}


def get_config(preset='dr_grpo'):
    """The sums with sixteen updates a rollout, and a clip of 3e-4."""
    config = sums.get_config(preset)
    config.steps = 10
    config.learner.epochs, config.learner.minibatches = 4, 4
    config.algorithm.clip_low, config.algorithm.clip_high = 3e-4, 4e-4
    config.optimizer.learning_rate = 5e-4
    return config
