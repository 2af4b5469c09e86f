"""What monitors are made of: the types Diagnosis, Sign, Answer, Context and Monitor, and the arithmetic of rows.

Rows come from metrics.jsonl, the newest last. They are dicts of floats; a name may be missing, or be None when a
number could not be computed. A monitor that lacks a metric which it needs says nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import math
import re
import statistics
from typing import Any, NamedTuple

from grpo_jax import algorithms, ranges
from grpo_jax.algorithms import checks, pieces
from grpo_jax.collect.options import READ_FROM_DATA
from grpo_jax.diagnose.options import DiagnoseOptions
from grpo_jax.diagnose.remedies import UNKNOWN, Limits, make_acts
from grpo_jax.errors import BadInput
from grpo_jax.rewards.custom import name_of

Row = Mapping[str, Any]
Rows = Sequence[Row]
AGE = 100  # steps after which a measurement is too old
# of AdamW; no larger one is published for any model, and the smallest model of the demo learns at it
HIGHEST_RATE = 3.3e-4
HOLDING_KL = 0.3  # coefficient of k3: in the lab of kl_runaway 0.1 does not hold the policy
WAYS = re.compile(r'--(?:amend|branch=DIR) ?')  # flags with which a run goes on with other settings


class Diagnosis(NamedTuple):
    """What a monitor reports at a step; each text is one line."""

    monitor: str
    step: int
    seen: str
    evidence: str  # numbers and their steps
    cause: str  # the likely cause
    remedy: str  # flags of a command; '' when nothing is to be done, or no known remedy would act
    command: str = ''  # the whole command with the remedy, where the run was begun by one

    def __str__(self):
        """The Diagnosis in one line."""
        remedy = f'; try {self.command or self.remedy}' if self.remedy else ''
        return f'{self.monitor}: {self.seen} ({self.evidence}); {self.cause}{remedy}'


class Answer(NamedTuple):
    """A likely cause, and its remedy.

    A remedy is a text of flags for the run's command. They include --amend or --branch=DIR when the change needs one,
    or --workdir=NEW for a new run; '' means that nothing is to be done, or not by a flag: the cause says why.
    Context.remedy_texts and the Sign's numbers fill in its {names}.
    """

    cause: str
    remedy: str
    otherwise: str = ''  # the remedy where the settings of the run make the first one inert


class Sign(NamedTuple):
    """The result of a monitor's function: what it sees in the rows, and the numbers that show it."""

    seen: str
    evidence: str
    answer: str = ''  # a key of the monitor's answers
    numbers: Mapping[str, str] = {}  # texts of numbers in the remedy that the rows decide


