"""What the labs of exploits share: the demo with two digits, demonstrations with a habit, and every rollout kept."""
from grpo_jax.configs import arithmetic


def get_config(preset, *, blurts, habit, share, max_tokens):
    """The config of the demo with the options of grpo_jax/data/habits.py, for completions of up to max_tokens."""
    config = arithmetic.get_config(preset)
    config.steps = 20
    config.data.name = 'habits'
    config.data.options = {'digits': 2, 'count': 6000, 'blurts': blurts, 'wrong': 0.8, 'habit': habit, 'share': share}
    config.data.max_prompt_tokens = 6
    config.rollout.max_tokens = max_tokens
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = max_tokens
    config.supervised.updates = 250
    config.supervised.batch = 64
    config.evaluation.every = 0
    config.evaluation.prompts = 64
    config.log.rollouts = 1
    return config
