r"""Gemma-2-2B-it on GSM8K with PPO, as in verl. Not run here.

    python -m grpo_jax.train --config=configs/reproduce/gemma_2_2b_gsm8k.py --workdir=runs/reproduce \
        --config.mesh.fsdp=8 --config.model.path=FOLDER

Figures are those of docs/algo/baseline.md of volcengine/verl: 52.06 % after supervised fine-tuning on GSM8K and 64.02 %
after PPO. Its log's name tells the batch, 512 prompts, and lengths, 1,024 and 512 tokens; the rest is not stated.
The folder is that of the model after fine-tuning (`python -m grpo_jax.train` with the preset sft).
"""
from grpo_jax.configs import gsm8k

EXPECTED = {'figure': 'greedy', 'prompts': 1319, 'before': 0.521, 'after': 0.640, 'band': (0.614, 0.666)}


def get_config(preset='ppo'):
    """The config: 512 completions a step of up to 512 tokens."""
    config = gsm8k.get_config(preset)
    config.model.path = 'google/gemma-2-2b-it'
    config.data.prompts_per_step = 512
    config.data.max_prompt_tokens = 1024
    config.rollout.group_size = 1
    config.learner.minibatches = 4
    config.evaluation.prompts, config.evaluation.samples = 1319, 1
    return config
