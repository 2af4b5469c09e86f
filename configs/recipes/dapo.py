r"""DAPO as in its paper (arXiv 2503.14476, sections 2.3, 3 and 4.1): a base model of 32B, long chains.

    python -m grpo_jax.train --config=recipes/dapo --workdir=runs/dapo --config.mesh.fsdp=64

Section 4.1: 512 prompts x 16 completions of up to 20,480 tokens, 16 updates a rollout, AdamW with a constant learning
rate of 1e-6 after 20 rollouts, clip 0.2 and 0.28, the soft overlong penalty over the last 4,096 tokens; eq. 7: a right
answer is paid 1 and a wrong one -1, which is here 2 and 0. Section 2.3: no KL. From the authors' script: temperature,
weight decay, the gradient's bound, at most ten draws.

Differs: the prompts are MATH's, and not DAPO-Math-17K; those are read by --config.data.name=files with its id and
fields (docs/data.md). Not stated, and this file's own choice: how many steps, and how a completion is asked for.
"""
from grpo_jax.configs import math


def get_config(preset='dapo'):
    """The config: 8,192 completions a step of up to 20,480 tokens."""
    config = math.get_config(preset)
    config.steps = 600
    config.model.path = 'Qwen/Qwen2.5-32B'
    config.data.chat = False
    config.data.template = (
        'Solve the following math problem step by step. Put the final answer within \\boxed{}.\n\n{prompt}\n\n')
    config.data.prompts_per_step = 512
    config.data.max_prompt_tokens = 2048
    config.rollout.group_size = 16
    config.rollout.max_tokens = 20480
    config.rollout.temperature = 1.0
    config.reward.parts = (('math', 2.0),)
    config.reward.length_shaping = 'overlong'
    config.reward.options.overlong.margin = 4096
    config.collection.max_draws = 10
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup = 20 * 16    # updates: 20 rollouts
    config.optimizer.weight_decay = 0.1
    config.optimizer.max_grad_norm = 1.0
    config.learner.epochs = 1
    config.learner.minibatches = 16
    return config
