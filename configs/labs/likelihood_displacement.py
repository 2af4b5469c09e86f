"""A lab: right completions get no push, wrong ones one away. What both share, and that is most, becomes rarer.

    python -m grpo_jax.train --config=configs/labs/likelihood_displacement.py --workdir=runs/displaced
    python -m grpo_jax.train --config=configs/labs/likelihood_displacement.py --workdir=runs/mended \
        --config.algorithm.regularizers="('positive_nll',)" --config.algorithm.positive_nll_coef=1.0
"""
from grpo_jax.configs.labs import sums

REMEDY = {'algorithm.regularizers': ('positive_nll',), 'algorithm.positive_nll_coef': 1.0}


def get_config(preset='reinforce'):
    """The sums with advantages of 0 for right and -1 for wrong completions."""
    config = sums.get_config(preset)
    config.algorithm.baseline = 1.0
    config.optimizer.learning_rate = 1e-3
    config.log.probe_every = 1
    return config
