"""x"""
import os

from configs import default


def get_config(preset='grpo'):
    config = default.get_config(preset)
    config.model.path = 'configs/models/brackets'
    config.model.random_init = True
    config.data.name = 'step_labels'
    config.data.options = {'folder': os.path.join(default.DATA, 'process'),
                           'tasks': ('bigbench_mistake_dyck_languages',), 'exchanges': 15}
    config.data.max_prompt_tokens = 48
    config.rollout.max_tokens = 256
    config.reward_model.objective = 'steps'
    config.supervised.steps = 1000
    config.supervised.batch = 8
    config.supervised.optimizer.learning_rate = 2e-3
    config.supervised.optimizer.warmup = 20
    config.supervised.optimizer.schedule = 'cosine'
    config.evaluation.prompts = 1000
    config.checkpoint.every = 500
    return config
