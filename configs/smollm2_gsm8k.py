"""SmolLM2-135M-Instruct on GSM8K: whole solutions of grade-school problems, at the limit of what such a model can do.

    python -m grpo_jax.train --config=configs/smollm2_gsm8k.py --workdir=runs/smollm2_gsm8k

The cold start shows solutions of the training split, with their calculator annotations. The data are read from
GRPO_JAX_DATA/math or from the hub. --config.model.path=FOLDER names a folder with the model's files; without it they
come from the hub.

Measured: 1 CPU core | 2,311 CPU-seconds | pass@1 1.5 to 1.6 %: nothing is learned in these steps
"""
import os

from grpo_jax.configs import default


def get_config(preset='dr_grpo'):
    """The config: 64 completions a step of up to 160 tokens."""
    config = default.get_config(preset)
    config.steps = 16
    config.model.path = 'HuggingFaceTB/SmolLM2-135M-Instruct'
    config.data.name = 'gsm8k'
    config.data.options = {'folder': os.path.join(default.DATA, 'math')}
    config.data.path = 'openai/gsm8k'
    config.data.prompts_per_step = 8
    config.data.max_prompt_tokens = 160
    config.data.chat = True
    config.data.system = 'Write the final number after ####.'
    config.rollout.group_size = 8
    config.rollout.max_tokens = 160
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 160
    # most groups are dead: without them, packed rows take a fraction of the time
    if config.collection.dead_groups == 'keep' and config.collection.gate != 'none':
        config.collection.dead_groups = 'drop'
    config.supervised.updates = 40
    config.supervised.batch = 8
    config.supervised.optimizer.learning_rate = 5e-5
    config.optimizer.learning_rate = 1e-5
    config.learner.pack_columns = 1440  # a prompt and its 8 completions
    config.evaluation.prompts = 200
    config.evaluation.samples = 4
    config.checkpoint.every = 8
    return config
