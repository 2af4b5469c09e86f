r"""Qwen2.5-1.5B-Instruct on GSM8K with eight devices, as in AReaL. Not run here.

    python -m grpo_jax.train --config=configs/reproduce/qwen2_5_1_5b_gsm8k.py --workdir=runs/reproduce \
        --config.mesh.fsdp=8

Figures and settings are those of examples/math of inclusionAI/AReaL (README.md, gsm8k_grpo.yaml; eight A800, seed 1):
256 prompts x 4 completions of up to 1,024 tokens, ten epochs, learning rate 6e-6, weight decay 0.017, clip 0.4, no KL
penalty. There, completions are up to two versions old and advantages are normalized over the batch as well; the reward
of held-out completions is evaluated. Here all is on-policy, and the template is that of configs/math.py.
"""
from grpo_jax.configs import math

EXPECTED = {'figure': 'pass@1', 'prompts': 1319, 'before': None, 'after': 0.778, 'band': (0.755, 0.800)}


def get_config(preset='grpo'):
    """The config: 1,024 completions a step of up to 1024 tokens."""
    config = math.get_config(preset)
    config.steps = 290
    config.model.path = 'Qwen/Qwen2.5-1.5B-Instruct'
    config.data.name = 'gsm8k'
    config.data.path = 'openai/gsm8k'
    config.data.prompts_per_step = 256
    config.data.max_prompt_tokens = 256
    config.rollout.group_size = 4
    if config.algorithm.kl != 'none' and config.algorithm.kl_placement == 'loss':
        config.algorithm.kl, config.algorithm.kl_coef = 'none', 0.0
    config.optimizer.learning_rate, config.optimizer.weight_decay = 6e-6, 0.017
    config.evaluation.prompts, config.evaluation.samples = 1319, 1
    return config
