"""Process supervision on real GSM8K steps: chains of expressions, each worked out and rewarded.

    python -m grpo_jax.train --config=configs/gsm8k_steps.py --workdir=runs/steps
"""
import os

from configs import default


def get_config(preset='grpo_process'):
    """Cold start on chains with slips, then reinforcement by a reward for each step."""
    config = default.get_config(preset)
    config.steps = 60
    config.model.path = 'configs/models/characters'
    config.model.random_init = True
    config.data.name = 'gsm8k_steps'
    config.data.options = {'folder': os.path.join(default.DATA, 'math'), 'steps': 3, 'slips': 0.5}
    config.data.prompts_per_step = 32
    config.data.max_prompt_tokens = 40
    config.rollout.group_size = 8
    config.rollout.max_tokens = 56
    config.reward.parts = (('calculator', 1.0), ('numeric', 1.0))
    config.reward.steps = 'calculator'
    config.algorithm.fixed_length = 56
    config.supervised.steps = 3000
    config.supervised.batch = 64
    config.supervised.optimizer.learning_rate = 2e-3
    config.supervised.optimizer.warmup = 20
    config.supervised.optimizer.schedule = 'cosine'
    config.optimizer.learning_rate = 3e-4
    config.checkpoint.every = 500
    return config
