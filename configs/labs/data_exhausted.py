"""A lab: all 75 sums of one digit are mastered, so that a curriculum retires them within three steps.

    python -m grpo_jax.train --config=configs/labs/data_exhausted.py --workdir=runs/exhausted
    python -m grpo_jax.train --config=configs/labs/data_exhausted.py --workdir=runs/mended \
        --config.data.options.digits=2 --config.data.options.blurts=0.5
A fourth step would find no prompt: it ends the run with a line that says so.
"""
from grpo_jax.configs.labs import dead_all_right

REMEDY = dead_all_right.REMEDY


def get_config(preset='dr_grpo'):
    """The config of labs/dead_all_right.py with the remedy of its monitor: prompts that are answered right retire."""
    config = dead_all_right.get_config(preset)
    config.steps = 3
    config.collection.retire_above = 0.9
    return config
