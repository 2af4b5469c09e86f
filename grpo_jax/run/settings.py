"""What a config says, as typed values: each package reads its own section, and here are those that belong to none."""

from collections.abc import Mapping
import json
from typing import Annotated, Any, NamedTuple

from grpo_jax import ranges
from grpo_jax.algorithms import Algorithm
from grpo_jax.collect.options import READ_FROM_DATA, Collection
from grpo_jax.data import DataOptions
from grpo_jax.diagnose import DiagnoseOptions
from grpo_jax.errors import BadInput
from grpo_jax.learner import Learning, Optimization
from grpo_jax.models.lora import OFF, LoraOptions
from grpo_jax.ranges import Count, Natural, OneOf, Range
from grpo_jax.rewards import RewardOptions
from grpo_jax.run.writer import Tracking
from grpo_jax.sampler import Sampling
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.batches import Shapes

DTYPES = ('float32', 'bfloat16')
OBJECTIVES = ('pairwise', 'pointwise', 'steps')  # of a reward model
SECTIONS = ('model', 'data', 'rollout', 'reward', 'collection', 'algorithm', 'learner', 'optimizer', 'critic_optimizer')
SECTIONS += (
    'reference',
    'teacher',
    'supervised',
    'reward_model',
    'evaluation',
    'checkpoint',
    'mesh',
    'log',
    'diagnose',
)
MOST_CELLS = 2**31  # tokens of a batch, which int32 counts


class ModelSource(NamedTuple):
    """Where the policy comes from, and how it computes: config.model."""

    path: str  # Hugging Face folder or hub name
    random_init: bool  # draw the weights instead of reading them
    dtype: Annotated[str, OneOf(DTYPES)]  # of computation
    lora: LoraOptions = OFF

    @classmethod
    def from_config(cls, section):
        """ModelSource of config.model; BadInput for an unknown dtype, and for adapters that cannot be."""
        values = ranges.read_section(cls, section, 'model', elsewhere=['lora'])
        return cls(**values, lora=LoraOptions.from_config(section['lora']))


class ReferenceSource(NamedTuple):
    """Where the reference policy comes from: config.reference."""

    path: str  # model, workdir or checkpoint; '': the policy that the run begins with

    @classmethod
    def from_config(cls, section):
        """ReferenceSource of config.reference; BadInput for a path that is no text."""
        ranges.check_value('reference', section, Mapping)
        return cls(**ranges.read_section(cls, section, 'reference'))


class TeacherSource(NamedTuple):
    """Where a teacher comes from, and how it computes: config.teacher."""

    path: str = ''  # Hugging Face folder or hub name; '': none
    dtype: Annotated[str, OneOf(DTYPES)] = 'float32'  # of computation
    park: bool = False  # its weights wait in the hosts' memory until they are used

    @classmethod
    def from_config(cls, section):
        """TeacherSource of config.teacher; BadInput for an unknown dtype."""
        ranges.check_value('teacher', section, Mapping)
        return cls(**ranges.read_section(cls, section, 'teacher'))


class Supervised(NamedTuple):
    """The cold start, and the training of reward models: config.supervised."""

    updates: Natural  # 0: none
    batch: Count  # demonstrations an update
    optimizer: Optimization

    @classmethod
    def from_config(cls, section):
        """Supervised of config.supervised; BadInput for a value out of its range."""
        values = ranges.read_section(cls, section, 'supervised', elsewhere=['optimizer'])
        return cls(**values, optimizer=Optimization.from_config(section['optimizer'], 'supervised.optimizer'))


class RewardModelOptions(NamedTuple):
    """What a reward model is trained on: config.reward_model."""

    objective: Annotated[str, OneOf(OBJECTIVES)]
    separator: ranges.Text  # between steps
    replay: Annotated[float, Range(least=0, below=1)]  # share of older rollouts that an iteration trains it on
    after_error: Annotated[str, OneOf(('masked', 'wrong'))]  # steps after the first wrong one

    @classmethod
    def from_config(cls, section):
        """RewardModelOptions of config.reward_model; BadInput for a value out of its range."""
        return cls(**ranges.read_section(cls, section, 'reward_model'))


class Evaluation(NamedTuple):
    """How held-out prompts are evaluated: config.evaluation."""

    every: Natural  # steps between evaluations; 0: before and after only
    prompts: Count  # of the test split
    samples: Count  # k of pass@k and maj@k

    @classmethod
    def from_config(cls, section):
        """Evaluation of config.evaluation; BadInput for nothing to evaluate."""
        return cls(**ranges.read_section(cls, section, 'evaluation'))


class Cadence(NamedTuple):
    """What happens every so many steps: config.checkpoint and config.log."""

    checkpoint: Count
    keep: Count  # checkpoints
    rollouts: Natural  # dumps of completions; 0: never
    # seconds that a step may take before the run ends with all stacks; 0: any
    hang_after: Annotated[float, Range(least=0, most=1e7)]
    kl_observe: Natural  # scorings by a reference that nothing pays for; 0: never
    probe_every: Natural  # looks at the probe; 0: never
    probe_prompts: Annotated[int, Range(least=1, most=10_000)]  # in the probe

    @classmethod
    def from_config(cls, checkpoint, log):
        """Cadence of the two sections; BadInput for a checkpoint that never comes, or is not kept."""
        every = ranges.take(checkpoint, ['every'], 'checkpoint')['every']
        ranges.check_value('checkpoint.every', every, cls.__annotations__['checkpoint'])
        checkpoint_fields = ['checkpoint', 'keep']
        others = [name for name in cls._fields if name not in checkpoint_fields]
        kept = ranges.read_section(cls, checkpoint, 'checkpoint', elsewhere=['checkpoint', *others])
        return cls(every, **kept, **ranges.read_section(cls, log, 'log', elsewhere=checkpoint_fields))


