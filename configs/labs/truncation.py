"""A lab: the run of entropy_collapse, whose broken policy no longer ends its completions.

    python -m grpo_jax.train --config=configs/labs/truncation.py --workdir=runs/truncation
    python -m grpo_jax.train --config=configs/labs/truncation.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3.3e-4
"""
from grpo_jax.configs.labs.entropy_collapse import REMEDY, get_config

__all__ = ['REMEDY', 'get_config']
