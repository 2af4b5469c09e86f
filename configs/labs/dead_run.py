"""A lab: the run of entropy_collapse, in which no completion is right after the first update, to its end.

    python -m grpo_jax.train --config=configs/labs/dead_run.py --workdir=runs/dead
    python -m grpo_jax.train --config=configs/labs/dead_run.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3e-4
"""
from grpo_jax.configs.labs.entropy_collapse import REMEDY, get_config

__all__ = ['REMEDY', 'get_config']
