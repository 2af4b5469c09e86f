"""The contents of a report as plain values: header, curves, timeline and comparison."""

from collections.abc import Iterable, Iterator, Sequence
import contextlib
import importlib.metadata
import itertools
import os
import re
from typing import Any

from grpo_jax.algorithms.algorithm import MODULES
from grpo_jax.diagnose import MONITORS, advice
from grpo_jax.errors import BadInput
from grpo_jax.run import config_file, steering
from grpo_jax.run.loop import MEASURED
from grpo_jax.text import escape
from grpo_jax.tools import provenance
from grpo_jax.tools.report import panels, verdict
from grpo_jax.tools.report.read import Run, Variant, as_number, read_lines

SHOWN_VARIANTS = 12  # the most variants with a comparison in words, and with rollouts
MOST_ROWS = 500  # of the timeline
NO_PIECE = ('none', 'all_tokens')  # pieces without effect, which are not shown
STAGES = ('evaluate', 'sample', 'reward', 'observe', 'update')  # of a step, in timings.jsonl
# heading of a fact -> keys of the config whose values are shown
FACTS = {
    'model': ('model.path',),
    'data': ('data.name', 'data.path'),
    'prompts a step': ('data.prompts_per_step',),
    'completions a prompt': ('rollout.group_size',),
    'temperature': ('rollout.temperature',),
    'learning rate': ('optimizer.learning_rate',),
}


def make_header(variants: Sequence[Variant], notes: Sequence[str]) -> dict[str, Any]:
    """Returns the template's values: title, verdict, facts, table of variants, timeline, comparisons, notes."""
    first = variants[0]
    text, meaning = verdict.headline(first)
    headings, rows = verdict.make_table(variants)
    return {
        'title': first.name if len(variants) < 3 else f'{first.name} and {len(variants) - 1} others',
        'others': [variant.name for variant in variants[1:]],
        'verdict': text,
        'meaning': meaning,
        'facts': list(facts(first, [find_experiment(variant.runs[0])[1] for variant in variants])),
        'headings': headings if len(variants) > 1 or len(first.runs) > 1 else [],
        'table': rows,
        'diagnoses': causes_first(row for row in timeline(variants) if row['kind'] == 'diagnosis'),
        'timeline': list(timeline(variants))[:MOST_ROWS],
        'comparisons': list(comparisons(variants)),
        'begun_by': next((str(entry.get('command', '')) for entry in first.runs[0].environment), ''),
        'notes': [*(note for variant in variants for run in variant.runs for note in list_notes(run)), *notes],
        'unfinished': not all(run.finished for variant in variants for run in variant.runs),
    }