class Context(NamedTuple):
    """What monitors know about a run besides its rows, as plain values."""

    options: DiagnoseOptions = DiagnoseOptions()
    evaluations: Rows = ()  # rows of evaluations.jsonl so far
    group_size: int = 8
    updates: int = 1  # optimizer updates a rollout
    source: str = 'policy'  # where completions come from
    taught: bool = False  # a teacher gives a learning signal, whatever the rewards
    stale: bool = False  # another policy sampled some of the completions, by intent
    staleness: int = 0  # steps by which sampling is ahead
    max_age: int = 0  # steps after which a group that goes on is finished; 0: never
    exact: bool = True  # the model computes in float32
    quantized: bool = False  # the sampler's weights or cache are in int8
    inert: tuple[str, ...] = ()  # settings of the algorithm without effect while all ratios are 1
    gate: str = 'reward'  # what says that a group is dead
    compares: bool = True  # advantages are differences of the rewards of a group
    over_batch: bool = False  # they are divided by the spread of the whole batch
    terms: tuple[str, ...] = ()  # of the reward beside the verifier, that may differ in groups that are all wrong
    kl: str = 'none'
    correction: str = 'none'
    weights: str = 'sequence_mean'
    kl_coef: float = 0.0
    critic_warmup: int = 0  # steps at the start in which the policy does not learn
    optimizer: str = 'optimizer'  # the optimizer's section of the config
    learning_rate: float = 1e-6
    max_grad_norm: float = 1.0
    regularizers: tuple[str, ...] = ()
    max_tokens: int = 64
    temperature: float = 1.0
    chat: bool = False  # prompts use the tokenizer's chat template
    retire_above: float = 0.0
    max_draws: int = 10
    deadline: float = 10.0
    memory_gib: float = 4.0
    parts: tuple[tuple[str, float], ...] = ()  # (name or FILE.py:NAME, weight)
    verifier: str = ''
    evaluation_prompts: int = 256
    minibatches: int = 4  # of equal size, into which a step's prompts can be cut
    steps: int = 0  # of the whole run; 0: unknown
    updates_supervised: int = 0  # of the cold start
    acts: Callable[[str], bool] = bool  # whether a remedy's flags change something that the run reads

    @classmethod
    def from_config(
        cls, config: Any, evaluations: Rows = (), optimizer: str = 'optimizer', limits: Limits = UNKNOWN
    ) -> 'Context':
        """Returns the Context of a run. config: a ConfigDict, or the content of config.json.

        evaluations: rows of evaluations.jsonl; optimizer: the section that the run trains with, 'optimizer' or
        'supervised.optimizer'; limits: of the model and its tokenizer.
        """
        rollout, learner, algorithm = config['rollout'], config['learner'], config['algorithm']
        collection, reward = config['collection'], config['reward']
        inert, compares, over_batch = (), True, False
        try:
            made = algorithms.make(algorithm, collection)
        except BadInput:  # train.run was given an algorithm, and this config makes none
            pass
        else:
            inert = tuple(checks.list_inert(made))
            compares = pieces.compares_outcomes(made.advantage) and made.kl_placement == 'loss'
            over_batch = pieces.property_of(made.advantage, 'over_batch')
        terms = [name_of(path) for path, weight in reward['parts'] if weight and name_of(path) != reward['verifier']]
        terms += ['truncated_reward'] * bool(reward['truncated_reward'])
        terms += [reward['length_shaping']] if reward['length_shaping'] and collection['gate'] == 'none' else []
        optimization = config['optimizer'] if optimizer == 'optimizer' else config['supervised']['optimizer']
        return cls(
            options=ranges.read_options(DiagnoseOptions, config['diagnose'], 'diagnose'),
            evaluations=evaluations,
            group_size=rollout['group_size'],
            updates=learner['epochs'] * learner['minibatches'],
            source=collection['source'],
            taught=bool(config['teacher']['path']),
            stale=any(collection[key] for key in ('max_staleness', 'in_flight', 'staleness'))
            or collection['source'] != 'policy',
            exact=config['model']['dtype'] == 'float32',
            quantized=bool(rollout['cache_dtype'] or rollout['weights_dtype']),
            chat=config['data']['chat'],
            inert=inert,
            compares=compares,
            over_batch=over_batch,
            terms=tuple(terms),
            **{key: algorithm[key] for key in ('kl', 'correction', 'weights', 'kl_coef', 'critic_warmup')},
            regularizers=tuple(algorithm['regularizers']),
            optimizer=optimizer,
            **{key: optimization[key] for key in ('learning_rate', 'max_grad_norm')},
            **{key: collection[key] for key in ('gate', 'retire_above', 'max_draws', 'staleness', 'max_age')},
            **{key: reward[key] for key in ('deadline', 'memory_gib', 'verifier')},
            **{key: rollout[key] for key in ('max_tokens', 'temperature')},
            parts=tuple((name, weight) for name, weight in reward['parts']),
            evaluation_prompts=config['evaluation']['prompts'],
            minibatches=next((n for n in (4, 2, 3, 5, 7) if config['data']['prompts_per_step'] % n == 0), 1),
            steps=config['steps'] if optimizer == 'optimizer' else config['supervised']['updates'],
            updates_supervised=config['supervised']['updates'],
            acts=make_acts(config, limits),
        )

    @property
    def samples(self) -> bool:
        """Whether the run samples groups of several completions."""
        return self.source not in READ_FROM_DATA and self.group_size > 1

    @property
    def accuracy(self) -> str:
        """The name of the metric with the verifier's mean reward; '' without a verifier."""
        return f'reward/{self.verifier}' if self.verifier else ''

    def remedy_texts(self) -> dict[str, str]:
        """Returns {name: text} for the {names} in remedies: new values of settings, made from the run's own."""
        return {
            'optimizer': self.optimizer,
            'go_on': '--amend' if self.optimizer == 'optimizer' else '--workdir=NEW',
            # by outcome, what is paid beside the verifier teaches nothing where all are wrong
            'amend_paid': '--branch=DIR --config.collection.gate=reward' if self.gate == 'outcome' else '--amend',
            'branch_paid': '--branch=DIR' + ' --config.collection.gate=reward' * (self.gate == 'outcome'),
            'lower_rate': f'{min(self.learning_rate / 10, HIGHEST_RATE):g}',
            'third_rate': f'{min(self.learning_rate / 3, HIGHEST_RATE):.2g}',
            'far_lower_rate': f'{min(self.learning_rate / 30, HIGHEST_RATE):.2g}',
            'higher_rate': f'{self.learning_rate * 10 or 1e-6:g}',
            'norm': f'{self.max_grad_norm / 10:g}',
            'fewer_minibatches': f'{2 if self.updates > 2 and self.minibatches % 2 == 0 else 1}',
            'margin': f'{self.max_tokens // 2}',
            'more_updates': f'{max(200, 2 * self.updates_supervised)}',
            'retire': f'{self.retire_above or 0.9:g}',
            'with_llds': f'{(*dict.fromkeys((*self.regularizers, "llds")),)}',
            'more_kl': f'{max(4 * self.kl_coef, HOLDING_KL):g}',
            'other_chat': f'{not self.chat}',
            'budget': f'{self.max_tokens}',
            'more_tokens': f'{2 * self.max_tokens}',
            'more_completions': f'{2 * self.group_size}',
            # from below 1 up to 1, where the policy samples what it has learned, and from there on by a fifth
            'hotter': f'{max(1.0, round(1.2 * self.temperature, 2)):g}',
            'less_staleness': f'{self.staleness // 4}',
            'less_age': f'{max(self.max_age // 4, 1)}',
            'more_draws': f'{2 * self.max_draws}',
            'minibatches': f'{self.minibatches}',
            'more_seconds': f'{4 * self.deadline:g}',
            'more_memory': f'{2 * self.memory_gib:g}',
            'parts': ' '.join(f'({name!r}, {weight:g}),' for name, weight in self.parts),
            'smaller_parts': ' '.join(
                # the verifier, which may only measure so far, is paid
                f'({path!r}, {(weight or 1.0) if name_of(path) == self.verifier else weight / 10:g}),'
                for path, weight in self.parts
            ),
        }

    def remedy(self, answer: Answer, numbers: Mapping[str, str], step: int) -> str:
        """Returns the flags of an answer's first remedy that acts; '' when none does, or nothing is to be done.

        numbers: {name: text} for names that the rows decide; step: the newest step. After its last step a run cannot go
        on with other settings: then the flags are for a new run, with --workdir=NEW.
        """
        for template in (answer.remedy, answer.otherwise):
            flags = template.format(**self.remedy_texts() | dict(numbers))
            if flags and self.acts(flags):
                if self.steps and step + 1 >= self.steps and '--workdir=NEW' not in flags:
                    flags = '--workdir=NEW ' + WAYS.sub('', flags)
                return flags
        return ''


