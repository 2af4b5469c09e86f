"""Process supervision on real GSM8K steps: chains of expressions, each worked out and rewarded.

    python -m grpo_jax.train --config=configs/gsm8k_steps.py --workdir=runs/steps

Measured: 1 CPU core | time not recorded | reward 0.519 to 0.785, pass@1 20.7 to 19.1 %
"""
from grpo_jax.configs import gsm8k_calculator


def get_config(preset='grpo_process'):
    """The config: a cold start on chains with slips, then a reward for each step; 25 minutes on one core of a CPU."""
    config = gsm8k_calculator.get_config(preset)
    config.data.name = 'gsm8k_steps'
    config.data.options = {'folder': config.data.options.folder, 'steps': 3, 'slips': 0.5}
    config.data.prompts_per_step = 32
    config.data.max_prompt_tokens = 40
    config.rollout.max_tokens = 56
    config.reward.parts = (('calculator', 1.0), ('numeric', 1.0))
    config.reward.step_rewards = 'calculator'
    config.reward.steps_with_outcome = True  # the answer is right or wrong, whatever the steps before it
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 56
    config.supervised.updates = 1000
    config.evaluation.prompts = 256
    return config
