"""Reads the folders of runs for a report; damaged rows are left out, with a note."""

from collections.abc import Mapping, Sequence
import json
import math
import os
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.run import steering
from grpo_jax.run.rows import EVENTS

Rows = list[dict[str, Any]]
# keys of a config in which runs of one variant may differ: the seed, and sections without effect on learning
WITHOUT_EFFECT = ('seed', 'checkpoint', 'diagnose', 'log', 'mesh')


class Run(NamedTuple):
    """The files of one run."""

    folder: str
    config: dict[str, Any]
    metrics: Rows
    timings: Rows
    evaluations: Rows
    events: Rows
    cold_start: Rows  # metrics of the supervised run before the first step
    environment: list[dict[str, Any]]
    notes: list[str]  # on rows and files that could not be read
    pieces: Mapping[str, str] = MappingProxyType({})  # of the algorithm in words, by config key
    programs: Mapping[str, Any] = MappingProxyType({})  # hashes by name

    @property
    def finished(self) -> bool:
        """Whether the last step is done and evaluated; in supervised training, whether the last update is done."""
        done, section = len(self.metrics), self.config.get('supervised')
        if self.evaluations:
            return self.config.get('steps') == done == self.evaluations[-1]['step']
        return isinstance(section, dict) and section.get('updates') == done > 0


class Variant(NamedTuple):
    """Runs of the same settings, pieces and programs that differ by their seeds, under one name."""

    name: str
    runs: list[Run]


def read_variants(folders: Sequence[str]) -> list[Variant]:
    """Returns the Variants of all runs in the folders, in the order of their first runs.

    folders: of runs or sweeps; a repeated folder counts once. Raises BadInput for a folder without a run.
    """
    paths = [path for folder in folders for path in find_runs(folder)]
    runs = [read_run(path) for path in dict.fromkeys(map(os.path.normpath, paths))]
    curves: dict[tuple, list[Run]] = {}
    same_seed: dict[tuple, list[Run]] = {}  # runs of a curve that have one seed, of which the first is in the curve
    for run, key in zip(runs, _variant_keys(runs), strict=True):
        repeats = same_seed.setdefault((key, str(run.config.get('seed'))), [])
        if repeats:
            pair = f'{run.folder} and {repeats[0].folder}'
            run.notes.append(f'{pair} have one seed, settings, pieces and programs, and are not one curve')
        curves.setdefault((key, len(repeats)), []).append(run)
        repeats.append(run)
    names = _short_names([[run.folder for run in curve] for curve in curves.values()])
    return [Variant(name, curve) for name, curve in zip(names, curves.values(), strict=True)]


def find_runs(folder: str) -> list[str]:
    """Returns [folder] for a run, or the folders of a sweep's runs in order; raises BadInput where there is no run."""
    if os.path.isfile(os.path.join(folder, 'config.json')):
        return [folder]
    names = [
        os.path.join(folder, preset, seed)
        for preset in _folder_names(folder)
        for seed in sorted(_folder_names(os.path.join(folder, preset)), key=lambda name: (len(name), name))
        if preset != 'cold_start'
    ]
    paths = [path for path in names if os.path.isfile(os.path.join(path, 'config.json'))]
    if not paths:
        raise BadInput(
            '--workdir or --against', folder, 'holds no run (no config.json), and no sweep; name the folder of one'
        )
    return paths


def read_run(folder: str) -> Run:
    """Reads the Run in a folder; raises BadInput for a damaged config.json. Other damage becomes notes."""
    notes: list[str] = []
    programs = os.path.join(folder, 'programs.json')
    config = json_file.read_object(os.path.join(folder, 'config.json'))
    return Run(
        folder=folder,
        config=config,
        metrics=_read_rows(folder, 'metrics.jsonl', notes),
        timings=_read_rows(folder, 'timings.jsonl', notes),
        evaluations=_read_rows(folder, 'evaluations.jsonl', notes),
        events=[row for row in _read_rows(folder, EVENTS, notes) if isinstance(row.get('event'), str)],
        cold_start=_read_rows(os.path.join(folder, 'cold_start'), 'metrics.jsonl', notes),
        environment=list(_read_or_note(lambda: steering.recorded_environments(folder), notes)),
        notes=notes,
        pieces=_read_or_note(lambda: steering.recorded_pieces(folder), notes),
        programs=_read_or_note(lambda: json_file.read_object(programs) if os.path.exists(programs) else {}, notes),
    )


