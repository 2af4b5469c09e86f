"""A lab: paid by the equation, the policy works the same sum out twice. Shaping by length takes the gain away.

    python -m grpo_jax.train --config=configs/labs/length_hacking.py --workdir=runs/hack
    python -m grpo_jax.train --config=configs/labs/length_hacking.py \
        --workdir=runs/mended --config.reward.length=overlong

The exploit's share is that of completions with more equations than the sum has columns; it shows in the metric length.
"""
from configs import arithmetic


def get_config(preset='dr_grpo'):
    """The demo with two digits, a third of whose working is written twice."""
    config = arithmetic.get_config(preset)
    config.steps = 20
    config.data.name = 'habits'
    config.data.options = {'digits': 2, 'count': 6000, 'blurts': 0.4, 'wrong': 0.8, 'habit': 'repeat', 'share': 0.33}
    config.data.max_prompt_tokens = 6
    config.rollout.max_tokens = 48
    config.algorithm.fixed_length = 48
    config.reward.parts = (('numeric', 1.0), ('configs/labs/careless.py:equations', 1.0))
    # of overlong: worked out once a sum takes some 20 tokens, twice 36, which must cost more than two equations pay
    config.reward.options.overlong.margin = 24
    config.reward.length_weight = 2.0
    config.supervised.steps = 250
    config.supervised.batch = 64
    config.evaluation.prompts = 64
    config.log.rollouts = 1
    return config
