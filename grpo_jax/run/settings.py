"""A config as typed values. Each package reads its own section; sections that belong to no package are read here."""

from collections.abc import Iterable, Mapping
import json
import math
from typing import Annotated, Any, NamedTuple

from ml_collections import ConfigDict

from grpo_jax import ranges
from grpo_jax.algorithms import Algorithm, default_numbers, is_corrected
from grpo_jax.collect.options import READ_FROM_DATA, CollectOptions
from grpo_jax.data import DataOptions, list_rows
from grpo_jax.diagnose import DiagnoseOptions
from grpo_jax.errors import NO_VALUE, BadInput, Checks
from grpo_jax.learner import Learning, Optimization
from grpo_jax.models.lora import OFF, LoraOptions
from grpo_jax.ranges import Amendable, Count, Flat, Free, Kind, Natural, OneOf, Range, ReadWith
from grpo_jax.rewards.build import RewardFunctions, RewardOptions, declared_options
from grpo_jax.run.writer import Tracking
from grpo_jax.sampler.sampling import RolloutOptions, Sampling
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding.batches import Shapes

DTYPES = ('float32', 'bfloat16')
OBJECTIVES = ('pairwise', 'pointwise', 'steps')  # losses of a reward model
Seed = Annotated[int, Range(least=0, most=2**32 - 1)]  # jax ignores higher bits
PATH_OPTIONS = ('data.options.folder', 'data.options.sources')  # options that are paths of data
CRITIC = ReadWith('algorithm.needs_values', words='an advantage with a critic (gae)')
LABELS = ReadWith('labels', words='the command grpo_jax.reward_model')  # of no Settings
MOST_CELLS = 2**31  # bound of a batch's tokens, which int32 must count


class ModelSource(NamedTuple):
    """The policy's model, dtype and adapters: config.model."""

    path: Annotated[str, Kind.PATH] = ''  # Hugging Face folder or hub name: config.json, tokenizer, weights
    random_init: bool = False  # draw the weights instead of reading them
    # of computation: float32 or bfloat16; master weights are float32
    dtype: Amendable[Annotated[str, OneOf(DTYPES)]] = 'float32'
    # low-rank adapters, which are trained while the model's weights are frozen
    lora: Annotated[LoraOptions, Kind.INHERITED] = OFF

    @classmethod
    def from_config(cls, section):
        """ModelSource of config.model. Raises BadInput for an unknown dtype or impossible adapters."""
        values = ranges.read_section(cls, section, 'model')
        return cls(**values, lora=LoraOptions.from_config(section['lora']))


class ReferenceSource(NamedTuple):
    """The source of the reference policy: config.reference."""

    # the first reference: a model's folder or hub name, a run's workdir, or a checkpoint; '': the run's first policy
    path: str = ''


class TeacherSource(NamedTuple):
    """The teacher's model and dtype: config.teacher."""

    # folder or hub name of a model with the policy's tokenizer; '': none. Its digest decides whether a run goes on
    path: Free[str] = ''
    # of its computation: float32 or bfloat16; its weights are float32
    dtype: Amendable[Annotated[str, OneOf(DTYPES)]] = 'float32'
    park: Free[bool] = False  # its weights wait in the hosts' memory until they are used


class Supervised(NamedTuple):
    """The cold start, and the training of reward models: config.supervised."""

    updates: Natural = 0  # updates of the cold start; 0: none
    batch: Count = 128  # demonstrations an update
    optimizer: Optimization = Optimization(learning_rate=1e-3)

    @classmethod
    def from_config(cls, section):
        """Supervised of config.supervised. Raises BadInput for a value out of its range."""
        values = ranges.read_section(cls, section, 'supervised')
        return cls(**values, optimizer=Optimization.from_config(section['optimizer'], 'supervised.optimizer'))


class RewardModelOptions(NamedTuple):
    """The training objective of a reward model: config.reward_model."""

    objective: Annotated[str, OneOf(OBJECTIVES)] = 'pairwise'  # pairwise, pointwise, steps
    separator: ranges.Text = '\n'  # between steps
    # share of older rollouts that grpo-jax iterate trains it on
    replay: Annotated[float, Range(least=0, below=1)] = 0.1
    # steps after the first wrong one: masked, or wrong
    after_error: Annotated[str, OneOf(('masked', 'wrong'))] = 'masked'