class Monitor(NamedTuple):
    """A pure function of the rows so far, and its entry in docs/troubleshooting.md."""

    name: str
    symptom: str
    reads: tuple[str, ...]  # metrics; evaluation/NAME is in evaluations.jsonl
    sign: Callable[[Rows, Context], Sign | None]
    answers: Mapping[str, Answer]  # by the Sign's answer
    level: str = 'warning'  # or 'note': information, which never stops or saves a run
    because: tuple[str, ...] = ()  # monitors whose finding explains this one's, which waits behind it

    @property
    def lab(self) -> str:
        """The name of the lab in configs/labs: a run in which the monitor speaks, and the run with the remedy."""
        return self.name

    def judge(self, rows: Rows, context: Context) -> Diagnosis | None:
        """Returns the monitor's Diagnosis from all rows so far; None when it sees nothing."""
        sign = self.sign(rows, context) if rows else None
        if sign is None:
            return None
        answer, step = self.answers[sign.answer], newest_step(rows, context)
        remedy, cause = context.remedy(answer, sign.numbers, step), answer.cause
        if answer.remedy and not remedy:
            flags = answer.remedy.format(**context.remedy_texts() | dict(sign.numbers))
            cause += f'; no remedy is named, since {flags} changes nothing that this run reads, or cannot be set here'
        return Diagnosis(self.name, step, sign.seen, sign.evidence, cause, remedy)


