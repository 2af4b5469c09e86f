"""Iterative GRPO of the arithmetic demo: a learned reward, which learns on from what the policy has come to write.

    python -m grpo_jax.train --config=configs/arithmetic.py --workdir=runs/first --config.steps=8 \\
        --config.log.rollouts=1 --config.optimizer.learning_rate=0
    python -m grpo_jax export --workdir=runs/first --out=runs/first_policy
    python -m grpo_jax iterate --config=configs/arithmetic_iterative.py --workdir=runs/iterative \\
        --labelled=runs/first/rollouts

The first command's completions are those of the cold start, labelled by the verifier; they train the first reward
model. From then on the policy learns from the reward model alone, which the verifier's verdicts correct between
iterations.

Measured: 1 CPU core | time not recorded | pass@1 35 to 82 % in three iterations
"""
from grpo_jax.configs import arithmetic


def get_config(preset='grpo_iterative'):
    """8 steps an iteration, few enough that the policy does not learn to deceive the reward model."""
    config = arithmetic.get_config(preset)
    config.steps = 8
    config.model.path = 'runs/first_policy'
    config.model.random_init = False
    config.reward.parts = (('model', 1.0), ('numeric', 0.0))
    config.collection.reference, config.collection.reference_every = 'frozen', 0
    config.optimizer.learning_rate = 1e-4
    config.supervised.updates = 150
    config.supervised.batch = 32
    config.supervised.optimizer.learning_rate = 1e-3
    return config
