r"""DeepSeekMath-RL as in its paper (arXiv 2402.03300, section 4.2): the first GRPO.

    python -m grpo_jax.train --config=recipes/deepseekmath --workdir=runs/deepseekmath --config.mesh.fsdp=8

Section 4.2: DeepSeekMath-Instruct 7B, 64 completions of each question of up to 1,024 tokens, a batch of 1,024 and thus
16 questions, one update a rollout, learning rate 1e-6, KL coefficient 0.04.

Differs: answers are judged by mathematics, and the prompts are MATH's alone; the paper has a learned reward model of
7 billion parameters (its learning rate was 2e-5) and 144 thousand questions of GSM8K and MATH. A reward model of yours:
--config.reward.parts="(('model', 1.0), ('math', 0.0))" with --config.reward.options.model.folder=DIR. Not stated, and
this file's own choice: steps, temperature, the clip (without effect with one update), the longest prompt.
"""
from grpo_jax.configs import math


def get_config(preset='grpo'):
    """The config: 1,024 completions a step of up to 1,024 tokens."""
    config = math.get_config(preset)
    config.steps = 500
    config.model.path = 'deepseek-ai/deepseek-math-7b-instruct'
    config.data.prompts_per_step = 16
    config.data.max_prompt_tokens = 512
    config.rollout.group_size = 64
    config.rollout.max_tokens = 1024
    config.optimizer.learning_rate = 1e-6
    config.learner.epochs = 1
    config.learner.minibatches = 1
    return config
