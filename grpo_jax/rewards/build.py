"""Reads config.reward and builds the functions that reward a run's completions."""

from collections.abc import Callable, Mapping, Sequence
import functools
import importlib
import importlib.util
import inspect
import os
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, NamedTuple

from grpo_jax import ranges, user_files
from grpo_jax.errors import NO_VALUE, UNMADE, BadInput, Checks
from grpo_jax.example import Example
from grpo_jax.ranges import Amendable, Free, Gibibytes, Kind, Length, OneOf, Range, ReadWith, Seconds, Share, Text
from grpo_jax.rewards import binding, custom, length
from grpo_jax.rewards.resources import Resources
from grpo_jax.workers import Pool

PARTS = "pairs of a reward and its weight within 1e6, like (('numeric', 1.0), ('format', 0.5))"
WITH_OPTIONS = ('reward', 'strict', 'measure', 'steps')  # functions of a reward's file that may have options
# arguments that come from the run and not from the config
SUPPLIED = ('correct', 'limit', 'models', 'pool', 'sandbox', 'services', 'step', 'truncated', 'workdir')
OWN = ReadWith('functions.has_own', words='a reward of yours')
MAY_LACK = ReadWith('functions.may_lack', words='a reward of yours or a service')
VERIFIED = ReadWith('functions.verifiers', words='reward.verifier')
STEPWISE = ReadWith('algorithm.needs_steps', words='algorithm.advantage=process')
Amount = Annotated[float, Range(least=-1e6, most=1e6)]  # of a reward; float32 must hold its square


class SourceRewards(NamedTuple):
    """How completions for one source of the data are judged: a section of config.reward.by_source."""

    parts: Annotated[tuple[tuple[Text, Amount], ...], Length(1), PARTS]
    verifier: str = ''
    correct_at: Amount = 1.0


