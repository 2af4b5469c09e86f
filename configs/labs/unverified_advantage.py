"""A lab: the run of shaped_reward. A term of 0.01 for brevity is most of the advantage: most groups are all wrong.

    python -m grpo_jax.train --config=configs/labs/unverified_advantage.py --workdir=runs/phantom
    python -m grpo_jax.train --config=configs/labs/unverified_advantage.py --workdir=runs/gated \
        --config.collection.gate=outcome
"""
from grpo_jax.configs.labs.shaped_reward import get_config

__all__ = ['REMEDY', 'get_config']
REMEDY = {'collection.gate': 'outcome'}
