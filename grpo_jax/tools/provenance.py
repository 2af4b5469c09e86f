"""Shows what a run was made from, how two runs differ, and whether a run's files are whole.

Exit status 0; 1 when --verify finds damage or a change.

Examples:
    python -m grpo_jax provenance --workdir=runs/gsm8k --verify
    python -m grpo_jax provenance runs/gsm8k runs/gsm8k_dapo
"""

from collections.abc import Iterator
import contextlib
import json
import os
import sys
from typing import Any

from absl import flags
import jax

from grpo_jax import data, user_files
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.run import checkpoint, cli, config_file, steering, writer
from grpo_jax.run.rows import EVENTS, recorded_events
from grpo_jax.text import escape

TEXTS = (
    'config.json',
    'environment.json',
    'programs.json',
    'data.json',
    steering.PIECES,
    steering.CONTENTS,
)  # JSON files of a run; only runs that read data files have data.json
ROWS = (*writer.FILES, EVENTS)


def describe_run(workdir: str) -> Iterator[str]:
    """Yields lines on a run's seed, code, packages, devices, data, pieces, programs, events and checkpoints."""
    config = json_file.read_object(_require_file(workdir, 'config.json'))
    yield f'run {workdir}: seed {config.get("seed")}, {len(_complete_lines(workdir, "metrics.jsonl"))} steps'
    for entry in _read_json(workdir, steering.ENVIRONMENT, []):
        code, devices = steering.code_name(entry.get('code', {})), entry.get('devices', {})
        packages = ', '.join(f'{name} {version}' for name, version in entry.get('packages', {}).items())
        yield f'begun {entry.get("begun")} by grpo_jax {code}: {entry.get("command")}'
        yield f'  on {devices.get("count")} {devices.get("kind")} of {devices.get("processes")} processes'
        yield f'  with Python {entry.get("python")}, {packages}'
    for origin in _read_json(workdir, 'data.json', []):
        yield 'data: ' + ', '.join(f'{name} {value}' for name, value in origin.items() if value)
    for key, text in steering.recorded_pieces(workdir).items():
        yield f'{key}: {text}'
    for name, value in _read_json(workdir, 'programs.json', {}).items():
        yield f'program {name}: {value}'
    for row in recorded_events(workdir):
        fields = ', '.join(f'{name} {value!r}' for name, value in row.items() if name not in ('step', 'event'))
        yield f'step {row["step"]}: {row["event"]}: {fields}'
    yield f'checkpoints: {", ".join(map(str, checkpoint.steps(workdir))) or "none"}'


def describe_differences(workdir: str, other: str) -> Iterator[str]:
    """Yields sentences on how two runs differ: in programs, data, pieces, settings, code, packages and devices."""
    programs = [as_object(_read_json(folder, 'programs.json', {})) for folder in (workdir, other)]
    yield _describe_programs(*programs)
    configs = [json_file.read_object(_require_file(folder, 'config.json')) for folder in (workdir, other)]
    changed = list(steering.differences(configs[0], configs[1]))
    origins = [_read_json(folder, 'data.json', []) for folder in (workdir, other)]
    data_changes = [c for c in changed if c.key.startswith('data.') and c.key != 'data.prompts_per_step']
    same_data = not data_changes and origins[0] == origins[1]
    yield 'the data are the same' if same_data else 'the data differ' + ' in where they are from' * (not data_changes)
    pieces, others = (steering.recorded_pieces(folder) for folder in (workdir, other))
    for key, old, new in steering.differences(pieces, others):
        yield f'piece {key}: {old!r} became {new!r}'
    yield f'settings that differ: {len(changed) or "none"}'
    yield from (f'{change.key}: {change.old!r} became {change.new!r}' for change in changed)
    entries = [_read_json(folder, steering.ENVIRONMENT, []) for folder in (workdir, other)]
    first, second = (as_object(entry[0]) if isinstance(entry, list) and entry else {} for entry in entries)
    for section in ('code', 'packages', 'devices'):
        for key, old, new in steering.differences(as_object(first.get(section)), as_object(second.get(section))):
            yield f'{section} {key}: {old!r} became {new!r}'


def _describe_programs(first, second):
    """A sentence that names the compiled programs that two runs share or not. first, second: {program: hash}."""
    if not first or not second:
        return 'nothing is known of the programs: at least one of the runs has compiled none yet'
    by_verdict: dict[bool, list[str]] = {False: [], True: []}  # whether a program is the same -> names
    for name in sorted(first.keys() | second.keys()):
        by_verdict[first.get(name) == second.get(name)].append(name)
    differ, same = (', '.join(by_verdict[verdict]) or 'none' for verdict in (False, True))
    return f'programs that differ: {differ}; that are the same: {same}'


