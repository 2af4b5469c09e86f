"""GSM8K with an instruction model: the chat template, one verifiable reward.

    python -m grpo_jax.train --config=configs/gsm8k.py:dapo --workdir=runs/gsm8k \
        --config.model.path=Qwen/Qwen2.5-0.5B-Instruct

The data are read from GRPO_JAX_DATA/math (data/math by default) or, where that has none, from the hub:
openai/gsm8k. Sizes suit one TPU host of 8 chips with mesh.fsdp=8.
"""
import os

from grpo_jax.configs import default


def get_config(preset='dr_grpo'):
    """The config: 256 completions a step of up to 512 tokens."""
    config = default.get_config(preset)
    config.steps = 200
    config.model.path = 'Qwen/Qwen3-0.6B'
    config.model.dtype = 'bfloat16'
    config.data.name = 'gsm8k'
    config.data.options = {'folder': os.path.join(default.DATA, 'math')}
    config.data.path = 'openai/gsm8k'
    config.data.prompts_per_step = 32
    config.data.max_prompt_tokens = 256
    config.data.chat = True
    config.data.template = '{prompt}\nReason step by step, then write the final number after ####.'
    config.rollout.group_size = 8
    config.rollout.max_tokens = 512
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 512
    config.learner.remat = 'full'
    config.evaluation.every = 50
    return config
