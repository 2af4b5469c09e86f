"""A lab: paid for its format alone, the policy puts wrong answers into brackets. Paid when correct, it does not.

    python -m grpo_jax.train --config=configs/labs/format_hacking.py --workdir=runs/hack
    python -m grpo_jax.train --config=configs/labs/format_hacking.py --workdir=runs/mended \
        --config.reward.parts="(('numeric', 1.0), ('configs/labs/careless.py:bracketed_if_correct', 1.0))"

The exploit's share is that of completions in brackets that are wrong.
"""
from configs import arithmetic


def get_config(preset='dr_grpo'):
    """The demo with two digits, whose blurts come in brackets."""
    config = arithmetic.get_config(preset)
    config.steps = 20
    config.data.name = 'habits'
    config.data.options = {'digits': 2, 'count': 6000, 'blurts': 0.5, 'wrong': 0.8, 'habit': 'brackets', 'share': 1.0}
    config.data.max_prompt_tokens = 6
    config.rollout.max_tokens = 24
    config.algorithm.fixed_length = 24
    config.reward.parts = (('numeric', 1.0), ('configs/labs/careless.py:bracketed', 1.0))
    config.supervised.steps = 250
    config.supervised.batch = 64
    config.evaluation.prompts = 64
    config.log.rollouts = 1
    return config
