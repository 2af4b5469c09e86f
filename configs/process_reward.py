"""A process reward model of real step labels: BIG-Bench Mistake, traces of a bracket stack, from random weights.

    python -m grpo_jax.reward_model --config=configs/process_reward.py --workdir=runs/process_reward

The model's tokenizer knows the brackets and the words of these traces. Nearly half of the problems, the longer ones,
are left out: an error in a step shows only by the line before it, which takes more updates to learn in longer texts.

Measured: 2 CPU cores | time not recorded | accuracy 97.7 % beside 97.0 % of the majority, AUC 0.909
"""
import os

from grpo_jax.configs import default


def get_config(preset='grpo'):
    """The config: labels say whether a step is the first wrong one; about 6 minutes on one core of a CPU."""
    config = default.get_config(preset)
    config.model.path = 'configs/models/brackets'
    config.model.random_init = True
    config.data.name = 'step_labels'
    config.data.options = {'folder': os.path.join(default.DATA, 'process'),
                           'tasks': ('bigbench_mistake_dyck_languages',), 'exchanges': 15}
    config.data.max_prompt_tokens = 32
    config.rollout.max_tokens = 176
    config.reward_model.objective = 'steps'
    config.supervised.updates = 800
    config.supervised.batch = 16
    config.supervised.optimizer.learning_rate = 2e-3
    config.supervised.optimizer.warmup = 20
    config.supervised.optimizer.schedule = 'cosine'
    config.evaluation.prompts = 1000
    config.checkpoint.every = 400
    return config
