r"""Dr. GRPO as in its authors' script for Oat-Zero-7B (arXiv 2503.20783; examples/qwen2.5-math-7b.sh).

    python -m grpo_jax.train --config=recipes/dr_grpo --workdir=runs/dr_grpo --config.mesh.fsdp=8

The script: Qwen2.5-Math-7B with the template of Qwen-Math, 128 prompts x 8 completions of up to 3,000 tokens at
temperature 1, one epoch over a rollout, a constant learning rate of 1e-6, no KL; a row's sum is divided by 3,000.

Differs: all of MATH's train split, and not its levels 3 to 5. Not stated as a number of updates: the script's
train_batch_size of 128 beside 1,024 completions a rollout may mean 8 updates; here it is one. The clip of 0.2 is the
usual one, and without effect with one update. The number of steps is this file's own choice.
"""
from grpo_jax.configs import math


def get_config(preset='dr_grpo'):
    """The config: 1,024 completions a step of up to 3,000 tokens."""
    config = math.get_config(preset)
    config.steps = 300
    config.model.path = 'Qwen/Qwen2.5-Math-7B'
    config.data.system = 'Please reason step by step, and put your final answer within \\boxed{}.'
    config.data.template = '{prompt}'
    config.data.prompts_per_step = 128
    config.data.max_prompt_tokens = 1024
    config.rollout.group_size = 8
    config.rollout.max_tokens = 3000
    config.rollout.temperature = 1.0
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 3000
    config.optimizer.learning_rate = 1e-6
    config.learner.epochs = 1
    config.learner.minibatches = 1
    return config