class Evaluation(NamedTuple):
    """How often and on how many held-out prompts the policy is evaluated: config.evaluation."""

    every: Natural = 0  # steps between evaluations; 0: before and after only
    prompts: Count = 256  # prompts of the test split
    samples: Count = 8  # completions of a prompt that are drawn: n of maj@n, the largest k of pass@k
    temperature: Annotated[float, Range(least=0, most=100)] = 0.0  # of these completions; 0: rollout.temperature
    top_p: ranges.Share = 0.0  # of these completions; 0: rollout.top_p
    max_tokens: Natural = 0  # budget of a completion in evaluations; 0: rollout.max_tokens

    def sampling(self, rollouts: Sampling) -> Sampling:
        """The Sampling of evaluations: the rollouts', with this section's numbers where they are not 0."""
        own = {name: getattr(self, name) for name in ('temperature', 'top_p', 'max_tokens')}
        return rollouts._replace(**{name: value for name, value in own.items() if value})


class CheckpointOptions(NamedTuple):
    """How often checkpoints are saved, and how many are kept: config.checkpoint."""

    every: Count = 50  # steps between checkpoints; the last step is always saved
    keep: Count = 2  # checkpoints that are kept, the newest; older ones are deleted
    # figure of the evaluations, like greedy: the checkpoint of its highest value is kept besides; '': none
    best: str = ''


KL_EVERY = 10  # steps between measurements of the KL to the reference, where nothing but it tells


class LogOptions(NamedTuple):
    """What is logged and measured beside training, and how often: config.log."""

    rollouts: Natural = 10  # steps between dumps of completions; 0: never; the last step's are dumped too
    # steps between measurements of the KL to a reference that no penalty needs; the reference is kept for that alone
    # and changes no training; 0: never; -1: 10 where a reward model pays and no verifier looks, else 0
    kl_every: Annotated[
        int,
        Range(least=-1, most=2**31 - 1),
        ReadWith('!algorithm.needs_reference', words='an algorithm without a KL term'),
    ] = -1
    # steps between measurements of the probe: a few prompts with their first right completions, which must not become
    # unlikely; 0: never
    probe_every: Natural = 10
    # of the train split, in the probe
    probe_prompts: Annotated[int, Range(least=1, most=10_000), ReadWith('.probe_every')] = 16
    tracking: Flat[Tracking] = Tracking()
    # seconds that a step may take before the run ends with all stacks; 0: any
    hang_after: Annotated[float, Range(least=0, most=1e7)] = 0.0

    @classmethod
    def from_config(cls, section, unverified: bool = False):
        """LogOptions of config.log; unverified: RewardOptions.unverified. Raises BadInput for values out of range."""
        options = cls(**ranges.read_section(cls, section, 'log'), tracking=Tracking.from_config(section))
        return options if options.kl_every >= 0 else options._replace(kl_every=KL_EVERY if unverified else 0)


class Keys(NamedTuple):
    """Every key of a config with its default. A section's keys are the fields of its options type.

    A field without a Kind has the Kind of its section. config.algorithm also has the numbers of all pieces.
    """

    seed: Seed = 0  # of sampling noise, data order and random initialization
    # steps of the loop: rollout, reward, update
    steps: Annotated[Free[Count], ReadWith('!data.epochs', words='data.epochs=0')] = 100
    model: ModelSource = ModelSource()
    data: DataOptions = DataOptions()
    rollout: Amendable[RolloutOptions] = RolloutOptions()
    reward: RewardOptions = RewardOptions()
    # what a step learns from, and which policies are beside the one that learns
    collection: CollectOptions = CollectOptions()
    reference: ReferenceSource = ReferenceSource()  # the policy that a KL term keeps the learning one near to
    teacher: TeacherSource = TeacherSource()  # a model whose logprobs of the policy's own completions are learned from
    algorithm: Amendable[Algorithm] = Algorithm()  # pieces: functions of grpo_jax/algorithms; then their numbers
    learner: Learning = Learning()
    optimizer: Amendable[Optimization] = Optimization()
    # of algorithms with a critic
    critic_optimizer: Annotated[Amendable[Optimization], CRITIC] = Optimization(learning_rate=1e-5)
    # cold start on the data set's demonstrations; a branch begins after its parent's
    supervised: Annotated[Supervised, Kind.INHERITED, ReadWith('supervised.updates')] = Supervised()
    # trained by grpo_jax.reward_model, with the numbers of supervised
    reward_model: Annotated[RewardModelOptions, LABELS] = RewardModelOptions()
    evaluation: Free[Evaluation] = Evaluation()
    checkpoint: Free[CheckpointOptions] = CheckpointOptions()
    mesh: Free[meshes.Axes] = meshes.Axes()
    # monitors of the metrics; docs/troubleshooting.md has what they see
    diagnose: Annotated[Free[DiagnoseOptions], ReadWith('diagnose.on', ('say', 'save', 'stop'))] = DiagnoseOptions()
    log: Free[LogOptions] = LogOptions()


