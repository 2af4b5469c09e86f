"""Trains every preset with every seed on one experiment, and writes a table and curves of the results.

Finished runs are not run again. --config.KEY=VALUE holds for every preset.

Examples:
    python -m grpo_jax sweep --config=arithmetic --workdir=runs/sweep
    python -m grpo_jax sweep --config=countdown --presets=grpo,dapo,rloo --seeds=5 --workdir=runs/countdown"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import contextlib
import csv
import functools
import io
import math
import os
import shutil
import sys
from typing import Any, NamedTuple

from absl import flags
import jax
from ml_collections import config_flags
from ml_collections.config_flags import config_path
import numpy as np

from grpo_jax import PACKAGE, data, statistics, supervised, train, user_files
from grpo_jax.algorithms import Algorithm, pieces
from grpo_jax.errors import NO_VALUE, BadInput, Checks, InUse
from grpo_jax.figures import LEVEL
from grpo_jax.hosts import json_file
from grpo_jax.hosts.files import atomic_folder, writing
from grpo_jax.ranges import Kind
from grpo_jax.run import cli, console, steering
from grpo_jax.run.console import BLUE, GREY, INK, make_panels, series
from grpo_jax.run.loop import owns_workdir
from grpo_jax.run.open import make_algorithm, make_python_config, open_changes
from grpo_jax.run.rows import evaluated_prompts, read_rows
from grpo_jax.run.steering import record_origins, recorded_origins
from grpo_jax.text import escape

# columns of the table: name -> (heading, digits after the point)
COLUMNS = {
    'reward_first': ('training reward, first quarter', 3),
    'reward_last': ('last quarter', 3),
    'reward_before': ('held-out reward before', 3),
    'reward_after': ('after', 3),
    'greedy_before': ('greedy before', 3),
    'greedy_after': ('after', 3),
    'pass@1_before': ('pass@1 before', 3),
    'pass@1_after': ('after', 3),
    'length': ('length', 1),
    'entropy': ('entropy', 3),
    'seconds': ('seconds a step', 2),
}
LEARNED = 'held-out: prompts of the train split, since there are no others'
ELSEWHERE = '*: learns from completions of another policy or of chosen groups; its training reward is theirs'
FILE = 'sources.json'  # in a sweep's workdir: the sources of its reward functions


class Rows(list[dict[str, Any]]):
    """The rows of a sweep's table; their repr is the printed table.

    A row is a dict: (mean, min, max) for each of COLUMNS; texts preset, mark and status; failures {seed: message};
    curves [seeds, steps] of rewards; and runs {seed: {column: number}}.
    """

    def __repr__(self):
        with contextlib.redirect_stdout(io.StringIO()) as text:
            console.show_tables(*make_tables(self))
        return text.getvalue().rstrip()


@owns_workdir
def run(
    get_config: Callable[..., Any],
    presets: Sequence[str],
    seeds: int,
    workdir: str,
    variants: Mapping[str, Algorithm] | None = None,
    functions: Mapping[str, Callable] | None = None,
    examples: Mapping[str, Iterable] | Iterable | None = None,
) -> Rows:
    """Trains the runs that are not finished yet, and returns the table's rows, best first.

    get_config: get_config([preset]) of an experiment's file; presets: names in configs/algorithms, or FILE.py; seeds:
    how many, from 0; workdir: the run of a preset and a seed is in workdir/<preset>/<seed>; variants: algorithms by
    name, such as a notebook's, which train on get_config(); functions: rewards by name that config.reward.parts may
    list; examples: rows in place of the config's data, as train.run takes them. A run that ends with BadInput or
    FloatingPointError counts as failed, and the sweep goes on. Raises BadInput before the first run for pieces that
    cannot work, and where a run was begun here with other settings, pieces or reward functions.
    """
    variants, functions = variants or {}, functions or {}
    names = {preset: _folder_name(preset) for preset in presets}
    _check_names([*variants, *(name for preset, name in names.items() if user_files.is_file(preset))])
    if jax.process_count() > 1:
        raise BadInput(
            '--processes', jax.process_count(), 'are more than the one that a sweep runs in; start it in one'
        )
    # read everything before anything is written
    makers = {name: functools.partial(get_config, preset) for preset, name in names.items()}
    makers |= dict.fromkeys(variants, get_config)
    if not makers or seeds < 1:
        raise BadInput('seeds, presets', (seeds, list(makers)), 'nothing to run; name a preset and at least one seed')
    if examples is not None:
        examples = data.list_rows(examples)  # as a list, since each run reads them
        makers = {name: lambda make=make: make_python_config(make()) for name, make in makers.items()}
    configs = {(name, seed): _set_seed(make(), seed) for seed in range(seeds) for name, make in makers.items()}
    section = data.DataOptions.from_config(next(iter(configs.values())).data)
    origins = data.locate(section, recorded_origins(workdir)).origins  # all runs read the same commits of the hub
    with Checks() as check:
        for name in makers:
            check(make_algorithm, configs[name, 0], variants.get(name))
    for (preset, seed), config in configs.items():
        _refuse_other_run(config, os.path.join(workdir, preset, str(seed)), variants.get(preset))
    record_sources(workdir, functions)
    record_origins(workdir, origins)
    cold_start = functools.cache(lambda seed: _make_cold_start(get_config, seed, workdir, origins, functions))
    elsewhere = {
        preset
        for (preset, _), config in configs.items()
        if config.collection.source != 'policy' or config.collection.dead_groups in ('resample', 'replay')
    }
    outcomes: dict[tuple[str, int], str | None] = {}  # of the runs so far: message of the failure, or None
    rows = Rows()
    for number, ((preset, seed), config) in enumerate(configs.items(), 1):
        folder = os.path.join(workdir, preset, str(seed))
        outcomes[preset, seed] = None
        try:
            if not train.is_finished(config, folder, variants.get(preset)):
                print(f'{number} of {len(configs)}: {preset}, seed {seed}', file=sys.stderr, flush=True)
                own_start = os.path.join(folder, 'cold_start')
                if config.supervised.updates and examples is None and not os.path.exists(own_start):
                    _copy_cold_start(cold_start(seed), own_start)
                record_origins(folder, origins)
                objects = {'algorithm': variants.get(preset), 'functions': functions, 'examples': examples}
                train.run(config, folder, **{name: value for name, value in objects.items() if value})
        except InUse:  # another process has the folder, or has taken it over
            raise
        except (BadInput, FloatingPointError) as error:
            outcomes[preset, seed] = message = ' '.join(str(error).split())
            print(escape(f'{preset}, seed {seed}, failed: {message}'), file=sys.stderr, flush=True)
        rows = summarize(outcomes, seeds, elsewhere, workdir)
        with writing(workdir):
            write_table(rows, workdir)
    with writing(workdir):
        draw_curves(rows, workdir)
    console.show_tables(*make_tables(rows))
    return rows


def choose_presets(names: str) -> list[str]:
    """The presets in a text like 'grpo,FILE.py', or all of configs/algorithms for 'all'; raises BadInput for others."""
    folder = os.path.join(PACKAGE, 'configs', 'algorithms')
    choices = sorted(name[:-3] for name in os.listdir(folder) if name.endswith('.py') and name[0] != '_')
    chosen = choices if names == 'all' else list(dict.fromkeys(names.split(',')))
    for name in chosen:
        if name not in choices and not user_files.is_file(name):
            remedy = f'choose all, or some of {", ".join(choices)}, or give FILE.py of yours'
            raise BadInput('--presets', name, f'is no file in configs/algorithms; {remedy}')
    return chosen


def summarize(
    outcomes: Mapping[tuple[str, int], str | None], seeds: int, elsewhere: Collection[str], workdir: str
) -> Rows:
    """Returns a row for each preset: (mean, least, greatest) of each of COLUMNS over its finished seeds.

    The best held-out reward comes first, and presets without one last. outcomes: {(preset, seed): message of the
    failure, or None}; seeds: runs of each preset; elsewhere: presets that learn from other completions than the
    policy's own samples, which get a mark; workdir: of the sweep.
    """
    rows = Rows()
    for preset in dict.fromkeys(preset for preset, _ in outcomes):
        failures = {seed: text for (name, seed), text in outcomes.items() if name == preset and text is not None}
        finished = [seed for (name, seed), text in outcomes.items() if name == preset and text is None]
        folders = [os.path.join(workdir, preset, str(seed)) for seed in finished]
        runs = {seed: _measure_run(folder) for seed, folder in zip(finished, folders, strict=True)}
        row = {}
        for name in COLUMNS:
            values = [numbers[name] for numbers in runs.values() if not math.isnan(numbers[name])]
            row[name] = (_finite_mean(values), float(min(values)), float(max(values))) if values else (math.nan,) * 3
        status = f'{len(failures)}/{seeds} failed' if failures else f'{len(folders)}/{seeds}'
        curves = np.array([series(folder, 'reward') for folder in folders])
        rows.append(
            {
                'preset': preset,
                'mark': '*' * (preset in elsewhere),
                'status': status,
                'failures': failures,
                'learned': any(evaluated_prompts(folder) == 'training' for folder in folders),
                'curves': curves,
                'runs': runs,
            }
            | row
        )
    # presets without a number come last
    return Rows(sorted(rows, key=lambda row: -np.nan_to_num(row['reward_after'][0], nan=-np.inf)))


def write_table(rows: Rows, workdir: str) -> None:
    """Writes a sweep's table into workdir: table.md for people, table.csv with mean, min and max as columns."""
    os.makedirs(workdir, exist_ok=True)
    with open(os.path.join(workdir, 'table.csv'), 'w', encoding='utf8', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(
            ['preset', 'status', *(f'{name}_{part}' for name in COLUMNS for part in ('mean', 'min', 'max')), 'failure']
        )
        for row in rows:
            numbers = ['' if math.isnan(x) else x for name in COLUMNS for x in row[name]]
            writer.writerow([row['preset'], row['status'], *numbers, '; '.join(row['failures'].values())])
    used = [name for name in COLUMNS if any(not math.isnan(row[name][0]) for row in rows)]
    lines = [['preset', *(COLUMNS[name][0] for name in used), 'status'], ['---', *['---:'] * len(used), '---']]
    lines += [[f'`{row["preset"]}`{row["mark"]}', *(_cell(row, name) for name in used), row['status']] for row in rows]
    with open(os.path.join(workdir, 'table.md'), 'w', encoding='utf8') as file:
        file.writelines(f'| {" | ".join(line)} |\n' for line in lines)
        file.write('\nMean over seeds, with the least and the greatest; length and entropy are of the last quarter.\n')
        if any(row['mark'] for row in rows):
            file.write(f'\n\\{ELSEWHERE}.\n')
        if any(row['learned'] for row in rows):
            file.write(f'\n{LEARNED}.\n')
        # messages quote other people's files; in a block of code, Markdown has no effect
        file.writelines(f'\nFailed:\n\n    {escape(line)}\n' for line in _failure_lines(rows))


def make_tables(rows: Rows) -> list[Any]:
    """Returns the table for the terminal, of means and the held-out reward's range, and the lines of text below it."""
    columns = {
        'training reward': ('reward_first', 'reward_last'),
        'held-out': ('reward_before', 'reward_after'),
        'greedy': ('greedy_before', 'greedy_after'),
        'pass@1': ('pass@1_before', 'pass@1_after'),
        'entropy': ('entropy',),
        's/step': ('seconds',),
    }
    lines = []
    for row in rows:
        cells = [
            ' → '.join(filter(None, (_cell(row, name, spread=False, cut=1) for name in names)))
            for names in columns.values()
        ]
        _, least, most = row['reward_after']
        interval = f'{least:.2f} to {most:.2f}' if most > least else ''
        lines.append([row['preset'] + row['mark'], *cells, interval, row['status']])
    table = console.make_table(
        ['preset', *columns, 'range held-out', 'runs'],
        lines,
        title=f'{len(rows)} presets, means over seeds',
        dense=True,
        wrapped=['range held-out'],
    )
    notes = [ELSEWHERE] if any(row['mark'] for row in rows) else []
    notes += [LEARNED] if any(row['learned'] for row in rows) else []
    return [table, *notes, *_failure_lines(rows)]


def draw_curves(rows: Rows, workdir: str) -> None:
    """Writes curves.png into workdir: a panel for each preset with its rewards by step, over the others' means."""
    drawn = [row for row in rows if len(row['curves'])]
    if not drawn:
        return
    across = min(len(drawn), max(3, math.ceil(math.sqrt(1.3 * len(drawn)))))
    down = math.ceil(len(drawn) / across)
    figure, panels = make_panels(down, across, (2.5 * across + 0.6, 1.85 * down + 0.9), shared=True)
    means = [np.nanmean(row['curves'], 0) for row in drawn]
    for row, mean, panel in zip(drawn, means, panels, strict=False):
        steps = np.arange(1, len(mean) + 1)
        for other in means:
            if other is not mean:
                panel.plot(steps, other, color=GREY, linewidth=0.7, zorder=1)
        if len(row['curves']) > 1:
            panel.fill_between(
                steps,
                np.nanmin(row['curves'], 0),
                np.nanmax(row['curves'], 0),
                color=BLUE,
                alpha=0.22,
                linewidth=0,
                zorder=2,
            )
        panel.plot(steps, mean, color=BLUE, linewidth=1.5, zorder=3)
        panel.set_title(row['preset'] + row['mark'], loc='left', fontsize=9, color=INK, fontweight='bold')
        panel.set_title(f'{row["reward_after"][0]:.2f}', loc='right', fontsize=9, color=BLUE)
    for number, panel in enumerate(panels):
        panel.set_visible(number < len(drawn))
        panel.tick_params(labelbottom=number + across >= len(drawn))  # only under the last panel of a column
    note = f'\n{ELSEWHERE}' if any(row['mark'] for row in drawn) else ''
    figure.suptitle(
        'Training reward by step. Blue: mean and range over seeds, and the held-out reward at the end. '
        f'Grey: the other presets.{note}',
        fontsize=8,
        color=INK,
        x=0.01,
        ha='left',
    )
    figure.savefig(os.path.join(workdir, 'curves.png'), dpi=160)


def config_from_flag(flag: Any) -> Callable[..., Any]:
    """Returns get_config([preset]) of a parsed --config flag; raises BadInput when the flag sets a preset or a seed."""
    file, _, preset = config_flags.get_config_filename(flag).partition(':')
    overrides = config_flags.get_override_values(flag)
    if preset:
        raise BadInput('--config', f'{file}:{preset}', f'a sweep takes presets from --presets; leave out :{preset}')
    if 'seed' in overrides:
        raise BadInput('--config.seed', overrides['seed'], 'a sweep counts its seeds from 0; say how many in --seeds')

    def get_config(*preset):
        config = flag.parser.parse(':'.join([file, *preset]))
        for name, value in overrides.items():
            config_path.set_value(name, config, value)
        return config

    return get_config


def _folder_name(preset):
    """The name of a preset's folder and row: for FILE.py, the file's name without folder and ending."""
    return os.path.basename(preset).removesuffix('.py') if user_files.is_file(preset) else preset


def _check_names(names):
    """Raises BadInput for a name of a variant or preset's file that is no identifier, or is taken."""
    taken = {*choose_presets('all'), 'cold_start'}
    for name in names:
        if not name.isidentifier() or name in taken or names.count(name) > 1:
            remedy = 'must be a word of letters and digits, not cold_start and no other preset or variant; rename it'
            raise BadInput('variants', name, remedy)


def _refuse_other_run(config, folder, variant):
    """Raises BadInput when the folder has a run of other settings or pieces, or with more steps than the config."""
    if os.path.isfile(os.path.join(folder, 'config.json')):
        train.is_finished(config, folder, variant)  # raises when the run has more steps
        changes = open_changes(config, folder, variant)
        if refused := [change for change in changes if change.kind not in (Kind.FREE, Kind.PATH)]:
            steering.refuse(refused, folder, None)


def _set_seed(config, seed):
    """Sets the seed in a config, and returns that config."""
    config.seed = seed
    return config


def _make_cold_start(get_config, seed, workdir, origins, functions):
    """Runs the cold start of a seed, which all presets share, unless it is done; returns its folder."""
    folder = os.path.join(workdir, 'cold_start', str(seed))
    supervised.run(_set_seed(get_config(), seed), folder, origins, functions)
    return folder


def _copy_cold_start(source, target):
    """Copies a finished cold start into a run's folder, whole or not at all."""
    with atomic_folder(target) as temporary:
        # config.json names another algorithm; the run writes its own
        shutil.copytree(source, temporary, ignore=shutil.ignore_patterns('config.json'), dirs_exist_ok=True)


def _measure_run(folder):
    """{column: number} of a finished run; NaN for a number that the run lacks."""
    evaluations = read_rows(os.path.join(folder, 'evaluations.jsonl'))
    timings = read_rows(os.path.join(folder, 'timings.jsonl'))
    seconds = [sum(row.get(stage, 0.0) for stage in ('sample', 'reward', 'observe', 'update')) for row in timings]
    numbers = {'seconds': np.median(seconds)}  # median: the first step compiles
    for when, row in (('before', evaluations[0]), ('after', evaluations[-1])):
        numbers |= {f'{name}_{when}': row.get(name, math.nan) for name in ('reward', 'greedy', 'pass@1')}
    rewards = series(folder, 'reward')
    quarter = max(1, len(rewards) // 4)
    numbers |= {name: _finite_mean(series(folder, name)[-quarter:]) for name in ('length', 'entropy')}
    return numbers | {'reward_first': _finite_mean(rewards[:quarter]), 'reward_last': _finite_mean(rewards[-quarter:])}


def _finite_mean(values):
    """The mean of the finite values; NaN without finite values."""
    values = np.asarray(values)[np.isfinite(values)]
    return float(values.mean()) if len(values) else math.nan


def _cell(row, name, spread=True, cut=0):
    """The text for the mean of a row's column `name`; '' for NaN.

    spread: whether the range follows the mean; cut: digits fewer than in COLUMNS.
    """
    (mean, least, most), digits = row[name], max(COLUMNS[name][1] - cut, 0)
    if math.isnan(mean):
        return ''
    text = f'{mean:.{digits}f}'
    return text + f' ({least:.{digits}f} to {most:.{digits}f})' if spread and most > least else text


def _failure_lines(rows):
    """A line of text for each preset and failure message, with the seeds that failed so."""
    lines = []
    for row in rows:
        for message in dict.fromkeys(row['failures'].values()):
            seeds = ', '.join(str(seed) for seed, text in row['failures'].items() if text == message)
            lines.append(f'{row["preset"]}, seed {seeds}: {message}')
    return lines


class Comparison(NamedTuple):
    """The difference of a column between two presets, over the seeds that both have finished."""

    name: str
    preset: str
    other: str
    seeds: int
    mean: float  # of preset - other, over seeds
    low: float  # interval of the mean
    high: float

    def __str__(self) -> str:
        """The comparison in a sentence."""
        verdict = 'no difference that these seeds could show'
        if self.low > 0 or self.high < 0:
            verdict = f'{self.preset} is {"higher" if self.mean > 0 else "lower"}'
        return (
            f'{self.name}, {self.preset} - {self.other}: {self.mean:+.3f}, {LEVEL:.0%} interval {self.low:+.3f} to '
            f'{self.high:+.3f} ({self.seeds} seeds): {verdict}'
        )


def compare(rows: Rows, preset: str, other: str, name: str = 'reward_after') -> Comparison:
    """Compares two presets by a column of the table, with Student's interval of the mean difference.

    rows: of the table; name: the column. A seed has the same prompts and cold start with both presets, so differences
    by seed vary less than the numbers. Raises BadInput for a preset that is not in the rows, and for fewer than two
    seeds that both have finished.
    """
    runs = {row['preset']: row['runs'] for row in rows}
    for compared in (preset, other):
        if compared not in runs:
            raise BadInput('preset', compared, f'is not in this sweep; choose one of {", ".join(runs)}')
    pairs = [(runs[preset][seed][name], runs[other][seed][name]) for seed in runs[preset] if seed in runs[other]]
    differences = np.array([a - b for a, b in pairs if not math.isnan(a - b)])
    if len(differences) < 2:
        remedy = f'that have {name} of both presets are {len(differences)}, and an interval needs 2; run more'
        raise BadInput('seeds', NO_VALUE, remedy)
    low, high = statistics.mean_interval(differences, level=LEVEL)
    return Comparison(name, preset, other, len(differences), float(differences.mean()), low, high)


def record_sources(workdir: str, functions: Mapping[str, Callable]) -> None:
    """Records the source code of reward functions in FILE; raises BadInput where other code is recorded for a name.

    Without the record a changed function would go unnoticed, since finished runs are not run again.
    """
    path = os.path.join(workdir, FILE)
    recorded = json_file.read_object(path) if os.path.exists(path) else {}
    sources = {f'reward {name}': pieces.describe(function) for name, function in functions.items()}
    for name, source in sources.items():
        if os.path.isdir(workdir) and recorded.get(name, source) != source:
            raise BadInput(name, NO_VALUE, f'was run here with other code; rename it, or delete {workdir}')
    if sources:
        os.makedirs(workdir, exist_ok=True)
        json_file.write(path, recorded | sources)


def main() -> None:
    """Runs the command."""
    values = flags.FLAGS
    run(config_from_flag(values['config']), choose_presets(values.presets), values.seeds, values.workdir)


if __name__ == '__main__':
    cli.define_flags()
    flags.DEFINE_string('presets', 'all', 'Names in configs/algorithms, or FILE.py, separated by commas; or all.')
    flags.DEFINE_integer('seeds', 3, 'Runs of each preset, with seeds from 0.', lower_bound=1)
    cli.run(main)
