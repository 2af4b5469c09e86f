"""What monitors are made of: a diagnosis, what it is judged from, and the arithmetic of rows.

Rows are those of metrics.jsonl, the newest last: dicts of floats, in which a name may be missing, or be None where a
number could not be computed. Whatever a monitor needs and does not get makes it silent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import math
import statistics
from typing import Any, NamedTuple

from grpo_jax import algorithms
from grpo_jax.algorithms import checks
from grpo_jax.diagnose.options import DiagnoseOptions
from grpo_jax.errors import BadInput

Row = Mapping[str, Any]
Rows = Sequence[Row]
READ_FROM_DATA = ('demonstrations', 'pairs')  # sources of completions that no policy has drawn
AGE = 100  # steps after which a figure is too old


class Diagnosis(NamedTuple):
    """What a monitor sees at a step, in texts of a line."""

    monitor: str
    step: int
    seen: str
    evidence: str  # numbers, with the steps that they are of
    cause: str  # the likely one
    remedy: str  # flags of a command

    def __str__(self):
        remedy = f'; try {self.remedy}' if self.remedy else ''
        return f'{self.monitor}: {self.seen} ({self.evidence}); {self.cause}{remedy}'


class Answer(NamedTuple):
    """A likely cause, and its remedy.

    The remedy is flags and nothing else, for the command of the run: with --amend or --branch=DIR where they need it,
    or with --workdir=NEW for a run from the beginning; '' where none is needed. {names} in it stand for what
    Context.numbers has.
    """

    cause: str
    remedy: str


class Sign(NamedTuple):
    """What a monitor's function sees in the rows."""

    seen: str
    evidence: str
    answer: str = ''  # key of the monitor's answers


class Context(NamedTuple):
    """What monitors know of a run besides its rows: plain values."""

    options: DiagnoseOptions = DiagnoseOptions()
    evaluations: Rows = ()  # rows of evaluations.jsonl so far
    group_size: int = 8
    updates: int = 1  # of a rollout
    source: str = 'policy'  # of completions
    taught: bool = False  # by a teacher, whatever the rewards
    stale: bool = False  # the completions are partly those of another policy, by intent
    exact: bool = True  # computed in float32
    quantized: bool = False  # the sampler's weights or cache are in int8
    inert: tuple[str, ...] = ()  # what of the algorithm does nothing while the policy is the old one
    kl: str = 'none'
    correction: str = 'none'
    weights: str = 'sequence_mean'
    kl_coef: float = 0.0
    critic_warmup: int = 0  # steps at the start in which the policy does not learn
    optimizer: str = 'optimizer'  # its section of the config
    learning_rate: float = 1e-6
    max_grad_norm: float = 1.0
    max_tokens: int = 64
    chat: bool = False  # prompts are in the tokenizer's chat template
    retire_above: float = 0.0
    max_draws: int = 10
    deadline: float = 10.0
    memory_gib: float = 4.0
    parts: tuple[tuple[str, float], ...] = ()  # (name or FILE.py:NAME, weight)
    verifier: str = ''
    evaluation_prompts: int = 256

    @classmethod
    def from_config(cls, config: Any, evaluations: Rows = (), optimizer: str = 'optimizer') -> 'Context':
        """The Context of a run with a config, a ConfigDict or what config.json holds; optimizer: its section there."""
        rollout, learner, algorithm = config['rollout'], config['learner'], config['algorithm']
        collection, reward = config['collection'], config['reward']
        try:
            inert = tuple(checks.list_inert(algorithms.make(algorithm, collection)))
        except BadInput:  # this config makes none, since the run was given another algorithm
            inert = ()
        optimization = config['optimizer'] if optimizer == 'optimizer' else config['supervised']['optimizer']
        return cls(
            options=DiagnoseOptions.from_config(config['diagnose']),
            evaluations=evaluations,
            group_size=rollout['group_size'],
            updates=learner['epochs'] * learner['minibatches'],
            source=collection['source'],
            taught=bool(config['teacher']['path']),
            stale=bool(collection['max_staleness']) or collection['source'] != 'policy',
            exact=config['model']['dtype'] == 'float32',
            quantized=bool(rollout['cache_dtype'] or rollout['weights_dtype']),
            chat=config['data']['chat'],
            inert=inert,
            **{key: algorithm[key] for key in ('kl', 'correction', 'weights', 'kl_coef', 'critic_warmup')},
            optimizer=optimizer,
            **{key: optimization[key] for key in ('learning_rate', 'max_grad_norm')},
            **{key: collection[key] for key in ('retire_above', 'max_draws')},
            **{key: reward[key] for key in ('deadline', 'memory_gib', 'verifier')},
            max_tokens=rollout['max_tokens'],
            parts=tuple((name, weight) for name, weight in reward['parts']),
            evaluation_prompts=config['evaluation']['prompts'],
        )

    @property
    def samples(self) -> bool:
        """Whether groups of completions are drawn, so that they can be compared."""
        return self.source not in READ_FROM_DATA and self.group_size > 1

    @property
    def accuracy(self) -> str:
        """The metric that has the verifier's mean; '' without a verifier."""
        return f'reward/{self.verifier}' if self.verifier else ''

    def numbers(self) -> dict[str, str]:
        """What {names} in remedies stand for, as text."""
        return {
            'optimizer': self.optimizer,
            'go_on': '--amend' if self.optimizer == 'optimizer' else '--workdir=NEW',
            'lower_rate': f'{self.learning_rate / 10:g}',
            'higher_rate': f'{self.learning_rate * 10:g}',
            'lower_norm': f'{self.max_grad_norm / 10:g}',
            'more_kl': f'{self.kl_coef * 4 or 0.01:g}',
            'other_chat': f'{not self.chat}',
            'budget': f'{self.max_tokens}',
            'more_tokens': f'{2 * self.max_tokens}',
            'more_completions': f'{2 * self.group_size}',
            'more_draws': f'{2 * self.max_draws}',
            'more_seconds': f'{4 * self.deadline:g}',
            'more_memory': f'{2 * self.memory_gib:g}',
            'parts': self._parts(1.0),
            'smaller_parts': self._parts(0.1),
        }

    def _parts(self, factor):
        """The parts of the reward as a flag has them; the weights of those that the verifier is not, by a factor."""
        weights = [(name, weight * (1.0 if name == self.verifier else factor)) for name, weight in self.parts]
        return ' '.join(f'({name!r}, {weight:g}),' for name, weight in weights)