def read_lines(path: str, notes: list[str]) -> Rows:
    """Returns the JSON objects in a file's lines; adds to notes on each other line, but for an unfinished last one."""
    rows = []
    if not os.path.isfile(path):
        return rows
    with open(path, 'rb') as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            elif line.endswith(b'\n'):
                notes.append(f'{path}, line {number}, is no row and is left out')
    return rows


def as_number(value: Any) -> float:
    """Returns a row's value as a float; NaN when it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        value = float(value)
    except OverflowError:  # an integer too large for a float
        return math.nan
    return value if math.isfinite(value) else math.nan


def _variant_keys(runs):
    """What must be equal in runs of one Variant, a text for each run: settings but the seed, pieces and programs.

    Programs differ between machines and meshes too, which is no sign of another algorithm. So they part runs only where
    one machine and mesh has several of them; then each is a Variant of its own, on all machines.
    """
    keys, programs = [], [json.dumps(dict(run.programs), sort_keys=True) for run in runs]
    known: dict[str, dict[str, set[str]]] = {}  # programs, by settings and pieces, then by machine and mesh
    for run, text in zip(runs, programs, strict=True):
        settings = {name: value for name, value in run.config.items() if name not in WITHOUT_EFFECT}
        keys.append(json.dumps([settings, dict(run.pieces)], sort_keys=True))
        others = {name: run.config.get(name) for name in WITHOUT_EFFECT if name != 'seed'}
        machine = [{part: entry.get(part) for part in steering.MACHINE} for entry in run.environment[:1]]
        if run.programs:
            place = json.dumps([others, machine], sort_keys=True)
            known.setdefault(keys[-1], {}).setdefault(place, set()).add(text)
    parted = {key for key, places in known.items() if any(len(several) > 1 for several in places.values())}
    return [key + text if key in parted else key for key, text in zip(keys, programs, strict=True)]


def _read_or_note(read, notes):
    """The result of read(); {} where it raises BadInput, whose text is then added to notes."""
    try:
        return read()
    except BadInput as error:
        notes.append(str(error))
        return {}


def _read_rows(folder, name, notes):
    """The rows of a file, sorted by step: of each step the last row, or all events. Rows without a step are noted."""
    rows, path = [], os.path.join(folder, name)
    for row in read_lines(path, notes):
        if isinstance(row.get('step'), int) and not isinstance(row['step'], bool) and 0 <= row['step'] < 2**53:
            rows.append(row)
        else:
            notes.append(f'{path} has a row without a step, which is left out')
    rows.sort(key=lambda row: row['step'])
    if name == EVENTS:
        return rows
    return list({row['step']: row for row in rows}.values())


def _folder_names(folder):
    """The names of the folders in a folder, sorted."""
    if not os.path.isdir(folder):
        return []
    return sorted(name for name in os.listdir(folder) if os.path.isdir(os.path.join(folder, name)))


def _short_names(groups):
    """A short name for each group of folders: the last parts of its path, as many as make all names different."""
    paths = [os.path.normpath(os.path.abspath(os.path.commonpath(map(os.path.abspath, group)))) for group in groups]
    paths = [
        os.path.abspath(group[0]) if paths.count(path) > 1 else path for group, path in zip(groups, paths, strict=True)
    ]
    numbered = any(os.path.basename(path).isdigit() for path in paths)  # the seeds of a sweep
    for depth in range(1 + numbered, 64):
        names = ['/'.join(path.split(os.sep)[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return paths