def default_config() -> dict[str, Any]:
    """A config as nested dicts, with all keys and their defaults."""
    sections = ranges.to_section(Keys())
    return sections | {'algorithm': default_numbers() | sections['algorithm']}


class _AnySection(type):
    """The metaclass of Options: every ConfigDict counts as an instance, so that ConfigDict lets one be set there."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, ConfigDict)


class Options(ConfigDict, metaclass=_AnySection):
    """A section of a config in which any key may be set; keys are checked later, by the code that reads the section."""

    def lock(self):
        """Does nothing: keys can always be made."""
        return self


class RewardSections(Options):
    """config.reward.options: naming a reward makes its section, so that options.brevity.scale = 0.05 works at once."""

    def __getattr__(self, name):
        if not name.startswith('_') and name not in self:
            self[name] = Options()
        return super().__getattr__(name)

    def update_from_flattened_dict(self, flattened_dict, strip_prefix=''):
        """Makes the sections of rewards that are not there yet, then does what ConfigDict's method does."""
        for key in flattened_dict:
            if key.startswith(strip_prefix):
                getattr(self, key.removeprefix(strip_prefix).partition('.')[0])
        super().update_from_flattened_dict(flattened_dict, strip_prefix)


def lock(config: Any) -> Any:
    """Locks a config, so that setting an unknown key is an error at once, and returns it.

    New keys can still be set as options of data sets and rewards, and as numbers of pieces in users' files.
    """
    config.algorithm = Options(config.algorithm)
    config.data.options = Options(config.data.options)
    config.data.chat_template_kwargs = Options(config.data.chat_template_kwargs)
    config.reward.options = RewardSections(config.reward.options)
    return config.lock()


