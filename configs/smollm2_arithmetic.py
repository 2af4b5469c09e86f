"""SmolLM2-135M-Instruct learns to add in a chat: think in columns, then answer, each inside its tags.

    python -m grpo_jax.train --config=configs/smollm2_arithmetic.py --workdir=runs/smollm2_arithmetic

Two thirds of the demonstrations of the cold start answer without thinking, and most of those are wrong; reinforcement
finds that thinking pays. --config.model.path=FOLDER names a folder with the model's files; without it they come from
the hub. Adapters want higher learning rates, and the last one to fall: --config.model.lora.rank=16
--config.supervised.optimizer.learning_rate=5e-4 --config.optimizer.learning_rate=2e-4
--config.optimizer.schedule=cosine.

Measured: 1 CPU core | 2,393 CPU-seconds | greedy 75.0 to 98.5 %, pass@1 40.0 to 95.5 %
"""
from grpo_jax.configs import default


def get_config(preset='dr_grpo'):
    """The config: 96 completions a step of up to 48 tokens."""
    config = default.get_config(preset)
    config.steps = 24
    config.model.path = 'HuggingFaceTB/SmolLM2-135M-Instruct'
    config.data.name = 'arithmetic'
    config.data.options = {'digits': 2, 'count': 4000, 'blurts': 0.65, 'wrong': 0.8, 'tags': True}
    config.data.prompts_per_step = 12
    config.data.max_prompt_tokens = 64
    config.data.chat = True
    config.data.system = 'Think inside <think> </think>, then answer inside <answer> </answer>.'
    config.rollout.group_size = 8
    config.rollout.max_tokens = 48
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 48
    config.reward.parts = (('numeric', 1.0), ('format', 0.2))
    if config.collection.gate == 'reward':  # the format is to teach only beside a right sum
        config.collection.gate = 'outcome'
    # without dead groups, packed rows take less time
    if config.collection.dead_groups == 'keep' and config.collection.gate != 'none':
        config.collection.dead_groups = 'drop'
    config.supervised.updates = 160
    config.supervised.batch = 16
    config.supervised.optimizer.learning_rate = 5e-5
    config.optimizer.learning_rate = 1e-5
    config.learner.pack_columns = 464  # a prompt and its 8 completions
    config.evaluation.prompts = 200
    config.evaluation.samples = 4
    config.checkpoint.every = 8
    return config
