"""A lab: paid by the equation, the policy works the same sum out twice. Shaping by length takes the gain away.

    python -m grpo_jax.train --config=configs/labs/length_hacking.py --workdir=runs/hack
    python -m grpo_jax.train --config=configs/labs/length_hacking.py \
        --workdir=runs/mended --config.reward.length=overlong

The exploit's share shows in the metric length: a sum worked out once takes 32 tokens, twice 60.
"""
from configs import arithmetic


def get_config(preset='dr_grpo'):
    """The demo, a third of whose working is written twice."""
    config = arithmetic.get_config(preset)
    config.steps = 30
    config.data.name = 'habits'
    config.data.options = {'digits': 3, 'count': 20000, 'blurts': 0.5, 'wrong': 0.8, 'habit': 'repeat', 'share': 0.33}
    config.rollout.max_tokens = 64
    config.algorithm.fixed_length = 64
    config.reward.parts = (('numeric', 1.0), ('configs/labs/careless.py:equations', 1.0))
    config.reward.options.overlong.margin = 32
    config.evaluation.prompts = 64
    return config
