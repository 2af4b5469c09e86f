"""From config.reward to the functions that reward a run's completions."""

from collections.abc import Callable, Mapping, Sequence
import functools
import importlib
import importlib.util
import inspect
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, NamedTuple

from grpo_jax import ranges
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.ranges import Amendable, Free, Gibibytes, Kind, Length, Range, Seconds, Share, Text
from grpo_jax.rewards import binding, custom, length
from grpo_jax.rewards.resources import Resources
from grpo_jax.workers import Pool

PARTS = "pairs of a reward and its weight within 1e6, like (('numeric', 1.0), ('format', 0.5))"
OPTIONED = ('reward', 'strict', 'measure', 'steps')  # functions of a reward's file that may have options
LENT = ('correct', 'limit', 'models', 'pool', 'sandbox')  # what the run gives them, and no config
Amount = Annotated[float, Range(least=-1e6, most=1e6)]  # of a reward, whose square float32 must hold


class SourceRewards(NamedTuple):
    """How the completions of one of the data's sources are judged: a section of config.reward.by_source."""

    parts: Annotated[tuple[tuple[Text, Amount], ...], Length(1), PARTS]
    verifier: str = ''
    correct_at: Amount = 1.0


class RewardOptions(NamedTuple):
    """config.reward as plain values."""

    # (file in grpo_jax/rewards or FILE.py:NAME of yours, weight)
    parts: Annotated[tuple[tuple[Text, Amount], ...], Length(1), PARTS, Kind.PARTS] = (('numeric', 1.0),)
    options: Amendable[Mapping[str, Any]] = MappingProxyType({})  # of rewards by name; configs/default.py has them
    failed: Amendable[Amount] = 0.0  # reward of a part that ran out of its time or memory
    deadline: Free[Seconds] = 10.0  # seconds that a part may take on a completion in a worker process
    # threads that judge, and worker processes where a part needs them
    workers: Free[Annotated[int, Range(least=1, most=10_000)]] = 4
    memory_gib: Free[Gibibytes] = 4.0  # of a worker
    self_test: Free[Share] = 0.02  # share of gold answers that the verifier may misjudge before the run starts
    truncated_reward: Amendable[Amount] = 0.0  # added when the budget ends before a stop token
    step_rewards: str = ''  # file in grpo_jax/rewards that rewards steps, for advantage process
    steps_with_outcome: bool = False  # the total reward is a further step, at a completion's last token
    length_shaping: str = ''  # shaping by length: a function of grpo_jax/rewards/length.py
    length_shaping_weight: Amendable[Amount] = 1.0  # what it is multiplied by before it is added
    verifier: str = 'numeric'  # the part that decides correct; '' when there is none
    correct_at: Amendable[Amount] = 1.0  # value of that part from which a completion is correct
    # source of the data, by meta['source'] -> parts, verifier, correct_at of its own
    by_source: Mapping[str, SourceRewards] = MappingProxyType({})

    @classmethod
    def from_config(cls, section: Any) -> 'RewardOptions':
        """The options of config.reward; BadInput for a value that cannot work, whatever the rewards."""
        values = ranges.read_section(cls, section, 'reward')
        parts, by_source = _read_parts(section['parts'], 'reward.parts'), _read_sources(section['by_source'])
        # sources weigh a part alike, and name it by one file
        pairs = {custom.name_of(path): (path, weight) for path, weight in parts}
        for source, own in by_source.items():
            for path, weight in own.parts:
                known = pairs.setdefault(custom.name_of(path), (path, weight))
                if known != (path, weight):
                    raise BadInput(
                        f'reward.by_source.{source}.parts', (path, weight), f'is {known} elsewhere; use that'
                    )
        users = {name for name, (path, _) in pairs.items() if custom.is_file(path)}
        _check_options({name: options for name, options in section['options'].items() if name not in users})
        if section['steps_with_outcome'] and not section['step_rewards']:
            raise BadInput('reward.steps_with_outcome', True, 'needs reward.step_rewards; name one, or use False')
        return cls(**values | {'parts': parts, 'options': dict(section['options']), 'by_source': by_source})

    @property
    def sources(self) -> tuple[SourceRewards, ...]:
        """What judges the sources that are not named, then each of by_source."""
        return SourceRewards(self.parts, self.verifier, self.correct_at), *self.by_source.values()

    @property
    def verifies_all(self) -> bool:
        """Whether every source has a verifier."""
        return all(source.verifier for source in self.sources)

    @property
    def verifier_pays(self) -> bool:
        """Whether there is a verifier, and each has a weight; one without is there for evaluation alone."""
        paid = [
            any(weight and custom.name_of(path) == source.verifier for path, weight in source.parts)
            for source in self.sources
            if source.verifier
        ]
        return bool(paid) and all(paid)