class RewardOptions(NamedTuple):
    """config.reward as plain values."""

    # (file in grpo_jax/rewards or FILE.py:NAME of yours, weight)
    parts: Annotated[tuple[tuple[Text, Amount], ...], Length(1), PARTS, Kind.PARTS] = (('numeric', 1.0),)
    options: Amendable[Mapping[str, Any]] = MappingProxyType({})  # by a reward's name; see configs/default.py
    # what functions of yours get, as completions and prompts: texts; messages, lists of dicts with role and content
    completions: Annotated[str, OneOf(('texts', 'messages')), OWN] = 'texts'
    failed: Amendable[Amount] = 0.0  # value of a part that ran out of time or memory, or whose service refused
    deadline: Free[Seconds] = 10.0  # seconds that a part may take on a completion in a worker process
    # threads that judge, and worker processes where a part needs them
    workers: Free[Annotated[int, Range(least=1, most=10_000)]] = 4
    memory_gib: Free[Gibibytes] = 4.0  # GiB of memory that a worker process may take
    # times that a part of yours is called again after an exception, later each time
    retries: Free[Annotated[int, Range(least=0, most=100), OWN]] = 2
    # share of a step's completions, after the first step, that may lack a part, since a function of yours raised
    # exceptions or a service was away
    most_missing: Free[Annotated[float, Range(least=0, below=1), MAY_LACK]] = 0.1
    # share of gold answers that the verifier may misjudge before the run starts
    self_test: Annotated[Free[Share], VERIFIED] = 0.02
    # where a part with a weight cannot tell (None, NaN): unscorable, the completion has no reward and counts in no
    # statistic; zero: that part counts as 0
    missing: Amendable[Annotated[str, OneOf(('unscorable', 'zero'))]] = 'unscorable'
    truncated_reward: Amendable[Amount] = 0.0  # added when the budget ends before a stop token
    # file in grpo_jax/rewards that rewards steps, for advantage process
    step_rewards: Annotated[str, STEPWISE] = ''
    steps_with_outcome: bool = False  # the total reward is a further step, at a completion's last token
    length_shaping: str = ''  # shaping by length: a function of grpo_jax/rewards/length.py
    # factor of the shaping by length, before the product is added to the reward
    length_shaping_weight: Annotated[Amendable[Amount], ReadWith('.length_shaping')] = 1.0
    verifier: str = 'numeric'  # the part that decides correct; '' when there is none
    # least value of the verifier at which a completion is correct
    correct_at: Annotated[Amendable[Amount], VERIFIED] = 1.0
    # source of the data, by meta['source'] -> parts, verifier, correct_at of its own
    by_source: Mapping[str, SourceRewards] = MappingProxyType({})

    @property
    def unverified(self) -> bool:
        """Whether a reward model has a weight and the run has no verifier. Then no metric shows if a gain is true."""
        learned = any(weight and custom.name_of(path) in custom.LEARNED for path, weight in self.parts)
        return learned and not self.verifier and not self.by_source

    @classmethod
    def from_config(cls, section: Any) -> 'RewardOptions':
        """Reads config.reward.

        Raises BadInput for values out of range, a part with two weights, steps_with_outcome without step_rewards, and
        options for a reward that the config does not name.
        """
        values = ranges.read_section(cls, section, 'reward')
        parts, by_source = _read_parts(section['parts'], 'reward.parts'), _read_sources(section['by_source'])
        # a part has one file and one weight in all sources
        pairs = {custom.name_of(path): (path, weight) for path, weight in parts}
        with Checks() as check:
            for source, source_rewards in by_source.items():
                for path, weight in source_rewards.parts:
                    first_pair = pairs.setdefault(custom.name_of(path), (path, weight))
                    if first_pair != (path, weight):
                        key = f'reward.by_source.{source}.parts'
                        check.keep(BadInput(key, (path, weight), f'is {first_pair} elsewhere; use that'))
            paths = [*(path for path, _ in pairs.values()), section['step_rewards']]
            check(_check_options, section['options'], {custom.name_of(path): path for path in paths})
            if section['steps_with_outcome'] and not section['step_rewards']:
                remedy = 'needs reward.step_rewards; name one, or use False'
                check.keep(BadInput('reward.steps_with_outcome', True, remedy))
        return cls(**values | {'parts': parts, 'options': dict(section['options']), 'by_source': by_source})

    @property
    def sources(self) -> tuple[SourceRewards, ...]:
        """All SourceRewards: first the one for sources that by_source does not name, then the ones in by_source."""
        return SourceRewards(self.parts, self.verifier, self.correct_at), *self.by_source.values()

    @property
    def verifies_all(self) -> bool:
        """Whether every source has a verifier."""
        return all(source.verifier for source in self.sources)


def _read_parts(parts, key):
    """The pairs (part, weight) of a config's list, with float weights; raises BadInput for a part that comes twice."""
    names = [custom.name_of(path) for path, _ in parts]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise BadInput(key, parts, f'has {repeated} twice; name it once, with one weight')
    return tuple((path, float(weight)) for path, weight in parts)


def _read_sources(section):
    """Reads config.reward.by_source as {source: SourceRewards}; raises BadInput for a malformed section."""
    ranges.check_value('reward.by_source', section, Mapping)
    sources = {}
    for name, values in section.items():
        key = f'reward.by_source.{name}'
        ranges.check_value(key, values, Mapping)
        unknown = sorted(set(values) - set(SourceRewards._fields))
        if unknown or 'parts' not in values:
            change = f'leave out {", ".join(map(str, unknown))}' if unknown else 'add parts'
            raise BadInput(key, sorted(values), f'must have parts, and may have verifier and correct_at; {change}')
        values = dict(values.items())
        ranges.check(SourceRewards, values, key)
        sources[str(name)] = SourceRewards(**values)._replace(parts=_read_parts(values['parts'], f'{key}.parts'))
    return sources


