r"""Qwen2.5-0.5B-Instruct on GSM8K with one device, as in slime. Not run here.

    python -m grpo_jax.train --config=configs/reproduce/qwen2_5_0_5b_gsm8k.py --workdir=runs/reproduce

Figures and settings are those of the pull request 1835 of THUDM/slime (one GB10, 71 minutes): 20 prompts x 8
completions, 100 steps, learning rate 1e-6, clip 0.2 and 0.28, answers in \boxed{}, all 1,319 test problems. It does not
state temperature, completion budget, KL penalty and template: here they are 1, 1,024 tokens, none, and that of
configs/math.py.
"""
from grpo_jax.configs import math

# a figure of evaluations.jsonl over so many prompts; the band is the 95 % interval of such a share
EXPECTED = {'figure': 'greedy', 'prompts': 1319, 'before': 0.436, 'after': 0.502, 'band': (0.475, 0.529)}


def get_config(preset='dapo'):
    """The config: 160 completions a step of up to 1024 tokens."""
    config = math.get_config(preset)
    config.steps = 100
    config.model.path = 'Qwen/Qwen2.5-0.5B-Instruct'
    config.data.name = 'gsm8k'
    config.data.path = 'openai/gsm8k'
    config.data.prompts_per_step = 20
    config.data.max_prompt_tokens = 256
    config.collection.dead_groups = 'keep'
    config.algorithm.weights = 'sequence_mean'
    config.evaluation.prompts, config.evaluation.samples = 1319, 1
    return config