def newest_step(rows: Rows, context: Context) -> int:
    """Returns the step of the newest row, or of a newer evaluation."""
    return max(row['step'] for row in (*rows[-1:], *context.evaluations[-1:]))


def last_values(rows: Rows, name: str, count: int) -> list[float] | None:
    """Returns the metric in the last `count` rows; None when there are fewer rows, or one lacks the metric."""
    values = [row.get(name) for row in rows[-count:]]
    return None if len(values) < count or None in values else values  # pyright: ignore[reportReturnType]


def rows_until_measured(rows: Rows, name: str) -> Rows:
    """Returns the rows up to the newest that has the metric, since few steps do; () if the last AGE rows lack it."""
    age = next((age for age, row in enumerate(reversed(rows[-AGE:])) if row.get(name) is not None), None)
    return () if age is None else rows[: len(rows) - age]


def average(rows: Rows, name: str) -> float | None:
    """Returns the metric's mean over the rows that have the metric; None when no row has it."""
    values = [value for row in rows if (value := row.get(name)) is not None]
    return statistics.fmean(values) if values else None


def average_earned(rows: Rows, name: str, context: Context) -> float | None:
    """Returns a reward's mean as what the policy earns; None also where another policy wrote the completions."""
    return average(rows, name) if context.source == 'policy' else None


def averages(rows: Rows, *names: str) -> list[float] | None:
    """Returns the average of each metric; None when one metric has none."""
    values = [average(rows, name) for name in names]
    return None if None in values else values  # pyright: ignore[reportReturnType]


def spans(rows: Rows, window: int, least: int = 0) -> Iterator[tuple[Rows, Rows]]:
    """Yields pairs (`window` earlier rows, the newest `window` rows), to be compared.

    The earlier rows lie one window back, then two, four and so on, and at last at the start: slow changes show
    as well as sudden ones, and few pairs are compared. With fewer rows than two windows, the pair is the first and the
    second half; nothing is yielded when a half has fewer than `least` rows (0: half a window).
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


def has_improved(before: Rows, now: Rows, context: Context) -> bool:
    """Returns whether accuracy has grown by config.diagnose.gain from `before` to `now`; True when no metric tells.

    Without accuracy, the reward must have grown by `gain` of its standard deviation.
    """
    for name, unit in ((context.accuracy, 1.0), ('reward', average(before, 'reward_std'))):
        old, new = average_earned(before, name, context), average_earned(now, name, context)
        if old is not None and new is not None and unit is not None:
            return new - old >= context.options.gain * unit
    return True


def has_worsened(before: Rows, now: Rows, context: Context) -> bool:
    """Returns whether the reward has fallen by more than half of its earlier standard deviation."""
    least, new = least_reward(before, context), average(now, 'reward')
    return least is not None and new is not None and new < least


def least_reward(before: Rows, context: Context) -> float | None:
    """Returns the reward below which later rows have worsened; None without the reward or its standard deviation."""
    old, spread = average_earned(before, 'reward', context), average(before, 'reward_std')
    return None if old is None or spread is None else old - spread / 2


def format_steps(rows: Rows) -> str:
    """Returns the steps of rows in words: 'step 7', or 'steps 5 to 7'."""
    first, newest = rows[0]['step'], rows[-1]['step']
    return f'step {first}' if first == newest else f'steps {first} to {newest}'


def format_change(name: str, before: Rows, now: Rows) -> str:
    """Returns a metric's means in words: 'length 12.4 in steps 0 to 9, 25.7 in steps 50 to 59'."""
    old, new = average(before, name), average(now, name)
    shown = ['none' if value is None else format_number(value) for value in (old, new)]
    return f'{name} {shown[0]} in {format_steps(before)}, {shown[1]} in {format_steps(now)}'


def format_number(value: float) -> str:
    """Returns a number as text, with three significant digits; from 1000 on as a whole number."""
    return f'{value:.3g}' if abs(value) < 1000 or not math.isfinite(value) else f'{value:.0f}'
