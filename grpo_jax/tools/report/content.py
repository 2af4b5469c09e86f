"""What a report says: its header, its curves, its timeline and its comparison, as plain values."""

from collections.abc import Iterator, Sequence
import os
from typing import Any

from grpo_jax.errors import BadInput
from grpo_jax.run import steering
from grpo_jax.text import escape
from grpo_jax.tools import provenance
from grpo_jax.tools.report import panels, verdict
from grpo_jax.tools.report.read import Run, Variant

SHOWN_VARIANTS = 12  # that are compared in words, and whose rollouts are shown
MOST_ROWS = 500  # of the timeline
# facts of a run -> the keys of its config
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
    """What the template shows, all of it texts: title, verdict, facts, the table of variants, timeline, comparison."""
    first = variants[0]
    text, meaning = verdict.headline(first)
    headings, rows = verdict.table(variants)
    return {
        'title': first.name if len(variants) < 3 else f'{first.name} and {len(variants) - 1} others',
        'others': [variant.name for variant in variants[1:]],
        'verdict': text,
        'meaning': meaning,
        'facts': list(facts(first)),
        'headings': headings if len(variants) > 1 or len(first.runs) > 1 else [],
        'table': rows,
        'diagnoses': [row for row in timeline(variants) if row['kind'] == 'diagnosis'],
        'timeline': list(timeline(variants))[:MOST_ROWS],
        'comparisons': list(comparisons(variants)),
        'command': next((str(entry.get('command', '')) for entry in first.runs[0].environment), ''),
        'notes': [*(note for variant in variants for run in variant.runs for note in run.notes), *notes],
        'unfinished': not all(run.finished for variant in variants for run in variant.runs),
    }


def facts(variant: Variant) -> Iterator[tuple[str, str]]:
    """(name, value) of what a reader asks first of a variant."""
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
    """What has happened beside the steps, by step: {'step', 'kind', 'where', 'title', 'fields'}."""
    several = sum(len(variant.runs) for variant in variants) > 1
    for variant in variants:
        for run in variant.runs:
            where = f'{variant.name}, seed {run.config.get("seed")}' if several else ''
            for row in run.events:
                rest = {
                    name: value if isinstance(value, str) else repr(value)
                    for name, value in row.items()
                    if name not in ('step', 'event')
                }
                title = rest.pop('monitor', '') if row['event'] == 'diagnosis' else ''
                kind = row['event'].replace('_', ' ')
                yield {
                    'step': row['step'], 'kind': kind, 'where': where, 'title': title.replace('_', ' '),
                    'fields': list(rest.items()),
                }  # fmt: skip


def comparisons(variants: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """How each other variant differs from the first, in words: {'name', 'base', 'lines'}."""
    base = variants[0]
    for variant in variants[1:SHOWN_VARIANTS]:
        try:
            lines = list(provenance.in_words(base.runs[0].folder, variant.runs[0].folder))
        except BadInput as error:
            lines = [str(error)]
        yield {'name': variant.name, 'base': base.name, 'lines': lines}


def make_data(variants: Sequence[Variant]) -> dict[str, Any]:
    """What the scripts read besides rollouts: sections of panels, names of variants, and steps with a diagnosis."""
    marks = {(row['step'], escape(row['title'] or row['kind'])) for row in timeline(variants)}
    return {
        'variants': [escape(variant.name) for variant in variants],
        'seeds': [len(variant.runs) for variant in variants],
        'sections': panels.make_sections(variants),
        'marks': [{'step': step, 'text': text} for step, text in sorted(marks)][:200],
    }


def shown_runs(variants: Sequence[Variant]) -> list[tuple[str, Run]]:
    """(name, run) of the runs whose rollouts a report shows: of each variant the first seed's."""
    return [(variant.name, variant.runs[0]) for variant in variants[:SHOWN_VARIANTS]]
