"""Iterative GRPO of the arithmetic demo: a reward model that is trained again on what the policy writes.

    python -m grpo_jax.train --config=configs/arithmetic.py --workdir=runs/first --config.steps=8 \\
        --config.log.rollouts=1 --config.optimizer.learning_rate=0
    python -m grpo_jax export --workdir=runs/first --out=runs/first_policy
    python -m grpo_jax iterate --config=configs/arithmetic_iterative.py --workdir=runs/iterative \\
        --labelled=runs/first/rollouts

The first command's completions are those of the cold start, labelled by the verifier; they train the first reward
model. From then on the policy learns from the reward model alone, which is trained on the verifier's verdicts between
iterations.

Measured: 1 CPU core | time not recorded | pass@1 0.35 to 0.82 in three iterations
"""
from grpo_jax.configs import arithmetic


def get_config(preset='grpo_iterative'):
    """The config of one iteration: 8 steps, so few that the policy does not learn to deceive the reward model."""
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
