"""A process reward model of the arithmetic demo: is each column, and the answer, as it should be? Minutes on a CPU.

    python -m grpo_jax.reward_model --config=configs/arithmetic_reward.py --workdir=runs/arithmetic_reward

It then drives process supervision of the demo, in place of the calculator:

    python -m grpo_jax.train --config=configs/arithmetic.py:grpo_process --workdir=runs/process \
        --config.reward.steps=process --config.reward.options.process.folder=runs/arithmetic_reward/reward_model
"""
from configs import arithmetic


def get_config(preset='grpo'):
    """Labels by rule: sums of which half have a wrong digit somewhere."""
    config = arithmetic.get_config(preset)
    config.data.name = 'arithmetic_steps'
    config.data.options = dict(config.data.options) | {'blurts': 0.3, 'wrong': 0.5, 'slips': 0.6}
    config.reward_model.objective = 'steps'
    config.reward_model.separator = ' '
    config.supervised.steps = 300
    config.supervised.batch = 64
    return config
