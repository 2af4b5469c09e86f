"""Makes the curves of a report: which metrics share a panel, and each metric's numbers over a variant's seeds."""

from collections.abc import Iterable, Sequence
import fnmatch
import functools
import glob
import os
import re
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.text import escape
from grpo_jax.tools.report import verdict
from grpo_jax.tools.report.read import Variant, as_number

POINTS = 1000  # of a curve; a longer one is drawn as mean, min and max over blocks of neighbouring steps
DIGITS = 6  # of a curve's numbers
METRICS = os.path.join(os.path.dirname(__file__), 'assets', 'metrics.md')  # docs/metrics.md


class Panel(NamedTuple):
    """Metrics that share a plot; * in a name matches any text."""

    title: str
    metrics: tuple[str, ...]
    note: str = ''
    file: str = 'metrics'  # the field of Run with these metrics
    stacked: bool = False
    logarithmic: bool = False


BELOW = tuple(f'groups_below_{name}' for name in ('quarter', 'half', 'three_quarters', 'all'))
OUTCOMES = ('groups_all_wrong', *BELOW, 'groups_mixed', 'groups_all_right')
# heading -> panels; the first panel that matches a metric draws it
SECTIONS: dict[str, tuple[Panel, ...]] = {
    'Held-out prompts': (
        Panel('Accuracy of greedy completions', ('greedy', 'strict/greedy'), file='evaluations'),
        Panel(
            'Accuracy of samples',
            ('pass@*', 'maj@*', 'strict/pass@*', 'strict/maj@*'),
            'pass@k: any of k samples is right. maj@n: the most frequent answer is right.',
            file='evaluations',
        ),
        Panel('Held-out reward', ('reward', 'greedy/reward'), file='evaluations'),
        Panel('Held-out length', ('length', 'greedy/length'), 'Tokens of a completion.', file='evaluations'),
        Panel('Faults of completions', ('truncated', 'failed', 'unparsed', 'greedy/*'), 'Shares.', file='evaluations'),
        Panel('Other figures', ('*',), file='evaluations'),
    ),
    'Reward': (
        Panel('Training reward', ('reward',), 'Mean over the completions of a step.'),
        Panel('Parts of the reward', ('reward/*',)),
        Panel('Spread of rewards', ('reward_std', 'advantage_abs', 'advantage_variance')),
        Panel(
            'Rewards that raised exceptions, or were refused',
            ('reward_retried', 'reward_missing', 'reward_refused'),
            'Shares of completions.',
        ),
    ),
    'Groups': (
        Panel('Groups by pass rate', OUTCOMES, 'Groups that are all right or all wrong teach nothing.', stacked=True),
        Panel('Advantage by pass rate', ('advantage_below_*', 'advantage_all_wrong'), 'Shares of its sum.'),
        Panel('Gradient by pass rate', ('gradient_below_*',), 'Shares of its sum.'),
        Panel('Dead groups', ('dead_groups', 'retired', 'revisited_pass_rate')),
        Panel('Collection', ('draws', 'groups_of_earlier_steps', 'wasted_tokens', 'conflicting_tokens', 'staleness')),
    ),
    'Completions': (
        Panel('Length', ('length_right', 'length_wrong', 'length'), 'Tokens of a completion.'),
        Panel('Longest completions', ('length_p95', 'length_longest')),
        Panel('Length and reward', ('length_reward_correlation',), 'Correlation within groups.'),
        Panel(
            'Faults', ('truncated', 'empty', 'repetitive', 'unparsed', 'unscorable', 'reward_died', 'reward_expired')
        ),
        Panel('Reflection', ('reflection',), 'Phrases a completion.'),
        Panel('Self-correction', ('self_correction', 'self_correction_right'), 'Its share, and the right ones in it.'),
        Panel('Distinct completions', ('distinct_completions',), 'Share of a group.'),
        Panel('Scripts', ('script/*', 'language_mixed'), 'Shares.'),
    ),
    'Policy': (
        Panel('Entropy', ('entropy_right', 'entropy_wrong', 'entropy'), 'Nats a token.'),
        Panel('Log-probability of tokens', ('logprob_right', 'logprob_wrong', 'logprob'), 'Nats a token.'),
        Panel('KL divergence', ('kl_ref', 'kl_old'), 'Nats a token, from the reference and from the old policy.'),
        Panel('KL divergence of completions', ('kl_ref_sequence', 'kl_old_sequence', 'kl_ref_sequence_max'), 'Nats.'),
        Panel('Ratio', ('ratio_mean', 'ratio_p01', 'ratio_p99', 'ratio_max'), 'Of the policy to the old policy.'),
        Panel('Clipped tokens', ('clip_low_share', 'clip_high_share', 'ratio_clamped_share'), 'Shares.'),
        Panel(
            'Right completions of fixed prompts',
            ('probe_logprob_change', 'probe_prefix_change', 'probe_rest_change', 'probe_logprob'),
            'Change of their log-probability since the start, nats a token; below 0 they are displaced.',
        ),
        Panel('Pairs', ('pair_margin', 'pair_accuracy'), 'Of the better completion beside the worse one.'),
        Panel('Change by an update', ('logprob_change_better', 'logprob_change_worse')),
        Panel('Norm of the gradient', ('grad_norm',)),
        Panel('Norm of the gradient by part', ('gradient_norm/*',)),
        Panel('Learning rate', ('learning_rate',)),
        Panel('Loss', ('loss',), 'Near 0 by construction where advantages are centred; it is no measure of progress.'),
    ),
    'Sampler and learner': (
        Panel(
            'Disagreement on log-probabilities',
            ('sampler_gap_mean', 'sampler_gap_p99', 'sampler_gap_max'),
            'Of the same tokens, by sampler and learner.',
            logarithmic=True,
        ),
        Panel('Effective sample size', ('sampler_ess', 'stale_ess', 'correction_mean'), 'Share of the rows.'),
        Panel('Correction by age', ('correction_age_*_mean',), 'Mean weight of tokens by their age in steps.'),
        Panel('Weights before the bound', ('correction_age_*_max',), 'The largest by age.', logarithmic=True),
        Panel('At the bound', ('correction_age_*_bound', 'correction_bound'), 'Shares of the tokens, by age.'),
    ),
    'Speed': (
        Panel('Seconds by stage', ('sample', 'reward', 'update', 'evaluate'), file='timings', stacked=True),
        Panel('Tokens a second', ('sampler/tokens_per_second',), 'Of the sampler.', file='timings'),
        Panel('Share of what the chip can do', ('learner/mfu', 'sampler/roofline'), file='timings'),
        Panel('What services were asked', ('judge/*', 'http/*'), 'A step.', file='timings'),
        Panel('Memory of the host', ('host_mib',), 'MiB.', file='timings'),
        Panel('Other times', ('*',), file='timings'),
    ),
    'Cold start': (Panel('Loss of the cold start', ('loss',), file='cold_start'),),
}
MORE = 'More'


