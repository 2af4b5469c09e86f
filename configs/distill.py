"""Distillation: another, smaller model learns what a run wrote into its rollouts folder (with --config.log.rollouts=1).

    python -m grpo_jax.train --config=configs/distill.py:sft --workdir=runs/student --config.model.path=SMALLER \
        --config.data.options.folder=runs/teacher/rollouts

With :dpo and --config.collection.source=pairs, the worst completion of each prompt is the rejected one. Set
data.template, data.chat and data.system as the teacher had them.
"""
from grpo_jax.configs import default


def get_config(preset='sft'):
    """The config: the teacher's right completions, each once."""
    config = default.get_config(preset)
    config.data.name = 'rollouts'
    config.data.options = {'folder': ''}
    config.data.max_prompt_tokens = 512
    config.rollout.max_tokens = 1024
    config.optimizer.learning_rate = 1e-5
    return config
