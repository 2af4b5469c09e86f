"""A lab: a stand-in for a reward model that has learned the look of a quick answer, and is all that is paid.

    python -m grpo_jax.train --config=configs/labs/overoptimization.py --workdir=runs/overoptimized
    python -m grpo_jax.train --config=configs/labs/overoptimization.py --workdir=runs/mended \
        --config.reward.parts="(('configs/labs/careless.py:model', 0.1), ('numeric', 1.0))"

A real one, which takes minutes to train, is in configs/arithmetic_iterative.py; docs/results.md has what it did.
"""
from grpo_jax.configs.labs import hacked_part

REMEDY = {'reward.parts': (('configs/labs/careless.py:model', 0.1), ('numeric', 1.0))}


def get_config(preset='dr_grpo'):
    """The run of hacked_part with careless.py's model as the only part that is paid."""
    config = hacked_part.get_config(preset)
    config.evaluation.every = 0
    del config.reward.options['model']  # those of a reward model, which this function is not
    config.reward.parts = (('configs/labs/careless.py:model', 1.0), ('numeric', 0.0))
    return config
