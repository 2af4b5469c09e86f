r"""DeepSeek-R1-Zero as in its paper (arXiv 2501.12948, sections 2.1 and 2.2): a base model, rule rewards, no tuning.

    python -m grpo_jax.train --config=recipes/r1_zero --workdir=runs/r1_zero --config.mesh.fsdp=64

Section 2.1: 16 completions of up to 32,768 tokens at temperature 1, a rollout of 8,192 completions in 16 minibatches of
32 questions, one epoch, learning rate 3e-6, KL coefficient 0.001, 10,400 updates, the reference renewed every 400. A
step here is a rollout: 512 questions, 650 steps, renewed every 25. Section 2.2: accuracy and format, of equal weight.
The template is table 1's, with the answer in a box, as section 2.2 asks for in mathematics.

Differs: the paper's model is DeepSeek-V3-Base, a mixture of experts; the one here is that of DeepSeek-R1-Zero-Qwen-32B.
From update 8,200 (step 512) on completions have up to 65,536 tokens there: for that, a second run with the first one's
export as its model. The prompts are MATH's alone. Not stated for R1-Zero: the clip, here that of R1's first stage
(section 3.2.1), and the longest prompt.
"""
from grpo_jax.configs import math

TEMPLATE = (
    'A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant '
    'first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning '
    'process and answer are enclosed within <think>...</think> and <answer>...</answer> tags, respectively, i.e., '
    '<think> reasoning process here </think> <answer> answer here </answer>. User: {prompt} Put the final answer '
    'within \\boxed{}. Assistant:')


def get_config(preset='deepseek_r1'):
    """The config: 8,192 completions a step of up to 32,768 tokens."""
    config = math.get_config(preset)
    config.steps = 10400 // 16
    config.model.path = 'Qwen/Qwen2.5-32B'
    config.data.chat = False
    config.data.template = TEMPLATE
    config.data.prompts_per_step = 512
    config.data.max_prompt_tokens = 1024
    config.rollout.group_size = 16
    config.rollout.max_tokens = 32768
    config.rollout.temperature = 1.0
    config.reward.parts = (('math', 1.0), ('format', 1.0))
    if config.collection.reference == 'hard':
        config.collection.reference_every = 400 // 16
    config.optimizer.learning_rate = 3e-6
    config.learner.epochs = 1
    config.learner.minibatches = 16
    return config