def _check_options(options, paths):
    """Raises BadInput for options of an unknown reward, for an unknown option, and for a value out of range.

    options: config.reward.options; paths: {name: path} of the rewards that the config names. Options of a user's
    function are left to `build`. Rewards of this package that the run does not use are checked too.
    """
    with Checks() as check:
        for name, values in options.items():
            key, declared = f'reward.options.{name}', declared_options(name)
            if declared is None and name not in paths and values:
                hint = ranges.nearest(name, {*paths, *options} - {name, ''})
                check.keep(BadInput(key, NO_VALUE, f'belongs to no reward that the config names; {hint}'))
            elif check(ranges.check_value, key, values, Mapping) is UNMADE or user_files.is_file(paths.get(name, '')):
                continue
            elif declared is not None:
                check(_check_declared, name, values, declared)


def _check_declared(name, values, declared):
    """Raises BadInput for each option that the reward `name` does not declare, and for each value out of range.

    values: {option: value}, from the config; declared: {option: parameter}, from the reward's functions.
    """
    with Checks() as check:
        for option, value in values.items():
            key = f'reward.options.{name}.{option}'
            check(ranges.check_declared, key, value, declared)
            if option in declared:
                check(ranges.check_value, key, value, declared[option].annotation)


def declared_options(name: str) -> dict[str, inspect.Parameter] | None:
    """{option: parameter} of a reward of this package or of a shaping by length; None for any other name."""
    module, shaping = _import(name), getattr(length, name, None)
    if inspect.isfunction(shaping):
        return _options_in(SimpleNamespace(reward=shaping))
    return _options_in(module) if any(hasattr(module, key) for key in WITH_OPTIONS) else None


def _options_in(module):
    """{option: parameter}: all options of a reward's module or namespace, from the signatures of WITH_OPTIONS."""
    options = {}
    for function in (getattr(module, key) for key in WITH_OPTIONS if hasattr(module, key)):
        for option, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and option not in SUPPLIED:
                fields = ranges.type_of(parameter.annotation)  # of a NamedTuple, the fields are the options
                options = (ranges.keys_of(fields) if fields else {option: parameter}) | options
    return options


def _import(name):
    """The module of the reward `name` of this package; None where the package has no such module."""
    path = f'grpo_jax.rewards.{name}'
    return importlib.import_module(path) if str(name).isidentifier() and importlib.util.find_spec(path) else None


class Part(NamedTuple):
    """A reward function with its options bound, its weight, and how it is called."""

    function: Callable
    weight: float
    asynchronous: bool = False
    batched: bool = False  # takes all completions at once
    own: bool = False  # a function of the user's, which may be called again after an exception
    reads_correct: bool = False  # reads the verifier's verdict
    reads_truncated: bool = False  # reads whether the budget ended before a stop token
    reads_step: bool = False  # reads which step of the run the completions are of
    remote: bool = False  # asks a service, which may be away
    columns: Sequence[str] = ()  # that the data set must have

    def tell(self, truncated: Any, step: int | None) -> dict[str, Any]:
        """The keyword arguments for a call of the part: `truncated` and `step`, each where the part reads it.

        Outside of steps (None) a service is told so, and a function of the user's gets 0.
        """
        known = {'truncated': truncated} if self.reads_truncated else {}
        return known | ({'step': step if self.remote else step or 0} if self.reads_step else {})


