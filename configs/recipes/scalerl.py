r"""ScaleRL as in its paper (arXiv 2510.13786, sections 2 and 4, appendix A.3), without its asynchrony.

    python -m grpo_jax.train --config=recipes/scalerl --workdir=runs/scalerl --config.mesh.fsdp=16

Appendix A.3: 48 prompts x 16 completions an update, 14,336 tokens of which 12,288 are thinking, AdamW with a constant
learning rate of 5e-7 after 100 updates, eps 1e-15 and weight decay 0.01, rewards of 1 and -1, here 2 and 0. Section 4:
CISPO, dead groups dropped, prompts retired from a pass rate of 0.9 on. Appendix A.17.2: caps of 4, 5 and 8 differ
little. Logits are float32 here as there.

Differs: here each update is on policy, and there completions are up to 8 updates old (PipelineRL); the end of thinking
is forced without the words "Okay, time is up. Let me stop thinking and formulate a final answer now."; the prompts are
MATH's, and not Polaris-53K; the model is an instruction model, and not the authors' own of 8 billion parameters. Not
stated, and this file's own choice: temperature and steps.
"""
from grpo_jax.configs import math


def get_config(preset='scalerl'):
    """The config: 768 completions a step of up to 14,336 tokens."""
    config = math.get_config(preset)
    config.steps = 5000
    config.model.path = 'meta-llama/Llama-3.1-8B-Instruct'
    config.data.template = (
        '{prompt}\nThink between <think> and </think>, then put the final answer within \\boxed{}.')
    config.data.prompts_per_step = 48
    config.data.max_prompt_tokens = 2048
    config.rollout.group_size = 16
    config.rollout.max_tokens = 14336
    config.rollout.thinking_tokens = 12288
    config.reward.parts = (('math', 2.0),)
    config.collection.retire_above = 0.9
    config.algorithm.cispo_cap = 5.0
    config.optimizer.learning_rate = 5e-7
    config.optimizer.warmup = 100
    config.optimizer.eps = 1e-15
    config.optimizer.weight_decay = 0.01
    config.learner.minibatches = 1
    return config
