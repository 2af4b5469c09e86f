"""A lab: the run of entropy_collapse, whose first update breaks the policy. All other symptoms follow from it.

    python -m grpo_jax.train --config=configs/labs/large_updates.py --workdir=runs/large
    python -m grpo_jax.train --config=configs/labs/large_updates.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3e-4
"""
from grpo_jax.configs.labs.entropy_collapse import REMEDY, get_config

__all__ = ['REMEDY', 'get_config']
