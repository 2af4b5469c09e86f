"""A lab: sums of one digit, which the cold start has mastered. Nearly every group is all right, and teaches nothing.

    python -m grpo_jax.train --config=configs/labs/dead_all_right.py --workdir=runs/right
    python -m grpo_jax.train --config=configs/labs/dead_all_right.py --workdir=runs/mended \
        --config.data.options.digits=2 --config.data.options.blurts=0.5
"""
from grpo_jax.configs.labs import sums

REMEDY = {'data.options.digits': 2, 'data.options.blurts': 0.5}


def get_config(preset='dr_grpo'):
    """The config of labs/sums.py with one digit, and demonstrations that all work the sum out."""
    config = sums.get_config(preset)
    config.data.options.digits = 1
    config.data.options.blurts = 0.0
    config.evaluation.prompts = 8  # the test split has no more
    return config
