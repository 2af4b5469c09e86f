"""The cells of a step's line on the console, the most important first: what has no room is left out from the end."""

from collections.abc import Mapping, Sequence
from typing import Any


def step_cells(row: Mapping[str, Any], timings: Mapping[str, float], shown: Sequence[str] = ()) -> list[str]:
    """Texts of a row of metrics.jsonl: of the metrics that `shown` names, or of what matters in a step of GRPO."""
    if shown:
        return [f'{name} {row[name]:.3f}' for name in shown if row.get(name) is not None]
    known = {name: value for name, value in row.items() if value is not None}
    cells = ['update skipped'] if known.get('finite', 1) < 1 else []
    cells += [f'reward {known["reward"]:.3f}'] if 'reward' in known else []
    cells += _dead(known) + _parts(known)
    cells += [f'length {known["length"]:.1f}'] if 'length' in known else []
    cells += [f'truncated {known["truncated"]:.0%}'] if known.get('truncated', 0) >= 0.005 else []
    for name, heading in (('entropy', 'entropy'), ('kl_ref', 'kl')):
        cells += [f'{heading} {known[name]:.3f}'] if name in known else []
    if known.get('tokens') and timings.get('sample'):
        cells.append(f'{known["tokens"] / timings["sample"]:.0f} tokens/s')
    return cells


def _dead(row):
    """The share of groups without a difference, by what they are where a verifier tells."""
    if not row.get('dead_groups'):
        return []
    kinds = {word: row[f'groups_all_{word}'] for word in ('right', 'wrong') if row.get(f'groups_all_{word}')}
    text = ' '.join(f'{share:.0%} {word}' for word, share in kinds.items())
    return [f'dead {text or format(row["dead_groups"], ".0%")}']


def _parts(row):
    """The parts of a reward, unless there is one alone, which is the reward."""
    parts = {name.removeprefix('reward/'): value for name, value in row.items() if name.startswith('reward/')}
    if list(parts.values()) == [row.get('reward')]:
        return []
    return [f'{name} {value:.3f}' for name, value in parts.items()]
