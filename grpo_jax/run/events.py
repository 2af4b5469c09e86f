"""What happened to a run beside its steps, in events.jsonl: a row an event, with its step and its name."""

from collections.abc import Iterable, Mapping
import json
import os
from typing import Any

from grpo_jax.hosts import processes
from grpo_jax.hosts.files import Lines, atomic_write

FILE = 'events.jsonl'
# from outside of the run: they stay when their step is taken again. All others happen again with their step
LASTING = ('amended', 'branched', 'damaged')


def append(workdir: str | os.PathLike, step: int, event: str, **fields: Any) -> None:
    """Adds a row; the first process writes, the others do nothing.

    step: the one before which it happened, or in it.

    CannotWrite when the disk refuses it.
    """
    if processes.is_first():
        with Lines(os.path.join(workdir, FILE)) as file:
            file.append(json.dumps({'step': step, 'event': event, **fields}))


def recorded(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows in the order in which they were written, without half a row at the end; [] for a run without."""
    return [json.loads(line) for line in _lines(workdir)]


def cut(workdir: str | os.PathLike, first_step: int) -> None:
    """Drops what steps from first_step on have left, which will be taken again; LASTING events stay."""
    path = os.path.join(workdir, FILE)
    if os.path.exists(path) and processes.is_first():
        rows = [(line, json.loads(line)) for line in _lines(workdir)]
        lasting = [line for line, row in rows if row['step'] < first_step or row['event'] in LASTING]
        if sum(map(len, lasting)) < os.path.getsize(path):
            with atomic_write(path) as file:
                file.writelines(lasting)


def rewrite(workdir: str | os.PathLike, rows: Iterable[Mapping[str, Any]]) -> None:
    """Puts rows in the place of those that are there; the first process writes, the others do nothing."""
    if processes.is_first():
        with atomic_write(os.path.join(workdir, FILE)) as file:
            file.writelines(json.dumps(row) + '\n' for row in rows)


def _lines(workdir):
    path = os.path.join(workdir, FILE)
    if not os.path.exists(path):
        return []
    with open(path, encoding='utf8') as lines:
        return [line for line in lines if line.endswith('\n')]
