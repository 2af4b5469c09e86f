"""What a config says, as typed values: each package reads its own section, and here are those that belong to none."""

import json
from typing import Annotated, Any, NamedTuple

from grpo_jax import ranges
from grpo_jax.algorithms import Algorithm, default_numbers
from grpo_jax.collect.options import READ_FROM_DATA, Collection
from grpo_jax.data import DataOptions
from grpo_jax.diagnose import DiagnoseOptions
from grpo_jax.errors import BadInput
from grpo_jax.learner import Learning, Optimization
from grpo_jax.models.lora import OFF, LoraOptions
from grpo_jax.ranges import Amendable, Count, Flat, Free, Kind, Natural, OneOf, Range
from grpo_jax.rewards.build import RewardOptions, declared_options
from grpo_jax.run.writer import Tracking
from grpo_jax.sampler.sampling import RolloutOptions, Sampling
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.batches import Shapes

DTYPES = ('float32', 'bfloat16')
OBJECTIVES = ('pairwise', 'pointwise', 'steps')  # of a reward model
Seed = Annotated[int, Range(least=0, most=2**32 - 1)]  # jax drops higher bits
PATH_OPTIONS = ('data.options.folder', 'data.options.sources')  # where data lie
MOST_CELLS = 2**31  # tokens of a batch, which int32 counts


class ModelSource(NamedTuple):
    """Where the policy comes from, and how it computes: config.model."""

    path: Annotated[str, Kind.PATH] = ''  # Hugging Face folder or hub name: config.json, tokenizer, weights
    random_init: bool = False  # draw the weights instead of reading them
    # of computation: float32 or bfloat16; master weights are float32
    dtype: Amendable[Annotated[str, OneOf(DTYPES)]] = 'float32'
    # low-rank adapters, which are trained while the model's weights are frozen
    lora: Annotated[LoraOptions, Kind.INHERITED] = OFF

    @classmethod
    def from_config(cls, section):
        """ModelSource of config.model; BadInput for an unknown dtype, and for adapters that cannot be."""
        values = ranges.read_section(cls, section, 'model')
        return cls(**values, lora=LoraOptions.from_config(section['lora']))


class ReferenceSource(NamedTuple):
    """Where the reference policy comes from: config.reference."""

    # folder or hub name of a model, workdir or checkpoint of a run, that it begins as; '': the policy that the run
    # begins with
    path: str = ''


class TeacherSource(NamedTuple):
    """Where a teacher comes from, and how it computes: config.teacher."""

    # folder or hub name of a model with the policy's tokenizer; '': none. Its digest decides whether a run goes on
    path: Free[str] = ''
    # of its computation: float32 or bfloat16; its weights are float32
    dtype: Amendable[Annotated[str, OneOf(DTYPES)]] = 'float32'
    park: Free[bool] = False  # its weights wait in the hosts' memory until they are used


class Supervised(NamedTuple):
    """The cold start, and the training of reward models: config.supervised."""

    updates: Natural = 0  # 0: none
    batch: Count = 128  # demonstrations an update
    optimizer: Optimization = Optimization(learning_rate=1e-3)

    @classmethod
    def from_config(cls, section):
        """Supervised of config.supervised; BadInput for a value out of its range."""
        values = ranges.read_section(cls, section, 'supervised')
        return cls(**values, optimizer=Optimization.from_config(section['optimizer'], 'supervised.optimizer'))


class RewardModelOptions(NamedTuple):
    """What a reward model is trained on: config.reward_model."""

    objective: Annotated[str, OneOf(OBJECTIVES)] = 'pairwise'  # pairwise, pointwise, steps
    separator: ranges.Text = '\n'  # between steps
    # share of older rollouts that grpo-jax iterate trains it on
    replay: Annotated[float, Range(least=0, below=1)] = 0.1
    # steps after the first wrong one: masked, or wrong
    after_error: Annotated[str, OneOf(('masked', 'wrong'))] = 'masked'


class Evaluation(NamedTuple):
    """How held-out prompts are evaluated: config.evaluation."""

    every: Natural = 0  # steps between evaluations; 0: before and after only
    prompts: Count = 256  # of the test split
    samples: Count = 8  # k of pass@k and maj@k; drawn at rollout.temperature


class CheckpointOptions(NamedTuple):
    """When checkpoints are saved, and how many are kept: config.checkpoint."""

    every: Count = 50  # steps; the last step is always saved
    keep: Count = 2  # the newest ones; older ones are deleted


