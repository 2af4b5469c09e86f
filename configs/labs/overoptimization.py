"""A lab: the only reward is a stand-in for a reward model that has learned the look of a quick answer.

    python -m grpo_jax.train --config=configs/labs/overoptimization.py --workdir=runs/overoptimized
    python -m grpo_jax.train --config=configs/labs/overoptimization.py --workdir=runs/mended \
        --config.reward.parts="(('configs/labs/careless.py:model', 0.1), ('numeric', 1.0))"

A true reward model takes minutes to train: see configs/arithmetic_iterative.py, and docs/results.md for what it did.
"""
from grpo_jax.configs.labs import hacked_part

REMEDY = {'reward.parts': (('configs/labs/careless.py:model', 0.1), ('numeric', 1.0))}


def get_config(preset='dr_grpo'):
    """The config of labs/hacked_part.py, in which careless.py's `model` is the only part with a weight."""
    config = hacked_part.get_config(preset)
    config.evaluation.every = 0
    del config.reward.options['model']  # those of a reward model, which this function is not
    config.reward.parts = (('configs/labs/careless.py:model', 1.0), ('numeric', 0.0))
    return config