class Settings(NamedTuple):
    """A whole config."""

    seed: Annotated[int, Range(least=0, most=2**32 - 1)]  # jax drops higher bits
    steps: Count
    model: ModelSource
    data: DataOptions
    sampling: Sampling  # without a tokenizer's ids
    group_size: Count
    rewards: RewardOptions
    collection: Collection
    reference: ReferenceSource
    teacher: TeacherSource
    algorithm: Any  # config.algorithm: names and numbers, for algorithms.make
    learning: Learning
    optimizer: Optimization
    critic_optimizer: Optimization
    supervised: Supervised
    reward_model: RewardModelOptions
    evaluation: Evaluation
    cadence: Cadence
    tracking: Tracking
    diagnose: DiagnoseOptions
    mesh: Any  # config.mesh: devices along each axis
    config: Any  # itself, for what records it

    @property
    def recorded(self) -> dict[str, Any]:
        """The config as config.json gives it back: lists for tuples."""
        return json.loads(json.dumps(self.config.to_dict()))

    def shapes(self, prompts: int, group_size: int) -> Shapes:
        """The Shapes of that many prompts and completions of each."""
        return Shapes(prompts, group_size, self.data.max_prompt_tokens, self.sampling.max_tokens)

    def step_shapes(self, algorithm: Algorithm) -> Shapes:
        """Shapes of a step's batch: as many rows, of more prompts, where completions are read from the data.

        Where groups differ in size, the blocks that they are made of count as prompts.
        """
        size = self.group_size
        if algorithm.source in READ_FROM_DATA:
            size = len(READ_FROM_DATA[algorithm.source])
        elif self.collection.allocation != 'equal':
            size = self.collection.allocation_unit
        return self.shapes(self.data.prompts_per_step * self.group_size // size, size)

    def supervised_sizes(self) -> tuple[Shapes, Learning]:
        """(Shapes, Learning) of an update on demonstrations."""
        plain = dict(epochs=1, minibatches=1, microbatches=1, temperature=1.0, critic_warmup=0)
        learning = self.learning._replace(**plain, old_logprobs='forward')  # nothing was sampled
        # demonstrations share no prompts, and short ones would fill the blocks of packed rows badly
        learning = learning._replace(pack_columns=max(learning.pack_columns, 0))
        if self.model.random_init:
            learning = learning._replace(lora=OFF)
        return self.shapes(self.supervised.batch, 1), learning

    @classmethod
    def from_config(cls, config):
        """Settings of a config; BadInput for what cannot work, whatever the model."""
        ranges.check_finite(config)
        for name, value in ranges.take(config, ['seed', 'steps', *SECTIONS]).items():
            ranges.check_value(name, value, cls.__annotations__[name] if name in ('seed', 'steps') else Mapping)
        ranges.check(cls, ranges.take(config.rollout, ['group_size'], 'rollout'), 'rollout')
        meshes.check(config.mesh)
        algorithm, model = config.algorithm, ModelSource.from_config(config.model)
        reward_options = RewardOptions.from_config(config.reward)
        critic = ranges.take(algorithm, ['value_clip', 'critic_warmup'], 'algorithm')
        ranges.check(Learning, critic, 'algorithm')
        ranges.take(algorithm, ['correction', 'ratio_base'], 'algorithm')
        corrected = algorithm.correction != 'none' or algorithm.ratio_base == 'sampler'
        settings = cls(
            seed=config.seed,
            steps=config.steps,
            model=model,
            data=DataOptions.from_config(config.data),
            sampling=Sampling.from_config(config.rollout, dtype=model.dtype, corrected=corrected, lora=model.lora),
            group_size=config.rollout.group_size,
            rewards=reward_options,
            collection=Collection.from_config(
                config.collection,
                group_size=config.rollout.group_size,
                corrected=corrected,
                reward_options=reward_options,
            ),
            reference=ReferenceSource.from_config(config.reference),
            teacher=TeacherSource.from_config(config.teacher),
            algorithm=algorithm,
            learning=Learning.from_config(
                config.learner, dtype=model.dtype, lora=model.lora, temperature=config.rollout.temperature, **critic
            ),
            optimizer=Optimization.from_config(config.optimizer),
            critic_optimizer=Optimization.from_config(config.critic_optimizer, 'critic_optimizer'),
            supervised=Supervised.from_config(config.supervised),
            reward_model=RewardModelOptions.from_config(config.reward_model),
            evaluation=Evaluation.from_config(config.evaluation),
            cadence=Cadence.from_config(config.checkpoint, config.log),
            tracking=Tracking.from_config(config.log),
            diagnose=DiagnoseOptions.from_config(config.diagnose),
            mesh=config.mesh,
            config=config,
        )
        _check_size(settings)
        return settings


def _check_size(settings):
    """BadInput for a batch of more tokens than an array may have."""
    columns = settings.data.max_prompt_tokens + settings.sampling.max_tokens
    rows = {
        'data.prompts_per_step x rollout.group_size': settings.data.prompts_per_step * settings.group_size,
        'evaluation.samples': settings.evaluation.samples + 1,
        'supervised.batch': settings.supervised.batch,
    }
    for name, count in rows.items():
        if count * columns >= MOST_CELLS:
            raise BadInput(
                name,
                count,
                f'are rows of data.max_prompt_tokens + rollout.max_tokens = {columns} tokens, and an array has less '
                f'than {MOST_CELLS}; lower one',
            )