def facts(variant: Variant, presets: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields pairs (name, value) of texts on a variant: experiment, main settings, pieces, time, machine and code.

    presets: of all variants; with several different ones, the fact `pieces` names the variant.
    """
    run, seeds = variant.runs[0], [str(run.config.get('seed')) for run in variant.runs]
    experiment, _ = find_experiment(run)
    names = [*dict.fromkeys(filter(None, presets))]
    yield from [('experiment', experiment)] * bool(experiment)
    yield from [('presets' if len(names) > 1 else 'preset', ', '.join(names))] * bool(names)
    yield 'seeds' if len(seeds) > 1 else 'seed', ', '.join(seeds)
    own = {key: text for key, text in run.pieces.items() if 'sha256' in text}  # of the user's
    for name, keys in (FACTS | {key.removeprefix('algorithm.'): (key,) for key in own}).items():
        values = []
        for key in keys:
            value = own.get(key, steering.value_of(run.config, key))
            values.append(os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value)
        if text := ' '.join(str(value) for value in values if value not in (None, '')):
            yield name, text
    chosen = {key: steering.value_of(run.config, f'algorithm.{key}') for key in MODULES}
    pieces = [
        f'{key} {" and ".join(map(str, value)) if isinstance(value, list) else value}'
        for key, value in chosen.items()
        if value and value not in NO_PIECE
    ]
    if pieces:
        yield f'pieces of {variant.name}' if len(names) > 1 else 'pieces', ', '.join(pieces)
    if time := count_time(run):
        cold = os.path.exists(os.path.join(run.folder, 'cold_start', 'timings.jsonl'))
        yield 'time of cold start and steps' if cold else 'time of all steps', time
    for entry in run.environment[:1]:
        code, devices, packages = (entry.get(key) for key in ('code', 'devices', 'packages'))
        if isinstance(devices, dict):
            cores = f', {entry["cores"]} cores' if entry.get('cores') else ''
            yield 'machine', f'{devices.get("count")} x {devices.get("kind")}{cores}'
        if isinstance(packages, dict):
            yield 'jax', f'{packages.get("jax")}, Python {entry.get("python")}'
        if isinstance(code, dict):
            yield 'grpo_jax', steering.code_name(code)
        yield 'steps begun', str(entry.get('begun', ''))[:16].replace('T', ' ')


def find_experiment(run: Run) -> tuple[str, str]:
    """Returns (experiment, preset), read from the command that began a run; '' for what the command does not name.

    For a command without a preset it is the default in the experiment's file as it is now. For a run of a sweep it is
    the name of the folder. A run that was begun from Python has neither.
    """
    command = next((str(entry.get('command', '')) for entry in run.environment), '')
    named = re.search(r"""--config[= ]([^\s'":]+)(?::([\w./-]+))?""", command)
    if not named:
        return '', ''
    experiment, preset = named[1], named[2] or ''
    if ' sweep ' in command:
        return experiment, os.path.basename(os.path.dirname(os.path.abspath(run.folder)))
    if not preset:
        with contextlib.suppress(BadInput, OSError, UnicodeDecodeError):
            with open(config_file.locate(experiment), encoding='utf8') as file:
                declared = re.search(r"^def get_config\(preset='(\w+)'", file.read(), re.MULTILINE)
            preset = declared[1] if declared else ''
    return experiment, preset


def count_time(run: Run) -> str:
    """Returns the time of all steps and the cold start in words, like '3 min 4 s'; '' without timings."""
    rows = itertools.chain(run.timings, read_lines(os.path.join(run.folder, 'cold_start', 'timings.jsonl'), []))
    times = (as_number(row.get(stage)) for row in rows for stage in STAGES)
    minutes, rest = divmod(round(sum(time for time in times if time > 0)), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f'{number} {unit}' for number, unit in ((hours, 'h'), (minutes, 'min'), (rest, 's')) if number]
    return ' '.join(parts[:2])


def list_notes(run: Run) -> list[str]:
    """Returns notes on files that could not be read and, after MEASURED steps, on what steps wait for."""
    with contextlib.suppress(KeyError, TypeError):  # a config of an earlier version lacks keys
        return run.notes + advice.describe_waits(run.timings, run.config) * (len(run.timings) >= MEASURED)
    return run.notes


def timeline(variants: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """Yields a dict for each event, run by run and in order of steps: step, kind, where, title, fields, remedy.

    where: variant and seed, '' with one run; title: a diagnosis's monitor, else ''; fields: [(name, text), ...].
    """
    several = sum(len(variant.runs) for variant in variants) > 1
    for variant in variants:
        for run in variant.runs:
            where = f'{variant.name}, seed {run.config.get("seed")}' if several else ''
            for row in run.events:
                fields = {
                    name: value if isinstance(value, str) else repr(value)
                    for name, value in row.items()
                    if name not in ('step', 'event') and value != ''
                }
                title = fields.pop('monitor', '') if row['event'] == 'diagnosis' else ''
                kind = row['event'].replace('_', ' ')
                yield {
                    'step': row['step'], 'kind': kind, 'where': where, 'title': title.replace('_', ' '),
                    'fields': list(fields.items()), 'remedy': fields.get('command') or fields.get('remedy', ''),
                }  # fmt: skip


def causes_first(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of diagnoses in order; a diagnosis that another of them explains comes after the others."""
    rows = list(rows)
    spoke = {row['title'] for row in rows}

    def explained(row):
        monitor = MONITORS.get(row['title'].replace(' ', '_'))
        return monitor is not None and any(cause.replace('_', ' ') in spoke for cause in monitor.because)

    return sorted(rows, key=explained)


def comparisons(variants: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """Yields {'name', 'base', 'lines'} for each variant after the first; lines: sentences on how the two differ."""
    base = variants[0]
    for variant in variants[1:SHOWN_VARIANTS]:
        try:
            lines = list(provenance.describe_differences(base.runs[0].folder, variant.runs[0].folder))
        except BadInput as error:
            lines = [str(error)]
        yield {'name': variant.name, 'base': base.name, 'lines': lines}


def make_data(variants: Sequence[Variant]) -> dict[str, Any]:
    """Returns the data for the page's scripts: variants' names and numbers of seeds, panels by section, marked steps.

    docs: the address of docs/metrics.md; '' where pyproject.toml names no repository.
    """
    marks = {(row['step'], escape(row['title'] or row['kind'])) for row in timeline(variants)}
    addresses = importlib.metadata.metadata('grpo_jax').get_all('Project-URL') or []
    repository = ''.join(url.partition(', ')[2] for url in addresses if url.startswith('Repository, '))
    return {
        'variants': [escape(variant.name) for variant in variants],
        'seeds': [len(variant.runs) for variant in variants],
        'sections': panels.make_sections(variants),
        'docs': f'{repository}/blob/main/docs/metrics.md' if repository else '',
        'marks': [{'step': step, 'text': text} for step, text in sorted(marks)][:200],
    }


def shown_runs(variants: Sequence[Variant]) -> list[tuple[str, Run]]:
    """Returns (variant's name, run) of runs whose rollouts are shown: the first seeds of SHOWN_VARIANTS variants."""
    return [(variant.name, variant.runs[0]) for variant in variants[:SHOWN_VARIANTS]]
