"""A lab: only wrong completions are pushed away, and with them the tokens that right ones share become less likely.

    python -m grpo_jax.train --config=configs/labs/likelihood_displacement.py --workdir=runs/displaced
    python -m grpo_jax.train --config=configs/labs/likelihood_displacement.py --workdir=runs/mended \
        --config.optimizer.learning_rate=3.3e-4

At a rate of 1e-3 the NLL of right completions does not help: with a coefficient of 1 the probe lost 1.5 nats a
token in place of 1.7. At 3.3e-4 the probe loses nothing. Where the cause speaks, large_updates, it names 3.3e-5.
"""
from grpo_jax.configs.labs import sums

REMEDY = {'optimizer.learning_rate': 3.3e-4}


def get_config(preset='reinforce'):
    """The config of labs/sums.py with advantages of 0 for right and -1 for wrong completions, and a high rate."""
    config = sums.get_config(preset)
    config.algorithm.baseline = 1.0
    config.optimizer.learning_rate = 1e-3
    config.log.probe_every = 1
    return config