class RewardFunctions(NamedTuple):
    """The rewards of a run. A context manager: on exit it ends the threads and processes that the rewards share."""

    options: RewardOptions
    parts: dict[str, Part]
    resources: Resources
    extract: Callable | None = None  # the verifier's answer extraction, where it reads answers
    extract_strict: Callable | None = None  # the same by the stricter reading
    same: Callable | None = None  # (answer, answer) -> bool, where one extracted answer may have several spellings
    strict: Callable | None = None  # (completion, example) -> float | None, where the verifier has it
    reads_answers: bool = True  # whether the verifier needs a gold answer; reward models do not
    gold: Callable | None = None  # (example) -> (a right completion, wrong ones...), where the verifier has it
    steps: Callable | None = None  # rewards of steps: (completions, examples) -> list of [(end in characters, float)]
    shaping: Callable | None = None  # (lengths, correct) -> f64[P, G], a function of rewards.length
    by_source: Mapping[str, 'RewardFunctions'] = MappingProxyType({})  # source -> the functions for its completions
    step: int | None = None  # the run's step whose completions are judged; None: outside of steps, as in the self-test

    @property
    def tolerant(self) -> bool:
        """Whether a completion may lack a part that raises exceptions (after the first step); else they end the run."""
        return bool(self.step)

    @property
    def verifier(self) -> str:
        """The name of the part whose value, at reward.correct_at or more, means correct; '' without a verifier."""
        return self.options.verifier

    @property
    def verifiers(self) -> str:
        """The names of all sources' verifiers, joined by commas; '' without a verifier."""
        names = [functions.verifier for functions in (self, *self.by_source.values()) if functions.verifier]
        return ', '.join(dict.fromkeys(names))

    @property
    def read_options(self) -> set[str]:
        """Names of the rewards and shaping whose options a run reads; metrics always read the options of reflection."""
        return {*self.every_part, custom.name_of(self.options.step_rewards), self.options.length_shaping, 'reflection'}

    @property
    def has_own(self) -> bool:
        """Whether a part is a function of the user's."""
        return any(part.own for part in self.every_part.values())

    @property
    def may_lack(self) -> bool:
        """Whether completions may lack a part: a function of the user's, or a service."""
        return any(part.own or part.remote for part in self.every_part.values())

    @property
    def every_part(self) -> dict[str, Part]:
        """The parts of all sources, by name."""
        return dict(item for functions in (self, *self.by_source.values()) for item in functions.parts.items())

    def of(self, example: Example) -> 'RewardFunctions':
        """The RewardFunctions that judge an example's completions, chosen by meta['source']."""
        return self.by_source.get(str(example.meta.get('source')), self) if self.by_source else self

    def needs_answer(self, example: Example) -> bool:
        """Whether the example is judged by its gold answer."""
        functions = self.of(example)
        return bool(functions.verifier) and functions.reads_answers

    def divide(self, examples: Sequence[Example]) -> list[tuple['RewardFunctions', list[int]]]:
        """[(functions, indices), ...]: one source's functions, and the indices of the examples that they judge."""
        groups = {}
        for i, example in enumerate(examples):
            functions = self.of(example)
            groups.setdefault(id(functions), (functions._replace(by_source={}), []))[1].append(i)
        return list(groups.values())

    def close(self):
        """Ends threads and processes, and frees reward models."""
        self.resources.close()

    def __enter__(self) -> 'RewardFunctions':
        return self

    def __exit__(self, kind, *exception):
        self.resources.close(wait=kind is None)  # an error must not wait for a reward that hangs