def verify(workdir: str) -> Iterator[str]:
    """Yields a line for each fault in a run's JSON files, rows and dumps, and in its checkpoints' arrays."""
    _require_file(workdir, 'config.json')
    for name in TEXTS:
        path = os.path.join(workdir, name)
        if os.path.exists(path) or name in ('config.json', steering.ENVIRONMENT):
            try:
                json_file.read(path)
            except BadInput as error:
                yield str(error)
    for name in ROWS:
        yield from _check_rows(workdir, name)
    dumps = os.path.join(workdir, 'rollouts')
    for name in sorted(os.listdir(dumps)) if os.path.isdir(dumps) else []:
        yield from _check_rows(dumps, name)
    for step in checkpoint.steps(workdir):
        path = checkpoint.path_of(workdir, step)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        try:
            checkpoint.read_tree(path, checkpoint.abstract_tree(path, device))
        except BadInput as error:
            yield str(error)
            continue
        rows = len(_complete_lines(workdir, 'metrics.jsonl'))
        if _first_step(workdir) + rows < step:
            yield f'{path}: is of step {step}, and metrics.jsonl has {rows} rows'
    nested = os.path.join(workdir, 'cold_start')
    if os.path.isfile(os.path.join(nested, 'config.json')):
        yield from verify(nested)


def compare_contents(workdir: str) -> Iterator[str]:
    """Yields a line for each data split and user's file whose content has changed since the run read it.

    Files that are gone are passed over, and so are splits that come from Python or from a user's code.
    """
    recorded = as_object(_read_json(workdir, steering.CONTENTS, {}))
    splits, now = {}, {'splits': {}, 'functions': {}}
    for section in ('files', 'configs'):
        here = [path for path in as_object(recorded.get(section)) if os.path.isfile(path)]
        now[section] = {path: user_files.digest(path) for path in here}
    config: Any = config_file.read_recorded(workdir, trust=True)  # none of its code is run
    with contextlib.suppress(BadInput):  # where the data are gone, splits are not compared
        if not any(steering.name_files(config.data.to_dict())):
            options = data.locate(data.DataOptions.from_config(config.data), steering.recorded_origins(workdir))
            for split in as_object(recorded.get('splits')):
                named = data.source_of(options, split)
                try:
                    rows = data.examples(options.name, options.options, named)
                except data.MissingSplit:  # prompts of the train split were evaluated
                    rows = data.examples(options.name, options.options, options.train_split)
                splits[split] = data.examples_in(rows)
            now['splits'] = {split: data.contents_of(rows)._asdict() for split, rows in splits.items()}
    yield from map(str, steering.contents_changes(workdir, now if recorded else {}, splits))


def _check_rows(folder, name):
    """Yields a line for each damaged row of a JSONL file, and for the first row whose step is not the expected one."""
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return
    steps = []
    with open(path, 'rb') as lines:
        for number, line in enumerate(lines, 1):
            try:
                steps.append(json.loads(line.decode())['step'] if name in ROWS else json.loads(line.decode()))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                yield f'{path}, line {number}: {type(error).__name__}: {error}'
                steps.append(None)
            if not line.endswith(b'\n'):
                yield f'{path}, line {number}: has no end; the next start of the run drops it'
    begun = _first_step(folder)
    if name in ('metrics.jsonl', 'timings.jsonl') and None not in steps:
        odd = next((i for i, step in enumerate(steps) if step != begun + i), None)
        if odd is not None:
            yield f'{path}, line {odd + 1}: has step {steps[odd]} in place of {begun + odd}'


def _first_step(workdir):
    """The first step of a run: 0; for a branch, the step of the parent's checkpoint from which it began."""
    steps = [row.get('step') for row in recorded_events(workdir) if row.get('event') == 'branched']
    return steps[0] if steps and isinstance(steps[0], int) else 0


def _complete_lines(workdir, name):
    """The complete lines of a file, unparsed; [] without the file."""
    path = os.path.join(workdir, name)
    if not os.path.exists(path):
        return []
    with open(path, 'rb') as lines:
        return [line for line in lines if line.endswith(b'\n')]


def _read_json(workdir, name, default) -> Any:
    """The content of a JSON file in workdir; default without the file."""
    path = os.path.join(workdir, name)
    return json_file.read(path) if os.path.exists(path) else default


def as_object(value: Any) -> dict[str, Any]:
    """Returns the value if it is a dict, else {}. It is read from a file, which another program may have written."""
    return value if isinstance(value, dict) else {}


def _require_file(workdir, name):
    """The path of a run's file; raises BadInput when the folder lacks it."""
    path = os.path.join(workdir, name)
    if not os.path.isfile(path):
        raise BadInput('--workdir', workdir, f'holds no run (no {name}); name the folder of one')
    return path


def main() -> None:
    """Runs the command."""
    values: Any = flags.FLAGS
    # folders may also be given without --workdir and --other
    folders = [folder for folder in (values.workdir, values.other, *values(sys.argv)[1:]) if folder]
    if not 1 <= len(folders) <= 2:
        raise BadInput('folders', folders, 'name the folder of one run, or the folders of two to compare')
    if len(folders) == 2:
        for line in describe_differences(*folders):
            print(escape(line))
        return
    (workdir,) = folders
    for line in describe_run(workdir):
        print(line)
    if values.verify:
        problems = 0
        for word, faults in (('damaged', verify), ('changed', compare_contents)):
            for problem in faults(workdir):
                problems += 1
                print(f'{word}: {problem}', flush=True)
        print(f'{problems} problems' if problems else 'verified: every file, row and array is whole')
        sys.exit(1 if problems else 0)


if __name__ == '__main__':
    flags.DEFINE_string('workdir', '', 'Folder of the run; it may also stand without the name of the flag.')
    flags.DEFINE_string('other', '', 'Folder of another run, to compare with.')
    flags.DEFINE_bool('verify', False, 'Read every file and every array of every checkpoint, and name what is damaged.')
    cli.run(main)
