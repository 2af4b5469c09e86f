"""SmolLM2-135M-Instruct on SVAMP: an expression for a short word problem, whose value is the answer, on a laptop's CPU.

    python -m grpo_jax.train --config=configs/smollm2_svamp.py --workdir=runs/smollm2_svamp

A few supervised updates show the form of an answer, and reinforcement does the rest. The verifier works the expression
out: such a model learns which operation a problem asks for, but not to multiply. 30 % of the stories are held out; the
others come with four more sets of numbers, so that their answers are not memorized.
The data are read from GRPO_JAX_DATA/math, which must hold svamp.jsonl. --config.model.path=FOLDER names a folder with
the model's files; without it they come from the hub.

Measured: 1 CPU core | 4,588 CPU-seconds | greedy 19.5 to 34.5 %, pass@1 11.1 to 32.3 %
"""
import os

from grpo_jax.configs import default


def get_config(preset='dr_grpo'):
    """The config: 192 completions a step of up to 20 tokens."""
    config = default.get_config(preset)
    config.steps = 120
    config.model.path = 'HuggingFaceTB/SmolLM2-135M-Instruct'
    config.data.name = 'svamp'
    folder = os.path.join(default.DATA, 'math')
    config.data.options = {'folder': folder, 'held_out': 0.3, 'results': False, 'variants': 4}
    config.data.prompts_per_step = 24
    config.data.max_prompt_tokens = 112
    config.data.chat = True
    config.data.system = 'Answer with an expression.'
    config.rollout.group_size = 8
    config.rollout.max_tokens = 20
    if config.algorithm.weights == 'fixed_length':
        config.algorithm.fixed_length = 20
    config.reward.parts, config.reward.verifier = (('expression', 1.0),), 'expression'
    # without dead groups, packed rows take less time
    if config.collection.dead_groups == 'keep' and config.collection.gate != 'none':
        config.collection.dead_groups = 'drop'
    config.supervised.updates = 6
    config.supervised.batch = 16
    config.supervised.optimizer.learning_rate = 5e-5
    config.optimizer.learning_rate = 1e-5
    config.learner.pack_columns = 272  # a prompt and its 8 completions
    config.evaluation.prompts = 200
    config.evaluation.samples = 4
    config.checkpoint.every = 20
    return config