def build(
    options: RewardOptions, max_tokens: int, functions: Mapping[str, Callable] | None = None, workdir: str = os.devnull
) -> RewardFunctions:
    """Builds the RewardFunctions of a run; raises BadInput for a reward that cannot work.

    max_tokens: the most tokens of a completion; functions: the user's rewards by name, as handed to train.run; workdir:
    the run's folder, in which services' verdicts are stored once it exists. No thread or process starts yet.
    """
    resources = Resources(workers=options.workers, deadline=options.deadline, memory_gib=options.memory_gib)
    find = functools.partial(_find, functions=functions or {}, pool=resources.pool)
    shared = {
        **{'pool': resources.pool, 'sandbox': resources.sandbox, 'models': resources.models},
        **{'services': resources.services, 'workdir': workdir},
    }
    bind = functools.partial(_bind, options=options.options, shared=shared)
    sources = {'reward': options.sources[0]} | {f'reward.by_source.{n}': s for n, s in options.by_source.items()}
    weights = {custom.name_of(path): (path, weight) for source in options.sources for path, weight in source.parts}
    steps = shaping = None
    with Checks() as check:
        modules = {name: check(find, path) for name, (path, _) in weights.items()}
        given = {name for name, (path, _) in weights.items() if user_files.is_file(path) or name in (functions or {})}
        for name in given:
            if modules[name] is not UNMADE and options.completions == 'messages':
                modules[name].reward = binding.with_messages(modules[name].reward)
        parts = {
            name: check(_make_part, name, module, weights[name][1], bind, name in given)
            for name, module in modules.items()
        }
        if path := options.step_rewards:
            module = modules.setdefault(custom.name_of(path), check(find, path, 'step_rewards'))
            steps = check(_bind_steps, path, module, bind)
        if options.length_shaping:
            shaping = check(_bind_shaping, options, max_tokens)
        for name, module in modules.items():
            if name in (functions or {}) and declared_options(name):  # options may be of its namesake
                continue
            check(_check_declared, name, options.options.get(name, {}), check(_options_in, module))
            if name in weights and module is not UNMADE and hasattr(module, 'check'):
                check(lambda name=name, module=module: bind(name, module.check)())
        for key, source in sources.items():
            names = [custom.name_of(path) for path, _ in source.parts]
            if source.verifier and source.verifier not in names:
                remedy = f'is none of {key}.parts; add it, or choose one of {", ".join(sorted(names))}'
                check.keep(BadInput(f'{key}.verifier', source.verifier, remedy))

    def bind_source(source, key):
        """The RewardFunctions for one source. source: its SourceRewards; key: its config section, for messages."""
        source_parts = {custom.name_of(path): parts[custom.name_of(path)] for path, _ in source.parts}
        _check_verifier(source.verifier, source_parts, key)
        verifier = modules[source.verifier] if source.verifier else SimpleNamespace()
        return RewardFunctions(
            options._replace(**source._asdict()),
            source_parts,
            resources,
            extract=getattr(verifier, 'extract', None),
            extract_strict=getattr(verifier, 'extract_strict', None),
            same=getattr(verifier, 'same', None),
            strict=bind(source.verifier, verifier.strict) if hasattr(verifier, 'strict') else None,
            reads_answers=getattr(verifier, 'READS_ANSWERS', True),
            gold=getattr(verifier, 'gold', None),
        )

    with Checks() as check:
        own, *others = [check(bind_source, source, key) for key, source in sources.items()]
    return own._replace(steps=steps, shaping=shaping, by_source=dict(zip(options.by_source, others, strict=True)))


def _make_part(name, module, weight, bind, own):
    """The Part of the reward `name`; raises BadInput for a missing option and for one out of its range.

    module: as `_find` returns it; bind(name, function): returns the function with its options bound; own: whether the
    reward is a function of the user's.
    """
    reward = module.reward if weight else getattr(module, 'measure', module.reward)
    function = bind(name, custom.check_results(reward, name))
    parameters = inspect.signature(function).parameters
    asynchronous, batched = binding.is_async(function), 'completions' in parameters
    columns = getattr(function.func, 'columns', getattr(module, 'COLUMNS', ()))
    correct, truncated, step, services = (name in parameters for name in ('correct', 'truncated', 'step', 'services'))
    return Part(function, weight, asynchronous, batched, own, correct, truncated, step, services, columns)


def check_parameters(reward_functions: RewardFunctions, examples: Sequence[Example]):
    """Raises BadInput where an example lacks a column that a reward reads, or a by_source section has no example."""
    present = {str(example.meta.get('source')) for example in examples}
    for source in reward_functions.by_source:
        if source not in present:
            raise BadInput('reward.by_source', source, f'is no source of the data; choose one of {sorted(present)}')
    for functions, indices in reward_functions.divide(examples):
        for name, part in functions.parts.items():
            binding.check_supplied(name, part.columns, [examples[i] for i in indices], part.own)


