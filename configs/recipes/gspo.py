r"""GSPO with what its paper says (arXiv 2507.18071, section 5.1), which is little.

    python -m grpo_jax.train --config=recipes/gspo --workdir=runs/gspo --config.mesh.fsdp=8

Section 5.1: each rollout in four minibatches, clip 3e-4 and 4e-4. The objective is printed without its KL term, for
brevity; whether there was one is not said, and here there is none.

Differs: the paper has a mixture of experts, tuned from Qwen3-30B-A3B-Base, and prompts of its own; here it is a dense
model of the same family, and MATH. Not stated, and this file's own choice: everything else, the number of completions,
the batch, learning rate, temperature and lengths among it.
"""
from grpo_jax.configs import math


def get_config(preset='gspo'):
    """The config: 1,024 completions a step of up to 8,192 tokens."""
    config = math.get_config(preset)
    config.steps = 300
    config.model.path = 'Qwen/Qwen3-8B'
    config.data.prompts_per_step = 64
    config.data.max_prompt_tokens = 1024
    config.rollout.group_size = 16
    config.rollout.max_tokens = 8192
    config.optimizer.learning_rate = 1e-6
    config.learner.minibatches = 4
    return config
