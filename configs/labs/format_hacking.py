"""A lab: paid for its format alone, the policy puts wrong answers into brackets. Paid when correct, it does not.

    python -m grpo_jax.train --config=configs/labs/format_hacking.py --workdir=runs/hack
    python -m grpo_jax.train --config=configs/labs/format_hacking.py --workdir=runs/mended \
        --config.reward.parts="(('numeric', 1.0), ('configs/labs/careless.py:bracketed_if_correct', 1.0))"

The exploit's share is that of completions in brackets that are wrong.
"""
from configs import arithmetic


def get_config(preset='dr_grpo'):
    """The demo, whose blurts come in brackets."""
    config = arithmetic.get_config(preset)
    config.steps = 30
    config.data.name = 'habits'
    config.data.options = {'digits': 3, 'count': 20000, 'blurts': 0.5, 'wrong': 0.8, 'habit': 'brackets', 'share': 1.0}
    config.reward.parts = (('numeric', 1.0), ('configs/labs/careless.py:bracketed', 1.0))
    config.evaluation.prompts = 64
    return config