def make_sections(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Returns {'heading', 'panels'}, for JSON, of each section for which the variants have numbers.

    Metrics that no panel names get a panel each in the section MORE. With several variants, each panel has one metric.
    """
    files = {panel.file for panels in SECTIONS.values() for panel in panels}
    undrawn = {}  # file -> names of the metrics that no panel has drawn yet
    for file in files:
        rows = [row for variant in variants for run in variant.runs for row in getattr(run, file)]
        undrawn[file] = sorted({name for row in rows for name in row if not np.isnan(as_number(row[name]))} - {'step'})
    sections = []
    for heading, panels in SECTIONS.items():
        drawn = [content for panel in panels for content in _make_contents(panel, variants, undrawn[panel.file])]
        sections += [{'heading': heading, 'panels': drawn}] if drawn else []
    more = [
        content
        for name in undrawn['metrics']
        for content in _make_contents(Panel(name, (glob.escape(name),)), variants, [name])
    ]
    sections += [{'heading': MORE, 'panels': more}] if more else []
    for index, panel in enumerate(panel for section in sections for panel in section['panels']):
        panel['id'] = index
    return sections


def _make_contents(panel, variants, names: list[str]) -> Iterable[dict[str, Any]]:
    """Yields contents of a panel for JSON: one for all metrics or, with several variants, one for each metric.

    names: of metrics that are not drawn yet; those of the panel are removed from the list.
    """
    chosen = []
    for pattern in panel.metrics:
        matching = fnmatch.filter(names, pattern)
        # pass@8 comes before pass@16
        chosen += sorted(matching, key=lambda name: (len(name), name) if '@' in name else (0, name))
    chosen = list(dict.fromkeys(chosen))
    if 'groups_mixed' in chosen and {*BELOW} & {*chosen}:
        chosen.remove('groups_mixed')  # it is the sum of BELOW
    names[:] = [name for name in names if name not in chosen]
    alone = len(variants) == 1
    for metrics in [chosen] if alone and chosen else [[name] for name in chosen]:
        lines = [
            line | {'name': escape(name), 'variant': index, 'meaning': find_meaning(panel.file, name)}
            for name in metrics
            for index, variant in enumerate(variants)
            if (line := make_line(variant, panel.file, name))
        ]
        title = panel.title if len(chosen) == len(metrics) else f'{panel.title}: {metrics[0]}'
        content = {'title': escape(title), 'note': panel.note if metrics[0] == chosen[0] else '', 'lines': lines}
        stacked = panel.stacked and alone and len(lines) > 1
        yield content | {'stacked': stacked, 'logarithmic': panel.logarithmic, 'points': panel.file == 'evaluations'}


def find_meaning(file: str, name: str) -> str:
    """Returns what docs/metrics.md says of a metric: formula, unit and usual range; '' for a name that it lacks.

    file: the field of Run with the metric.
    """
    for pattern, meaning in _read_meanings()[file]:
        if fnmatch.fnmatchcase(name, pattern):
            return meaning
    return ''


@functools.cache
def _read_meanings():
    """{field of Run: [(pattern for names of metrics, meaning)]}, read from docs/metrics.md."""
    with open(METRICS, encoding='utf8') as page:
        _, *sections = re.split(r'^## (\S+)\n', page.read(), flags=re.MULTILINE)
    known = {panel.file: [] for panels in SECTIONS.values() for panel in panels}
    for heading, text in zip(sections[::2], sections[1::2], strict=True):
        field = 'cold_start' if '/' in heading else heading.removesuffix('.jsonl')
        for row in re.findall(r'^\| (`.*) \|$', text, re.MULTILINE):
            plain = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', row)  # a link's words alone
            names, *cells = (cell.strip() for cell in plain.split(' |'))
            formula, unit, usual = (cell.replace('`', '') for cell in cells[:3])
            meaning = (
                f'{formula[:1].upper()}{formula[1:]}.'
                + f' Unit: {unit}.' * bool(unit)
                + f' Usual: {usual}.' * bool(usual)
            )
            known[field] += [(name, meaning) for name in re.findall('`([^`]+)`', names)]
    return known


def make_line(variant: Variant, file: str, name: str) -> dict[str, Any] | None:
    """Returns {'steps', 'values', 'low', 'high'} of a metric over a variant's seeds; None when no run has a number.

    values are means over seeds, low and high their min and max. In the evaluations of a single run, low and high are
    the interval of a share over prompts. They are None when they equal the values everywhere. A curve of more than
    POINTS steps has a point for each block of steps. file: the field of Run with the metric.
    """
    tables = []  # {step: value} of each run
    for run in variant.runs:
        table = {row['step']: as_number(row.get(name)) for row in getattr(run, file)}
        tables.append({step: value for step, value in table.items() if not np.isnan(value)})
    steps = np.array(sorted({step for table in tables for step in table}), float)
    if not len(steps):
        return None
    values = np.array([[table.get(step, np.nan) for step in steps] for table in tables])
    if file == 'evaluations' and len(variant.runs) == 1:
        prompts = verdict.count_prompts(variant.runs[0])
        low, high = zip(*(verdict.interval(name, value, prompts) for value in values[0]), strict=True)
        low, high = np.array(low), np.array(high)
    else:
        low, high = np.nanmin(values, 0), np.nanmax(values, 0)
    curves = {'steps': steps, 'values': np.nanmean(values, 0), 'low': low, 'high': high}
    if len(steps) > POINTS:
        reductions = {'low': np.min, 'high': np.max}
        for key, curve in curves.items():
            reduce = reductions.get(key, np.mean)
            curves[key] = np.array([reduce(block) for block in np.array_split(curve, POINTS)])
    wide = bool(np.any(curves['high'] > curves['low']))
    line: dict[str, Any] = {'low': None, 'high': None}
    for key, curve in curves.items():
        if wide or key in ('steps', 'values'):
            line[key] = [float(f'{value:.{DIGITS}g}') if np.isfinite(value) else None for value in curve]
    return line
