"""A lab: paid by the equation, the policy works the same sum out twice. Shaping by length takes the gain away.

    python -m grpo_jax.train --config=configs/labs/length_hacking.py --workdir=runs/hack
    python -m grpo_jax.train --config=configs/labs/length_hacking.py \
        --workdir=runs/mended --config.reward.length_shaping=overlong --config.reward.options.overlong.margin=24

The exploit's share: completions with more equations than the sum has columns; it shows in the metric length.
"""
from grpo_jax.configs.labs import habits

REMEDY = {'reward.length_shaping': 'overlong', 'reward.options.overlong.margin': 24}


def get_config(preset='dr_grpo'):
    """The config of the demo with two digits; a third of the demonstrations write the working twice."""
    config = habits.get_config(preset, blurts=0.4, habit='repeat', share=0.33, max_tokens=48)
    config.reward.parts = (('numeric', 1.0), ('configs/labs/careless.py:equations', 1.0))
    # of overlong: worked out once a sum takes some 20 tokens, twice 36, which must cost more than two equations pay
    config.reward.options.overlong.margin = 24
    config.reward.length_shaping_weight = 2.0
    return config
