"""The demo: three-digit addition from random weights, cold start then GRPO, minutes on a laptop's CPU.

    python -m grpo_jax.train --config=configs/arithmetic.py --workdir=runs/arithmetic

Measured: 2 CPU cores | 3 min 14 s | greedy 42.6 to 98.4 %, pass@1 31.9 to 92.6 %
"""
from grpo_jax.configs import default


def get_config(preset='dr_grpo'):
    """The config: a cold start on demonstrations that mostly blurt, then reinforcement of working the sum out."""
    config = default.get_config(preset)
    config.steps = 60
    config.model.path = 'configs/models/characters'
    config.model.random_init = True
    config.data.name = 'arithmetic'
    config.data.options = {'digits': 3, 'count': 20000, 'blurts': 0.65, 'wrong': 0.8}
    config.data.prompts_per_step = 32
    config.data.max_prompt_tokens = 8
    config.rollout.group_size = 8
    config.rollout.max_tokens = 32
    if config.algorithm.advantage == 'process':
        config.reward.step_rewards = 'calculator'  # each column is an equation
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 32
    if config.algorithm.advantage == 'gae':
        config.critic_optimizer.learning_rate = 1e-3
    config.supervised.updates = 450
    config.supervised.batch = 128
    config.supervised.optimizer.learning_rate = 3e-3
    config.supervised.optimizer.warmup = 20
    config.supervised.optimizer.schedule = 'cosine'
    # at the others' rate DPO makes the worse completion of a pair less likely and the better one no more so
    config.optimizer.learning_rate = 3e-5 if config.algorithm.surrogate == 'dpo' else 3e-4
    config.evaluation.every = 10
    config.checkpoint.every = 100
    return config
