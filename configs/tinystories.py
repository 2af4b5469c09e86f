"""A real pretrained model: stories260K learns to finish a story with a requested word, within a budget.

    python -m grpo_jax.train --config=configs/tinystories.py --workdir=runs/tinystories

The model's folder is read from GRPO_JAX_DATA (data/ by default). The reward is 1 for using the word, less 0.5 for a
story that does not end by itself within 64 tokens.

Measured: 2 CPU cores | 4 min 27 s | reward -0.39 to 0.97
"""
import os

from grpo_jax.configs import default


def get_config(preset='dr_grpo'):
    """The config of a run that takes a few minutes on a laptop's CPU."""
    config = default.get_config(preset)
    config.steps = 30
    config.model.path = os.path.join(default.DATA, 'models', 'stories260K')
    config.data.name = 'tinystories'
    config.data.prompts_per_step = 16
    config.data.max_prompt_tokens = 48
    config.rollout.group_size = 16
    config.rollout.max_tokens = 64
    config.reward.parts = (('contains', 1.0),)
    config.reward.truncated_reward = -0.5
    config.reward.verifier = ''
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 64
    config.optimizer.learning_rate = 1e-3
    config.evaluation.prompts = 24
    return config
