"""A process reward model of the arithmetic demo, which judges each column and the answer; 2 minutes on a CPU.

It starts from the demo's cold start, which knows the columns; from random weights so few labels teach it little.

    python -m grpo_jax.supervised --config=configs/arithmetic.py --workdir=runs/sft
    python -m grpo_jax export --workdir=runs/sft --out=runs/arithmetic_policy
    python -m grpo_jax.reward_model --config=configs/arithmetic_reward.py --workdir=runs/arithmetic_reward

Then it drives process supervision of the demo, in place of the calculator:

    python -m grpo_jax.train --config=configs/arithmetic.py:grpo_process --workdir=runs/process \\
        --config.reward.step_rewards=process --config.reward.options.process.folder=runs/arithmetic_reward/reward_model

Measured: 1 CPU | 2 min | no figure on record
"""
from grpo_jax.configs import arithmetic


def get_config(preset='grpo'):
    """The config, with labels by rule: 6 of 10 sums that are worked out have a wrong digit somewhere."""
    config = arithmetic.get_config(preset)
    config.model.path = 'runs/arithmetic_policy'
    config.model.random_init = False
    config.data.name = 'arithmetic_steps'
    config.data.options = {'digits': 3, 'count': 20000, 'blurts': 0.3, 'wrong': 0.5, 'slips': 0.6}
    config.reward_model.objective = 'steps'
    config.reward_model.separator = ' '
    config.supervised.updates = 200
    config.supervised.batch = 64
    config.supervised.optimizer.learning_rate = 1e-3
    return config