def _read_parts(parts, key):
    """Pairs of a part and its weight; BadInput for a part that comes twice."""
    names = [custom.name_of(path) for path, _ in parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadInput(key, parts, f'has {twice} twice; name it once, with one weight')
    return tuple((path, float(weight)) for path, weight in parts)


def _read_sources(section):
    """The SourceRewards of config.reward.by_source."""
    ranges.check_value('reward.by_source', section, Mapping)
    sources = {}
    for name, values in section.items():
        key = f'reward.by_source.{name}'
        ranges.check_value(key, values, Mapping)
        odd = sorted(set(values) - set(SourceRewards._fields))
        if odd or 'parts' not in values:
            raise BadInput(key, sorted(values), f'must have parts, and may have verifier and correct_at, no {odd}')
        values = dict(values.items())
        ranges.check(SourceRewards, values, key)
        sources[str(name)] = SourceRewards(**values)._replace(parts=_read_parts(values['parts'], f'{key}.parts'))
    return sources


def _check_options(options):
    """BadInput for an option of a reward of this package that is out of its range, whether the reward is chosen or not.

    Those of a user's reward are checked when they are bound.
    """
    for name, values in options.items():
        ranges.check_value(f'reward.options.{name}', values, Mapping)
        known = declared_options(name)
        if known is None:
            continue
        for option, value in values.items():
            if option not in known:
                choices = ', '.join(sorted(known)) or 'none'
                raise BadInput(f'reward.options.{name}.{option}', value, f'is no option; it has {choices}')
            ranges.check_value(f'reward.options.{name}.{option}', value, known[option].annotation)


def declared_options(name: str) -> dict[str, inspect.Parameter] | None:
    """The options by name that a reward of this package, or a shaping by length, declares; None for another name."""
    functions = [getattr(_import(name), key, None) for key in OPTIONED] + [getattr(length, name, None)]
    functions = list(filter(inspect.isfunction, functions))
    options = {}
    for function in functions:
        for option, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and option not in LENT:
                fields = ranges.type_of(parameter.annotation)  # a NamedTuple's fields stand for it
                options = (ranges.keys_of(fields) if fields else {option: parameter}) | options
    return options if functions else None


def _import(name):
    """The module of a file in this package; None where there is none."""
    path = f'grpo_jax.rewards.{name}'
    return importlib.import_module(path) if str(name).isidentifier() and importlib.util.find_spec(path) else None


class Part(NamedTuple):
    """A reward with its options bound."""

    function: Callable
    weight: float
    asynchronous: bool = False
    batched: bool = False  # takes all completions at once
    reads_correct: bool = False  # reads the verifier's verdict
    columns: Sequence[str] = ()  # of the data set, that it must have


class RewardFunctions(NamedTuple):
    """The rewards of a run; a context manager, since they share threads and processes that must end."""

    options: RewardOptions
    parts: dict[str, Part]
    resources: Resources
    extract: Callable | None = None  # the verifier's answer extraction, where it reads answers
    extract_strict: Callable | None = None  # that of its stricter reading
    same: Callable | None = None  # (an extracted answer, another) -> bool, for those that spell one answer in many ways
    strict: Callable | None = None  # (completion, example) -> float | None, where the verifier has it
    reads_answers: bool = True  # whether the verifier goes by the gold answer, as all but reward models do
    gold: Callable | None = None  # (example) -> (a right completion, wrong ones...), where the verifier has it
    steps: Callable | None = None  # rewards of steps: (completions, examples) -> list of [(end in characters, float)]
    shaping: Callable | None = None  # (lengths, correct) -> f64[P, G], one of rewards.length
    by_source: Mapping[str, 'RewardFunctions'] = MappingProxyType({})  # which judge examples of a source in their place

    @property
    def verifier(self) -> str:
        """The part that decides what is correct (from reward.correct_at on), or ''."""
        return self.options.verifier

    @property
    def verifiers(self) -> str:
        """The verifiers of all sources, as a text."""
        names = [own.verifier for own in (self, *self.by_source.values()) if own.verifier]
        return ', '.join(dict.fromkeys(names))

    @property
    def every_part(self) -> dict[str, Part]:
        """The parts of all sources."""
        return dict(item for own in (self, *self.by_source.values()) for item in own.parts.items())

    def of(self, example: Example) -> 'RewardFunctions':
        """Those that judge the completions of an example, by its meta['source']."""
        return self.by_source.get(str(example.meta.get('source')), self) if self.by_source else self

    def needs_answer(self, example: Example) -> bool:
        """Whether the example is judged by its gold answer."""
        own = self.of(example)
        return bool(own.verifier) and own.reads_answers

    def divide(self, examples: Sequence[Example]) -> list[tuple['RewardFunctions', list[int]]]:
        """The functions of a source, without others beside them, and the indices of the examples that they judge."""
        groups = {}
        for i, example in enumerate(examples):
            own = self.of(example)
            groups.setdefault(id(own), (own._replace(by_source={}), []))[1].append(i)
        return list(groups.values())

    def close(self):
        """Ends threads and processes, and lets go of reward models."""
        self.resources.close()

    def __enter__(self) -> 'RewardFunctions':
        return self

    def __exit__(self, kind, *exception):
        self.resources.close(wait=kind is None)  # an error must not wait for a reward that hangs


def build(options: RewardOptions, max_tokens: int, functions: Mapping[str, Callable] | None = None) -> RewardFunctions:
    """The RewardFunctions of completions of up to max_tokens; BadInput for a reward that cannot work.

    functions: rewards by name, beside those of this package. Nothing is started yet.
    """
    resources = Resources(workers=options.workers, deadline=options.deadline, memory_gib=options.memory_gib)
    find = functools.partial(_find, functions=functions or {}, pool=resources.pool)
    shared = {'pool': resources.pool, 'sandbox': resources.sandbox, 'models': resources.models}
    bind = functools.partial(_bind, options=options.options, shared=shared)
    weights = {custom.name_of(path): (path, weight) for source in options.sources for path, weight in source.parts}
    modules = {name: find(path) for name, (path, _) in weights.items()}
    parts = {}
    for name, module in modules.items():
        weight = weights[name][1]
        chosen = module.reward if weight else getattr(module, 'measure', module.reward)
        function = bind(name, custom.check_results(chosen, name))
        parameters = inspect.signature(function).parameters
        asynchronous, batched = inspect.iscoroutinefunction(function), 'completions' in parameters
        if asynchronous and batched:
            raise BadInput('reward.parts', name, 'is async and takes all completions; choose one of the two')
        columns = getattr(function.func, 'columns', ())
        parts[name] = Part(
            function, weight, asynchronous, batched, reads_correct='correct' in parameters, columns=columns
        )

    def bind_source(source, key):
        own = {custom.name_of(path): parts[custom.name_of(path)] for path, _ in source.parts}
        _check_verifier(source.verifier, own, key)
        verifier = modules[source.verifier] if source.verifier else SimpleNamespace()
        return RewardFunctions(
            options._replace(**source._asdict()),
            own,
            resources,
            extract=getattr(verifier, 'extract', None),
            extract_strict=getattr(verifier, 'extract_strict', None),
            same=getattr(verifier, 'same', None),
            strict=bind(source.verifier, verifier.strict) if hasattr(verifier, 'strict') else None,
            reads_answers=getattr(verifier, 'READS_ANSWERS', True),
            gold=getattr(verifier, 'gold', None),
        )

    return bind_source(options.sources[0], 'reward')._replace(
        steps=_steps(options.step_rewards, find, bind) if options.step_rewards else None,
        shaping=_shaping(options, max_tokens) if options.length_shaping else None,
        by_source={name: bind_source(own, f'reward.by_source.{name}') for name, own in options.by_source.items()},
    )


def check_parameters(reward_functions: RewardFunctions, examples: Sequence[Example]):
    """BadInput where an example lacks a column of the data set that a user's reward names and must have.

    Also for a source with rewards of its own that no example comes from.
    """
    present = {str(example.meta.get('source')) for example in examples}
    for source in reward_functions.by_source:
        if source not in present:
            raise BadInput('reward.by_source', source, f'is no source of the data, which has {sorted(present)}')
    for functions, indices in reward_functions.divide(examples):
        for name, part in functions.parts.items():
            binding.check_supplied(name, part.columns, [examples[i] for i in indices])


def options_of(path: str) -> dict[str, inspect.Parameter]:
    """The options of a part of reward.parts, by name, as its function declares them; BadInput for an unknown part."""
    pool = Pool(1, deadline=1.0, memory_gib=1.0)  # which is never started
    parameters = inspect.signature(_find(path, {}, pool).reward).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _find(path, functions, pool, key='parts'):
    """The module of a part, or a namespace with its functions; key: of config.reward, which names it."""
    if path in functions:
        return SimpleNamespace(reward=binding.bind_names(functions[path], path))
    if custom.is_file(path):
        return custom.load_file(path, pool)
    module = _import(path)
    if module is None or (key == 'parts' and not hasattr(module, 'reward')):
        raise BadInput(
            f'reward.{key}',
            path,
            'no such file in grpo_jax/rewards; add one with reward(completion, '
            'example), give FILE.py:NAME, or hand the function to train.run',
        )
    return module


def _bind(name, function, options, shared):
    """The function with the options that it declares, and with what the run lends; BadInput when an option lacks."""
    values, bound, missing = dict(options.get(name, {})) | shared, {}, []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        fields = getattr(parameter.annotation, '_fields', ())  # of a NamedTuple
        absent = [field for field in fields or [key] if field not in values]
        if not absent:
            bound[key] = parameter.annotation(*(values[field] for field in fields)) if fields else values[key]
        elif parameter.default is parameter.empty and key != 'correct':
            missing += absent
    ranges.check(function, options.get(name, {}), f'reward.options.{name}')
    if missing:
        raise BadInput(f'reward.options.{name}', dict(options.get(name, {})), f'lacks {", ".join(sorted(missing))}')
    return functools.partial(function, **bound)


def _check_verifier(verifier, parts, key):
    """BadInput for a verifier that cannot decide what is correct; key: its section of the config."""
    if verifier and verifier not in parts:
        raise BadInput(f'{key}.verifier', verifier, f'must be one of {key}.parts: {sorted(parts)}')
    plain = verifier and not (parts[verifier].asynchronous or parts[verifier].batched)
    for name, part in parts.items():
        if part.reads_correct and (name == verifier or not plain):
            raise BadInput(f'{key}.verifier', verifier, f'must be a plain function, which {name} asks what is correct')


def _steps(path, find, bind):
    """steps(completions, examples) of the reward that rewards steps."""
    source = find(path, key='step_rewards')
    if not hasattr(source, 'steps'):
        raise BadInput('reward.step_rewards', path, "has no steps(completion, example); use calculator, or ''")
    steps = bind(custom.name_of(path), source.steps)
    if 'completions' in inspect.signature(steps).parameters:
        return steps
    return lambda completions, examples: [steps(*row) for row in zip(completions, examples, strict=True)]


def _shaping(options, max_tokens):
    """The shaping by length, with its options bound."""
    name, shapings = options.length_shaping, {n: f for n, f in vars(length).items() if inspect.isfunction(f)}
    if name not in shapings:
        raise BadInput('reward.length_shaping', name, f"choose {', '.join(shapings)}, or ''")
    if name in length.READS_CORRECT and not options.verifies_all:
        raise BadInput('reward.length_shaping', name, 'needs a reward.verifier to know what is correct; name one')
    shaping = _bind(name, shapings[name], options.options, {'limit': max_tokens})
    margin = shaping.keywords.get('margin', 0)
    if margin >= max_tokens:
        raise BadInput(f'reward.options.{name}.margin', margin, f'must be below rollout.max_tokens = {max_tokens}')
    return shaping
