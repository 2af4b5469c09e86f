"""MBPP with an instruction model: programs that pass unit tests in a sandbox (docs/sandbox.md).

    python -m grpo_jax.train --config=configs/code.py:dr_grpo --workdir=runs/code \
        --config.model.path=Qwen/Qwen2.5-0.5B-Instruct

Trains on tasks 601 to 974 and is evaluated on 11 to 510; --config.data.options.name=mbpp_sanitized takes those of them
that people checked. The data are read from GRPO_JAX_DATA. Sizes suit one TPU host of 8 chips with mesh.fsdp=8.
"""
import os

from configs import default


def get_config(preset='dr_grpo'):
    """256 completions a step of up to 512 tokens; the prompt shows the tests, as is the custom for MBPP."""
    config = default.get_config(preset)
    config.steps = 200
    config.model.path = 'Qwen/Qwen3-0.6B'
    config.model.dtype = 'bfloat16'
    config.data.name = 'code'
    config.data.options = {'folder': os.path.join(default.DATA, 'code'), 'name': 'mbpp'}
    config.data.prompts_per_step = 32
    config.data.max_prompt_tokens = 512
    config.data.chat = True
    config.data.template = '{prompt}\nWrite the whole program in one block that starts with ```python.'
    config.rollout.group_size = 8
    config.rollout.max_tokens = 512
    config.reward.parts = (('code', 1.0),)
    config.reward.options = {'code': {'all_pass': True, 'timeout': 10.0, 'memory_mib': 512}}
    config.reward.verifier = 'code'
    config.algorithm.fixed_length = 512
    config.learner.microbatches = 4
    config.learner.remat = True
    config.evaluation.every = 50
    return config
