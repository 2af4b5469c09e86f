"""A lab: paid for its format alone, the policy puts wrong answers into brackets. Paid when correct, it does not.

    python -m grpo_jax.train --config=configs/labs/format_hacking.py --workdir=runs/hack
    python -m grpo_jax.train --config=configs/labs/format_hacking.py --workdir=runs/mended \
        --config.reward.parts="(('numeric', 1.0), ('configs/labs/careless.py:bracketed_if_correct', 1.0))"

The exploit's share is the share of completions that are wrong and in brackets.
"""
from grpo_jax.configs.labs import habits


def get_config(preset='dr_grpo'):
    """The config of the demo with two digits, and demonstrations that blurt their answers in brackets."""
    config = habits.get_config(preset, blurts=0.5, habit='brackets', share=1.0, max_tokens=24)
    config.reward.parts = (('numeric', 1.0), ('configs/labs/careless.py:bracketed', 1.0))
    return config
