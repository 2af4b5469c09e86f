"""A lab: the clip of GSPO's paper, 3e-4, at a learning rate that moves a completion's ratio further in one update.

    python -m grpo_jax.train --config=configs/labs/clip_saturation.py --workdir=runs/clipped
    python -m grpo_jax.train --config=configs/labs/clip_saturation.py --workdir=runs/mended \
        --config.learner.epochs=1 --config.learner.minibatches=2

In most of the sixteen updates of a rollout, completions are outside of the clip already.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'learner.epochs': 1, 'learner.minibatches': 2}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py with GSPO's ratio and clip, and sixteen updates a rollout."""
    config = sums.get_config(preset)
    config.steps = 6
    config.learner.epochs, config.learner.minibatches = 4, 4
    config.algorithm.ratio = 'sequence_geometric'
    config.algorithm.clip_low, config.algorithm.clip_high = 3e-4, 4e-4
    config.optimizer.learning_rate = 5e-4
    return config