def options_of(path: str) -> dict[str, inspect.Parameter]:
    """{option: parameter} of a part; a NamedTuple that its functions take counts as one option for each field.

    path: the part as reward.parts names it. Raises BadInput for an unknown part, and for a FILE.py that cannot be
    imported.
    """
    return _options_in(_find(path, functions={}, pool=Pool(1, deadline=1.0, memory_gib=1.0)))  # it starts no process


def _find(path, key='parts', *, functions, pool):
    """A reward's module, or for a user's reward a namespace with its functions; raises BadInput for an unknown one.

    path: the reward's name, or FILE.py:NAME; functions: the user's rewards by name; key: in config.reward.
    """
    if path in functions:
        return SimpleNamespace(reward=binding.bind_names(functions[path], path))
    if user_files.is_file(path):
        return custom.load_file(path, pool)
    module = _import(path)
    if module is None or (key == 'parts' and not hasattr(module, 'reward')):
        raise BadInput(
            f'reward.{key}',
            path,
            'no such file in grpo_jax/rewards; add one with reward(completion, '
            'example), give FILE.py:NAME, or hand the function over from Python, with functions=',
        )
    return module


def _bind(name, function, options, shared):
    """The function with its options bound; raises BadInput for a missing option and for one out of its range.

    options: config.reward.options; shared: arguments that the run supplies, by name.
    """
    values, bound, missing = dict(options.get(name, {})) | shared, {}, []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        fields = getattr(parameter.annotation, '_fields', ())  # of a NamedTuple
        defaults = getattr(parameter.annotation, '_field_defaults', ())
        absent = [field for field in fields or [key] if field not in values and field not in defaults]
        if not absent:
            given = {field: values[field] for field in fields if field in values}
            bound[key] = parameter.annotation(**given) if fields else values[key]
        elif parameter.default is parameter.empty and key not in ('correct', 'step', 'truncated'):
            missing += absent
    ranges.check(function, options.get(name, {}), f'reward.options.{name}')
    if missing:
        raise BadInput(f'reward.options.{name}', NO_VALUE, f'lacks {", ".join(sorted(missing))}; add what it lacks')
    return functools.partial(function, **bound)


def _check_verifier(verifier, parts, key):
    """Raises BadInput where a part reads `correct` and the verifier is missing, not plain, or that part itself."""
    plain = verifier and not (parts[verifier].asynchronous or parts[verifier].batched)
    for name, part in parts.items():
        if part.reads_correct and (name == verifier or not plain):
            raise BadInput(
                f'{key}.verifier',
                verifier,
                f'must be a plain function of one completion, since {name} reads its verdict; choose such a part',
            )


def _bind_steps(path, source, bind):
    """The function steps(completions, examples) of the reward `source`; raises BadInput for one without steps."""
    if not hasattr(source, 'steps'):
        raise BadInput('reward.step_rewards', path, "has no steps(completion, example); use calculator, or ''")
    steps = bind(custom.name_of(path), source.steps)
    if 'completions' in inspect.signature(steps).parameters:
        return steps
    return lambda completions, examples: [steps(*row) for row in zip(completions, examples, strict=True)]


def _bind_shaping(options, max_tokens):
    """The shaping by length with its options bound; raises BadInput for an unknown one and for one that cannot work."""
    name, shapings = options.length_shaping, {n: f for n, f in vars(length).items() if inspect.isfunction(f)}
    if name not in shapings:
        raise BadInput('reward.length_shaping', name, f"choose {', '.join(shapings)}, or ''")
    if name in length.READS_CORRECT and not options.verifies_all:
        raise BadInput('reward.length_shaping', name, 'needs a reward.verifier to know what is correct; name one')
    shaping = _bind(name, shapings[name], options.options, {'limit': max_tokens})
    margin = shaping.keywords.get('margin', 0)
    if margin >= max_tokens:
        raise BadInput(f'reward.options.{name}.margin', margin, f'lower it below rollout.max_tokens = {max_tokens}')
    return shaping
