"""What most labs share: sums of two digits, and a model so small that a run takes a minute of one core."""
from grpo_jax.configs import arithmetic


def get_config(preset='dr_grpo'):
    """The config of the demo with two digits and 20 steps; half of its demonstrations blurt."""
    config = arithmetic.get_config(preset)
    config.steps = 20
    config.model.path = 'configs/models/letters'
    config.data.options = {'digits': 2, 'count': 6000, 'blurts': 0.5, 'wrong': 0.8}
    config.data.prompts_per_step = 32
    config.data.max_prompt_tokens = 6
    config.rollout.max_tokens = 24
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 24
    config.supervised.updates = 500
    config.supervised.batch = 64
    config.evaluation.every = 0
    config.evaluation.prompts = 32
    config.evaluation.samples = 4
    return config
