"""MBPP with an instruction model: programs that pass unit tests in a sandbox (docs/sandbox.md).

    python -m grpo_jax.train --config=configs/code.py:dr_grpo --workdir=runs/code \
        --config.model.path=Qwen/Qwen2.5-0.5B-Instruct

Trains on tasks 601 to 974 and is evaluated on 11 to 510; --config.data.options.name=mbpp_sanitized takes those of them
that people checked. The data are read from GRPO_JAX_DATA/code (data/code by default) or, where that has none, from the
hub: google-research-datasets/mbpp. Sizes suit one TPU host of 8 chips with mesh.fsdp=8.
"""
import os

from grpo_jax.configs import default, gsm8k


def get_config(preset='dr_grpo'):
    """The config: 256 completions a step of up to 512 tokens; the prompt shows the tests, as is the custom for MBPP."""
    config = gsm8k.get_config(preset)
    config.data.name = 'code'
    config.data.options = {'folder': os.path.join(default.DATA, 'code'), 'name': 'mbpp'}
    config.data.path = 'google-research-datasets/mbpp'
    config.data.max_prompt_tokens = 512
    config.data.template = '{prompt}\nWrite the whole program in one block that starts with ```python.'
    config.reward.parts = (('code', 1.0),)
    config.reward.verifier = 'code'
    return config
