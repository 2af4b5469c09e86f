"""What a config says, as typed values: each package reads its own section, and here are those that belong to none."""

from typing import Any, NamedTuple

from grpo_jax.data import DataOptions
from grpo_jax.errors import BadInput
from grpo_jax.learner import Learning, Optimization
from grpo_jax.rewards import RewardOptions
from grpo_jax.run.collect import Collection
from grpo_jax.sampler import Sampling

DTYPES = ('float32', 'bfloat16')


class ModelSource(NamedTuple):
    """Where the policy comes from, and how it computes: config.model."""

    path: str  # Hugging Face folder or hub name
    random_init: bool  # draw the weights instead of reading them
    dtype: str  # of computation

    @classmethod
    def from_config(cls, section):
        """ModelSource of config.model; BadInput for an unknown dtype."""
        if section['dtype'] not in DTYPES:
            raise BadInput('model.dtype', section['dtype'], 'choose float32 or bfloat16')
        return cls(**{name: section[name] for name in cls._fields})


class Supervised(NamedTuple):
    """The cold start, and the training of reward models: config.supervised."""

    updates: int  # 0: none
    batch: int  # demonstrations an update
    optimizer: Optimization

    @classmethod
    def from_config(cls, section):
        """Supervised of config.supervised."""
        return cls(section['updates'], section['batch'], Optimization.from_config(section['optimizer']))


class Evaluation(NamedTuple):
    """How held-out prompts are evaluated: config.evaluation."""

    every: int  # steps between evaluations; 0: before and after only
    prompts: int  # of the test split
    samples: int  # k of pass@k and maj@k

    @classmethod
    def from_config(cls, section):
        """Evaluation of config.evaluation; BadInput for nothing to evaluate."""
        for name in ('samples', 'prompts'):
            if section[name] < 1:
                raise BadInput(f'evaluation.{name}', section[name], 'must be at least 1')
        return cls(**{name: section[name] for name in cls._fields})


class Cadence(NamedTuple):
    """What happens every so many steps: config.checkpoint and config.log."""

    checkpoint: int
    keep: int  # checkpoints
    rollouts: int  # dumps of completions; 0: never
    hang_after: float  # seconds that a step may take before the run ends with all stacks; 0: any

    @classmethod
    def from_config(cls, checkpoint, log):
        """Cadence of the two sections; BadInput for a checkpoint that never comes."""
        if checkpoint['every'] < 1:
            raise BadInput('checkpoint.every', checkpoint['every'], 'must be at least 1')
        return cls(checkpoint['every'], checkpoint['keep'], log['rollouts'], log['hang_after'])


class Settings(NamedTuple):
    """A whole config."""

    seed: int
    steps: int
    model: ModelSource
    data: DataOptions
    sampling: Sampling  # without a tokenizer's ids
    group_size: int
    rewards: RewardOptions
    collection: Collection
    reference_path: str  # of the policy that the reference begins as; '': the initial policy
    algorithm: Any  # config.algorithm: names and numbers, for algorithms.make
    learning: Learning
    optimizer: Optimization
    critic_optimizer: Optimization
    supervised: Supervised
    evaluation: Evaluation
    cadence: Cadence
    mesh: Any  # config.mesh: devices along each axis

    @classmethod
    def from_config(cls, config):
        """Settings of a config; BadInput for what cannot work, whatever the model."""
        if config.steps < 1:
            raise BadInput('steps', config.steps, 'must be at least 1')
        algorithm, model = config.algorithm, ModelSource.from_config(config.model)
        reward_options = RewardOptions.from_config(config.reward)
        corrected = algorithm.correction != 'none' or algorithm.ratio_base == 'sampler'
        return cls(
            seed=config.seed,
            steps=config.steps,
            model=model,
            data=DataOptions.from_config(config.data),
            sampling=Sampling.from_config(config.rollout, dtype=model.dtype, corrected=corrected),
            group_size=config.rollout.group_size,
            rewards=reward_options,
            collection=Collection.from_config(config.collection, corrected=corrected, reward_options=reward_options),
            reference_path=config.get('reference', {'path': ''})['path'],  # runs of an earlier version lack it
            algorithm=algorithm,
            learning=Learning.from_config(
                config.learner,
                dtype=model.dtype,
                temperature=config.rollout.temperature,
                value_clip=algorithm.value_clip,
                critic_warmup=algorithm.critic_warmup,
            ),
            optimizer=Optimization.from_config(config.optimizer),
            critic_optimizer=Optimization.from_config(config.critic_optimizer),
            supervised=Supervised.from_config(config.supervised),
            evaluation=Evaluation.from_config(config.evaluation),
            cadence=Cadence.from_config(config.checkpoint, config.log),
            mesh=config.mesh,
        )
