"""A lab: in groups that are all wrong a reward of 0.01 for brevity teaches; with the gate outcome it does not.

    python -m grpo_jax.train --config=configs/labs/shaped_reward.py --workdir=runs/phantom
    python -m grpo_jax.train --config=configs/labs/shaped_reward.py --workdir=runs/gated \
        --config.collection.gate=outcome

Normalized in its group, a difference of 0.001 is an advantage of full size: where nothing is right yet, the policy
learns to be short, and the sums that it could have worked out are never tried.
"""
from grpo_jax.configs import arithmetic


def get_config(preset='grpo'):
    """The config of the demo with a cold start that leaves most groups all wrong, and a term for length."""
    config = arithmetic.get_config(preset)
    config.steps = 40
    config.data.options = {'digits': 2, 'count': 6000, 'blurts': 0.92, 'wrong': 1.0}
    config.data.max_prompt_tokens = 6
    config.rollout.max_tokens = 24
    config.supervised.updates = 400
    config.supervised.batch = 128
    config.reward.length_shaping = 'overlong'
    config.reward.options.overlong.margin = 23  # from the first token on
    config.reward.length_shaping_weight = 0.01
    config.collection.gate = 'none'
    config.evaluation.prompts = 128
    return config