class Monitor(NamedTuple):
    """A pure function of the rows so far, and what docs/troubleshooting.md says of it."""

    name: str
    symptom: str
    reads: tuple[str, ...]  # metrics; evaluation/NAME is of evaluations.jsonl
    sign: Callable[[Rows, Context], Sign | None]
    answers: Mapping[str, Answer]  # by the Sign's answer
    level: str = 'warning'  # or note: information, for which nothing is stopped or saved

    @property
    def lab(self) -> str:
        """The module of configs/labs with a run in which it speaks, and the remedy."""
        return self.name

    def judge(self, rows: Rows, context: Context) -> Diagnosis | None:
        """The Diagnosis of all rows so far; None where there is nothing to say."""
        sign = self.sign(rows, context) if rows else None
        if sign is None:
            return None
        cause, remedy = self.answers[sign.answer]
        step = newest_step(rows, context)
        return Diagnosis(self.name, step, sign.seen, sign.evidence, cause, remedy.format(**context.numbers()))


def newest_step(rows: Rows, context: Context) -> int:
    """The step of the newest row, or of the evaluation that has come after it."""
    return max(row['step'] for row in (*rows[-1:], *context.evaluations[-1:]))


def last(rows: Rows, name: str, count: int) -> list[float] | None:
    """The metric in the last `count` rows; None where there are fewer, or one lacks it."""
    values = [row.get(name) for row in rows[-count:]]
    return None if len(values) < count or None in values else values  # pyright: ignore[reportReturnType]


def until_known(rows: Rows, name: str) -> Rows:
    """The rows up to the newest that has the metric, for one that is not measured in each step; () without."""
    age = next((age for age, row in enumerate(reversed(rows[-AGE:])) if row.get(name) is not None), None)
    return () if age is None else rows[: len(rows) - age]


def average(rows: Rows, name: str) -> float | None:
    """The mean of the metric over the rows that have it; None where none has."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if values else None


def averages(rows: Rows, *names: str) -> list[float] | None:
    """The averages of metrics; None where one has none."""
    values = [average(rows, name) for name in names]
    return None if None in values else values  # pyright: ignore[reportReturnType]


def spans(rows: Rows, window: int, least: int = 0) -> Iterator[tuple[Rows, Rows]]:
    """(`window` earlier rows, the newest `window` rows), the earlier ones ever further back and at last the first.

    They lie one window back, two, four and so on, so that what creeps shows as well as what jumps, at a small price.
    Of fewer rows than two windows, it is the first and the second half, of at least `least` rows (0: half a window).
    """
    width = min(window, len(rows) // 2)
    if width < (least or max(window // 2, 2)):
        return
    count, back = len(rows), width
    while width + back <= count:
        yield rows[count - width - back : count - back], rows[-width:]
        back *= 2
    if count >= 2 * width:
        yield rows[:width], rows[-width:]


def improved(before: Rows, now: Rows, context: Context) -> bool:
    """Whether what the run is for has grown: accuracy by config.diagnose.gain, else reward by that many deviations.

    Also where neither is known: then nothing speaks against it.
    """
    for name, unit in ((context.accuracy, 1.0), ('reward', average(before, 'reward_std'))):
        old, new = average(before, name), average(now, name)
        if old is not None and new is not None and unit is not None:
            return new - old >= context.options.gain * unit
    return True


def worsened(before: Rows, now: Rows) -> bool:
    """Whether the reward has fallen by more than half of the standard deviation that it had."""
    old, new = averages(before, 'reward', 'reward_std'), average(now, 'reward')
    return old is not None and new is not None and new < old[0] - old[1] / 2


def steps(rows: Rows) -> str:
    """The steps of rows in words: step 7, or steps 5 to 7."""
    first, newest = rows[0]['step'], rows[-1]['step']
    return f'step {first}' if first == newest else f'steps {first} to {newest}'


def change(name: str, before: Rows, now: Rows) -> str:
    """A metric's means in words: length 12.4 in steps 0 to 9, 25.7 in steps 50 to 59."""
    old, new = average(before, name), average(now, name)
    shown = ['none' if value is None else number(value) for value in (old, new)]
    return f'{name} {shown[0]} in {steps(before)}, {shown[1]} in {steps(now)}'


def number(value: float) -> str:
    """A number with three digits."""
    return f'{value:.3g}' if abs(value) < 1000 or not math.isfinite(value) else f'{value:.0f}'