def kind_of(key: str) -> Kind:
    """The Kind of a dotted key: from its field, else from the innermost section around it with a Kind, else FIXED.

    Options of this package's rewards have the Kind of their declaration; PATH_OPTIONS are PATH.
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


def recorded_form(config: Any) -> dict[str, Any]:
    """A config as config.json has it: lists in place of tuples. Raises BadInput for a number that is too long."""
    try:
        return json.loads(json.dumps(config.to_dict(), default=str))
    except ValueError as error:
        raise BadInput('config', NO_VALUE, f'cannot be written: {error}; shorten the number') from None


class Settings(NamedTuple):
    """A config as typed values."""

    seed: int
    steps: int
    model: ModelSource
    data: DataOptions
    sampling: Sampling  # token ids are added when the tokenizer is known
    group_size: int
    rewards: RewardOptions
    collection: CollectOptions
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
    mesh: Any  # config.mesh: devices along each axis; an opened Run's has no 0
    config: Any  # the ConfigDict, to be recorded

    @property
    def recorded(self) -> dict[str, Any]:
        """The config as config.json has it."""
        return recorded_form(self.config)

    def shapes(self, prompts: int, group_size: int) -> Shapes:
        """The Shapes of `prompts` prompts with `group_size` completions each."""
        return Shapes(prompts, group_size, self.data.max_prompt_tokens, self.sampling.max_tokens)

    def step_shapes(self, algorithm: Algorithm) -> Shapes:
        """The Shapes of a step's batch, which has prompts_per_step * group_size rows.

        Where completions are read from the data, the group size is their number for a prompt, and there are more
        prompts. Where groups differ in size, they consist of blocks, and each block counts as a prompt.
        """
        size = self.group_size
        if algorithm.source in READ_FROM_DATA:
            size = len(READ_FROM_DATA[algorithm.source])
        elif self.collection.allocation != 'equal':
            size = self.collection.allocation_unit
        return self.shapes(self.data.prompts_per_step * self.group_size // size, size)

    def dealt(self, labels: bool = False) -> dict[str, int]:
        """{name: count} of prompts and rows that are dealt evenly to the devices, so that their number divides each.

        labels: whether a reward model is trained on labels, in place of a policy.
        """
        learning = self.learning
        if labels:
            return {'supervised.batch / learner.microbatches': self.supervised.batch // learning.microbatches}
        rows = self.data.prompts_per_step * self.group_size // (learning.minibatches * learning.microbatches)
        counts = {'data.prompts_per_step': self.data.prompts_per_step, 'rows of a microbatch': rows}
        return counts | ({'supervised.batch': self.supervised.batch} if self.supervised.updates else {})

    def with_mesh(self, sizes: Mapping[str, int]) -> 'Settings':
        """The Settings with these sizes of the mesh's axes, also in the config that is recorded."""
        config = self.config.copy_and_resolve_references()
        with config.unlocked():
            config.mesh.update(sizes)
        return self._replace(mesh=config.mesh, config=config)

    def with_rows(self, examples: Mapping[str, Iterable] | Iterable | None) -> 'Settings':
        """The Settings, of a config of make_python_config, with rows from Python as data; unchanged for None."""
        if examples is None:
            return self
        given = {**self.data.options, 'folder': list_rows(examples)}
        return self._replace(data=self.data._replace(options=given))

    def with_steps(self, rows: int, algorithm: Algorithm) -> 'Settings':
        """The Settings, and their config, with the steps that data.epochs passes over `rows` prompts take.

        They are unchanged where data.epochs is 0.
        """
        if not self.data.epochs:
            return self
        reads = algorithm.source in READ_FROM_DATA
        prompts = self.step_shapes(algorithm).prompts if reads else self.data.prompts_per_step
        config = self.config.copy_and_resolve_references()
        with config.unlocked():
            config.steps = math.ceil(self.data.epochs * rows / prompts)
        return self._replace(steps=config.steps, config=config)

    def find_unread(self, algorithm: Algorithm, functions: RewardFunctions) -> dict[str, str]:
        """{dotted key of the config that nothing in this training reads: in words, what would read it}."""
        sections = {'rollout': self.sampling, 'reward': self.rewards, 'learner': self.learning}
        owners = self._asdict() | sections | {'algorithm': algorithm, 'functions': functions}
        readers = {
            key: [str(mark) for mark in marks if not mark.holds(owners)] for key, marks in ranges.marks_of(Keys).items()
        }
        unread = {key: ' with '.join(dict.fromkeys(words)) for key, words in readers.items() if words}
        for name in sorted(self.rewards.options.keys() - functions.read_options):
            unread |= {f'reward.options.{name}.{option}': f'the reward {name}' for option in self.rewards.options[name]}
        return unread

    def supervised_sizes(self) -> tuple[Shapes, Learning]:
        """(Shapes, Learning) of an update on supervised.batch demonstrations, which are one microbatch."""
        plain = dict(epochs=1, minibatches=1, microbatches=1, temperature=1.0, critic_warmup=0)
        learning = self.learning._replace(**plain, old_logprobs='forward')  # nothing was sampled
        # demonstrations share no prompts, and short ones would leave much of packed rows empty
        learning = learning._replace(pack_columns=max(learning.pack_columns, 0))
        if self.model.random_init:
            learning = learning._replace(lora=OFF)
        return self.shapes(self.supervised.batch, 1), learning

    @classmethod
    def from_config(cls, config, outer: Checks | None = None):
        """Settings of a config. Raises BadInput for all values that cannot work with any model.

        outer: Checks that collect what is refused, so that it is not raised here; refused sections are UNMADE then.
        """
        ranges.check_finite(config)
        keys = ranges.keys_of(Keys)
        with Checks(outer) as check:
            for name in config:
                check(ranges.check_declared, name, config[name], keys)
            section = {name: check(_read_key, config, name, key.annotation) for name, key in keys.items()}
            algorithm, model = section['algorithm'], check(ModelSource.from_config, section['model'])
            reward_options = check(RewardOptions.from_config, section['reward'])
            corrected, group_size = check(is_corrected, algorithm), section['rollout'].group_size
            sampling = check(
                Sampling.from_config, section['rollout'], dtype=model.dtype, corrected=corrected, lora=model.lora
            )
            plain = {
                name: check(ranges.read_options, ranges.type_of(keys[name].annotation), section[name], name)
                for name in ('reference', 'teacher', 'reward_model', 'evaluation', 'checkpoint', 'diagnose')
            }
            settings = cls(
                seed=section['seed'],
                steps=section['steps'],
                model=model,
                data=check(DataOptions.from_config, section['data']),
                sampling=sampling,
                group_size=group_size,
                rewards=reward_options,
                collection=check(
                    CollectOptions.from_config,
                    section['collection'],
                    group_size=group_size,
                    corrected=corrected,
                    reward_options=reward_options,
                ),
                algorithm=algorithm,
                learning=check(
                    Learning.from_config,
                    section['learner'],
                    dtype=model.dtype,
                    lora=model.lora,
                    temperature=sampling.temperature,
                    value_clip=algorithm.value_clip,
                    critic_warmup=algorithm.critic_warmup,
                ),
                optimizer=check(Optimization.from_config, section['optimizer']),
                critic_optimizer=check(Optimization.from_config, section['critic_optimizer'], 'critic_optimizer'),
                supervised=check(Supervised.from_config, section['supervised']),
                log=check(LogOptions.from_config, section['log'], reward_options.unverified),
                mesh=section['mesh'],
                config=config,
                **plain,
            )
            check(_check_size, settings.data, sampling, group_size, settings.evaluation, settings.supervised)
            check(_check_evaluation, settings.evaluation, settings.checkpoint, sampling)
        return settings