class LogOptions(NamedTuple):
    """What is written down and looked at every so many steps: config.log."""

    rollouts: Natural = 10  # steps between dumps of completions; 0: never
    # steps between looks at the KL to a reference that no penalty needs, which is kept for it; the policy learns the
    # same; 0: never
    kl_every: Natural = 0
    # steps between looks at the probe: a few prompts with their first right completions, which must not become
    # unlikely; 0: never
    probe_every: Natural = 10
    probe_prompts: Annotated[int, Range(least=1, most=10_000)] = 16  # of the train split, in the probe
    tracking: Flat[Tracking] = Tracking()
    # seconds that a step may take before the run ends with all stacks; 0: any
    hang_after: Annotated[float, Range(least=0, most=1e7)] = 0.0

    @classmethod
    def from_config(cls, section):
        """LogOptions of config.log; BadInput for a value out of its range, and for a tracker that is none."""
        return cls(**ranges.read_section(cls, section, 'log'), tracking=Tracking.from_config(section))


class Keys(NamedTuple):
    """Every key of a config with its default: those of a section are the fields of its options type.

    A key whose field says no kind is of its section's. config.algorithm has the numbers of all pieces besides.
    """

    seed: Seed = 0  # of sampling noise, data order and random initialization
    steps: Free[Count] = 100  # steps of the loop: rollout, reward, update
    model: ModelSource = ModelSource()
    data: DataOptions = DataOptions()
    rollout: Amendable[RolloutOptions] = RolloutOptions()
    reward: RewardOptions = RewardOptions()
    # what a step learns from, and which policies are beside the one that learns
    collection: Collection = Collection()
    reference: ReferenceSource = ReferenceSource()  # the policy that a KL term keeps the learning one near to
    teacher: TeacherSource = TeacherSource()  # a model whose logprobs of the policy's own completions are learned from
    algorithm: Amendable[Algorithm] = Algorithm()  # pieces: functions of grpo_jax/algorithms; then their numbers
    learner: Learning = Learning()
    optimizer: Amendable[Optimization] = Optimization()
    critic_optimizer: Amendable[Optimization] = Optimization(learning_rate=1e-5)  # of algorithms with a critic
    supervised: Supervised = Supervised()  # cold start on the data set's demonstrations
    # trained by grpo_jax.reward_model, with the numbers of supervised
    reward_model: RewardModelOptions = RewardModelOptions()
    evaluation: Free[Evaluation] = Evaluation()
    checkpoint: Free[CheckpointOptions] = CheckpointOptions()
    mesh: Free[meshes.Axes] = meshes.Axes()
    # monitors of the metrics; docs/troubleshooting.md has what they see
    diagnose: Free[DiagnoseOptions] = DiagnoseOptions()
    log: Free[LogOptions] = LogOptions()


def default_config() -> dict[str, Any]:
    """The sections of a config, nested, with all keys and their defaults."""
    sections = ranges.to_section(Keys())
    return sections | {'algorithm': default_numbers() | sections['algorithm']}


def kind_of(key: str) -> Kind:
    """The kind of a dotted key: what its field says, else what the section around it says, else FIXED.

    An option of a reward of this package says its kind where it is declared; PATH_OPTIONS are of data sets.
    """
    if key in PATH_OPTIONS:
        return Kind.PATH
    kind, declared, names = Kind.FIXED, ranges.keys_of(Keys), key.split('.')
    for number, name in enumerate(names):
        if name in declared:
            kind = ranges.kind_in(declared[name].annotation) or kind
        options = ranges.type_of(declared[name].annotation) if name in declared else None
        declared = ranges.keys_of(options) if options else {}
        if names[:number] == ['reward', 'options']:
            declared = declared_options(name) or {}
    return kind


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
    reference: ReferenceSource
    teacher: TeacherSource
    algorithm: Any  # config.algorithm: names and numbers, for algorithms.make
    learning: Learning
    optimizer: Optimization
    critic_optimizer: Optimization
    supervised: Supervised
    reward_model: RewardModelOptions
    evaluation: Evaluation
    checkpoint: CheckpointOptions
    log: LogOptions
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
        ranges.read_section(Keys, config, '')
        meshes.check(config.mesh)
        algorithm, model = config.algorithm, ModelSource.from_config(config.model)
        reward_options = RewardOptions.from_config(config.reward)
        critic = ranges.take(algorithm, ['value_clip', 'critic_warmup'], 'algorithm')
        ranges.check(Algorithm, critic, 'algorithm')
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
            reference=ranges.read_options(ReferenceSource, config.reference, 'reference'),
            teacher=ranges.read_options(TeacherSource, config.teacher, 'teacher'),
            algorithm=algorithm,
            learning=Learning.from_config(
                config.learner, dtype=model.dtype, lora=model.lora, temperature=config.rollout.temperature, **critic
            ),
            optimizer=Optimization.from_config(config.optimizer),
            critic_optimizer=Optimization.from_config(config.critic_optimizer, 'critic_optimizer'),
            supervised=Supervised.from_config(config.supervised),
            reward_model=ranges.read_options(RewardModelOptions, config.reward_model, 'reward_model'),
            evaluation=ranges.read_options(Evaluation, config.evaluation, 'evaluation'),
            checkpoint=ranges.read_options(CheckpointOptions, config.checkpoint, 'checkpoint'),
            log=LogOptions.from_config(config.log),
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
