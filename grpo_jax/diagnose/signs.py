"""What monitors are made of: a diagnosis, what it is judged from, and the arithmetic of rows.

Rows are those of metrics.jsonl, the newest last: dicts of floats, in which a name may be missing, or be None where a
number could not be computed. Whatever a monitor needs and does not get makes it silent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import statistics
from typing import Any, NamedTuple

from grpo_jax.diagnose.options import DiagnoseOptions

Row = Mapping[str, Any]
Rows = Sequence[Row]
READ_FROM_DATA = ('demonstrations', 'pairs')  # sources of completions that the policy has not drawn


class Diagnosis(NamedTuple):
    """What a monitor sees at a step, in texts of a line."""

    monitor: str
    step: int
    seen: str
    evidence: str  # numbers, with the steps that they are of
    cause: str  # the likely one
    remedy: str  # flags of the command that goes on with the run

    def __str__(self):
        return f'{self.monitor}: {self.seen} ({self.evidence}); likely: {self.cause}; try {self.remedy}'


class Answer(NamedTuple):
    """A likely cause, and the remedy: text with flags, in which {names} stand for numbers of Context.numbers."""

    cause: str
    remedy: str


class Sign(NamedTuple):
    """What a judge sees in the rows."""

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
    learning_rate: float = 1e-6
    max_tokens: int = 64
    kl_coef: float = 0.0
    max_grad_norm: float = 1.0
    clip_high: float = 0.2
    retire_above: float = 0.0
    max_draws: int = 10
    deadline: float = 10.0
    weights: str = 'sequence_mean'
    parts: tuple[tuple[str, float], ...] = ()  # (name, weight)
    verifier: str = ''
    stale: bool = False  # groups of earlier policies are among those learned from
    evaluation_prompts: int = 256

    @classmethod
    def from_config(cls, config: Any, evaluations: Rows = ()) -> 'Context':
        """The Context of a run with a config, a ConfigDict or what config.json holds."""
        section = config['diagnose'] if 'diagnose' in config else DiagnoseOptions()._asdict()  # earlier runs lack it
        algorithm, collection = config['algorithm'], config['collection']
        return cls(
            options=DiagnoseOptions.from_config(section),
            evaluations=evaluations,
            group_size=config['rollout']['group_size'],
            updates=config['learner']['epochs'] * config['learner']['minibatches'],
            source=collection['source'],
            learning_rate=config['optimizer']['learning_rate'],
            max_tokens=config['rollout']['max_tokens'],
            kl_coef=algorithm['kl_coef'],
            max_grad_norm=config['optimizer']['max_grad_norm'],
            clip_high=algorithm['clip_high'],
            retire_above=collection['retire_above'],
            max_draws=collection['max_draws'],
            deadline=config['reward']['deadline'],
            weights=algorithm['weights'],
            parts=tuple((name.rpartition(':')[2], weight) for name, weight in config['reward']['parts']),
            verifier=config['reward']['verifier'],
            stale=bool(collection['max_staleness']) or collection['source'] == 'reference',
            evaluation_prompts=config['evaluation']['prompts'],
        )

    @property
    def samples(self) -> bool:
        """Whether groups of completions are drawn, so that they can be compared."""
        return self.source not in READ_FROM_DATA and self.group_size > 1

    @property
    def accuracy(self) -> str:
        """The metric that is the verifier's mean; '' without a verifier."""
        return f'reward/{self.verifier}' if self.verifier else ''

    def numbers(self) -> dict[str, str]:
        """What {names} in remedies stand for."""
        parts = ', '.join(f"('{name}', {weight:g})" for name, weight in self.parts)
        return {
            'lower_rate': f'{self.learning_rate / 10:g}',
            'half_rate': f'{self.learning_rate / 2:g}',
            'higher_rate': f'{self.learning_rate * 10:g}',
            'longer': f'{2 * self.max_tokens}',
            'more_completions': f'{2 * self.group_size}',
            'kl_coef': f'{self.kl_coef * 4 or 0.01:g}',
            'max_grad_norm': f'{self.max_grad_norm / 10:g}',
            'budget': f'{self.max_tokens}',
            'parts': parts,
            'deadline': f'{self.deadline * 4:g}',
            'draws': f'{2 * self.max_draws}',
        }


class Monitor(NamedTuple):
    """A pure function of the rows so far, and what docs/troubleshooting.md says about it."""

    name: str
    symptom: str
    reads: tuple[str, ...]  # metrics
    sign: Callable[[Rows, Context], Sign | None]
    answers: Mapping[str, Answer]  # by the Sign's answer
    lab: str = ''  # file of configs/labs
    level: str = 'warning'  # or note: information, for which no run is stopped

    def judge(self, rows: Rows, context: Context) -> Diagnosis | None:
        """The Diagnosis of all rows so far; None where there is nothing to say."""
        sign = self.sign(rows, context) if rows else None
        if sign is None:
            return None
        cause, remedy = self.answers[sign.answer]
        return Diagnosis(
            self.name, rows[-1]['step'], sign.seen, sign.evidence, cause, remedy.format(**context.numbers())
        )


def last(rows: Rows, name: str, count: int) -> list[float] | None:
    """The metric's values of the last `count` rows; None where there are fewer, or one lacks it."""
    values = [row.get(name) for row in rows[-count:]]
    return None if len(values) < count or None in values else values  # pyright: ignore[reportReturnType]


def steps(rows: Rows) -> str:
    """The steps of rows in words: step 7, or steps 5 to 7."""
    first, newest = rows[0]['step'], rows[-1]['step']
    return f'step {first}' if first == newest else f'steps {first} to {newest}'


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return statistics.fmean(values)


def earlier(count: int, window: int) -> Iterator[slice]:
    """Slices of `window` rows before the newest window of `count` rows, ever further back, the first rows last.

    They lie one window back, then two, four and so on, so that what creeps is seen as well as what jumps, and so that
    there are few of them in a long run.
    """
    back = window
    while back <= count - 2 * window:
        yield slice(count - window - back, count - back)
        back *= 2
    if count >= 2 * window:
        yield slice(0, window)
