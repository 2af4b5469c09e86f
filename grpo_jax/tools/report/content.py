"""The contents of a report as plain values: header, curves, timeline and comparison."""

from collections.abc import Iterable, Iterator, Sequence
import os
from typing import Any

from grpo_jax.diagnose import MONITORS
from grpo_jax.errors import BadInput
from grpo_jax.run import steering
from grpo_jax.text import escape
from grpo_jax.tools import provenance
from grpo_jax.tools.report import panels, verdict
from grpo_jax.tools.report.read import Run, Variant

SHOWN_VARIANTS = 12  # variants with a comparison in words, and with rollouts
MOST_ROWS = 500  # of the timeline
# fact of a run -> keys of its config
FACTS = {
    'model': ('model.path',),
    'data': ('data.name', 'data.path'),
    'advantage': ('algorithm.advantage',),
    'surrogate': ('algorithm.surrogate',),
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
        'facts': list(facts(first)),
        'headings': headings if len(variants) > 1 or len(first.runs) > 1 else [],
        'table': rows,
        'diagnoses': causes_first(row for row in timeline(variants) if row['kind'] == 'diagnosis'),
        'timeline': list(timeline(variants))[:MOST_ROWS],
        'comparisons': list(comparisons(variants)),
        'command': next((str(entry.get('command', '')) for entry in first.runs[0].environment), ''),
        'notes': [*(note for variant in variants for run in variant.runs for note in run.notes), *notes],
        'unfinished': not all(run.finished for variant in variants for run in variant.runs),
    }


def facts(variant: Variant) -> Iterator[tuple[str, str]]:
    """Yields (name, value) of a variant's main settings: seeds, model, data, algorithm, devices, code."""
    run, seeds = variant.runs[0], [str(run.config.get('seed')) for run in variant.runs]
    yield 'seeds' if len(seeds) > 1 else 'seed', ', '.join(seeds)
    for name, keys in FACTS.items():
        values = []
        for key in keys:
            value = steering.value_of(run.config, key)
            values.append(os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value)
        if text := ' '.join(str(value) for value in values if value not in (None, '')):
            yield name, text
    for entry in run.environment[:1]:
        code, devices = entry.get('code'), entry.get('devices')
        if isinstance(devices, dict):
            yield 'devices', f'{devices.get("count")} {devices.get("kind")}'
        if isinstance(code, dict):
            yield 'grpo_jax', steering.code_name(code)
        yield 'begun', str(entry.get('begun', ''))[:16].replace('T', ' ')


def timeline(variants: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """Yields {'step', 'kind', 'where', 'title', 'fields', 'remedy'} of each event, run by run and in order of steps."""
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
    """Returns the rows of diagnoses, those last that another one explains."""
    rows = list(rows)
    spoke = {row['title'] for row in rows}

    def explained(row):
        monitor = MONITORS.get(row['title'].replace(' ', '_'))
        return monitor is not None and any(cause.replace('_', ' ') in spoke for cause in monitor.because)

    return sorted(rows, key=explained)


def comparisons(variants: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """Yields {'name', 'base', 'lines'} for each further variant; lines: how it differs from the first, in words."""
    base = variants[0]
    for variant in variants[1:SHOWN_VARIANTS]:
        try:
            lines = list(provenance.describe_differences(base.runs[0].folder, variant.runs[0].folder))
        except BadInput as error:
            lines = [str(error)]
        yield {'name': variant.name, 'base': base.name, 'lines': lines}


def make_data(variants: Sequence[Variant]) -> dict[str, Any]:
    """Returns the data of the scripts: each variant's name and number of seeds, panels by section, marked steps."""
    marks = {(row['step'], escape(row['title'] or row['kind'])) for row in timeline(variants)}
    return {
        'variants': [escape(variant.name) for variant in variants],
        'seeds': [len(variant.runs) for variant in variants],
        'sections': panels.make_sections(variants),
        'marks': [{'step': step, 'text': text} for step, text in sorted(marks)][:200],
    }


def shown_runs(variants: Sequence[Variant]) -> list[tuple[str, Run]]:
    """Returns (variant's name, run) of the runs with rollouts in the report: the first seed of each variant."""
    return [(variant.name, variant.runs[0]) for variant in variants[:SHOWN_VARIANTS]]
