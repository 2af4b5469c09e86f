r"""MATH with an instruction model: the chat template, answers in \boxed{} judged by exact mathematics.

    python -m grpo_jax.train --config=configs/math.py:dapo --workdir=runs/math \
        --config.model.path=Qwen/Qwen2.5-1.5B-Instruct

The data are read from GRPO_JAX_DATA/math (data/math by default) or, where that has none, from the hub:
EleutherAI/hendrycks_math. Sizes suit one TPU host of 8 chips with mesh.fsdp=8.
"""
import os

from grpo_jax.configs import default, gsm8k


def get_config(preset='dr_grpo'):
    """The config: 256 completions a step of up to 1024 tokens."""
    config = gsm8k.get_config(preset)
    config.steps = 300
    config.data.name = 'math'
    config.data.options = {'folder': os.path.join(default.DATA, 'math')}
    config.data.path = 'EleutherAI/hendrycks_math'
    config.data.max_prompt_tokens = 512
    config.data.template = '{prompt}\nReason step by step, and put the final answer within \\boxed{}.'
    config.rollout.max_tokens = 1024
    config.reward.parts = (('math', 1.0),)
    config.reward.verifier = 'math'
    config.algorithm.fixed_length = 1024
    return config
