"""A lab: the run of format_hacking. Paid for its format too, the policy puts wrong answers into brackets.

    python -m grpo_jax.train --config=configs/labs/hacked_part.py --workdir=runs/hack
    python -m grpo_jax.train --config=configs/labs/hacked_part.py --workdir=runs/mended \
        --config.reward.parts="(('numeric', 1.0), ('configs/labs/careless.py:bracketed', 0.1))"
"""
from grpo_jax.configs.labs import format_hacking

REMEDY = {'reward.parts': (('numeric', 1.0), ('configs/labs/careless.py:bracketed', 0.1))}


def get_config(preset='dr_grpo'):
    """The config of labs/format_hacking.py with the small model, evaluated every five steps."""
    config = format_hacking.get_config(preset)
    config.model.path = 'configs/models/letters'
    config.supervised.updates = 500
    config.evaluation.every = 5
    return config