def _read_key(config, name, annotation):
    """The value of the config's key `name`, checked by the annotation of its field in Keys; else raises BadInput."""
    (value,) = ranges.take(config, [name]).values()
    if name == 'mesh':
        meshes.check(value)  # an axis may be absent
    elif options := ranges.type_of(annotation):
        ranges.checked(options, value, name, others=name == 'algorithm')  # which also has the numbers of all pieces
    else:
        ranges.check_value(name, value, annotation)
    return value


def _check_evaluation(evaluation, checkpoint, sampling):
    """Raises BadInput if evaluations cannot sample with their temperature or budget, or are missing.

    They are missing where checkpoint.best is set and no evaluation happens during the run.
    """
    if 0 < evaluation.temperature < 0.01:
        raise BadInput('evaluation.temperature', evaluation.temperature, 'must be 0 or at least 0.01; raise it')
    if 0 < evaluation.max_tokens <= max(sampling.thinking_tokens, sampling.min_tokens - 1):
        remedy = 'must exceed rollout.thinking_tokens, and not be below rollout.min_tokens; raise it'
        raise BadInput('evaluation.max_tokens', evaluation.max_tokens, remedy)
    if checkpoint.best and not evaluation.every:
        remedy = 'compares evaluations during the run, and evaluation.every = 0 makes none; set evaluation.every'
        raise BadInput('checkpoint.best', checkpoint.best, remedy)


def _check_size(data, sampling, group_size, evaluation, supervised):
    """Raises BadInput when a batch has MOST_CELLS tokens or more."""
    columns = data.max_prompt_tokens + max(sampling.max_tokens, evaluation.max_tokens)
    rows = {
        'data.prompts_per_step x rollout.group_size': data.prompts_per_step * group_size,
        'evaluation.samples + 1': evaluation.samples + 1,
        'supervised.batch': supervised.batch,
    }
    for name, count in rows.items():
        if count * columns >= MOST_CELLS:
            raise BadInput(
                name,
                count,
                f'are rows of data.max_prompt_tokens + rollout.max_tokens = {columns} tokens, and an array has less '
                f'than {MOST_CELLS} tokens; lower one of these numbers',
            )
