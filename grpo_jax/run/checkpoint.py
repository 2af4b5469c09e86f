"""Orbax checkpoints: atomic, asynchronous, with a keep policy; they hold all that a run needs to go on, a TrainState.

A checkpoint has a digest of each array beside it, and what is read back is held against them. A run goes on from the
newest checkpoint that is what was saved; those that are not are set aside in workdir/damaged.
"""

from collections.abc import Callable
import contextlib
import copy
import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import sys
import traceback
import types
from typing import Any
import warnings
import zipfile

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.hosts.files import atomic_write
from grpo_jax.models import lora
from grpo_jax.run import digest
from grpo_jax.run.rows import append_event
from grpo_jax.text import during
from grpo_jax.types import Experience, Rollout, TrainState

logger = logging.getLogger('grpo_jax')
FOLDER, DAMAGED, COLD_START, BAD = 'checkpoints', 'damaged', 'cold_start', 'bad'  # in the workdir
METADATA, ITEM = '_CHECKPOINT_METADATA', 'default'  # in a checkpoint: Orbax's names
# where values that are not finite are an error; elsewhere they may mean that there is none
FINITE = ('params/', 'opt_state/', 'ref_params/', 'aux/critic/', 'aux/coefficients/')
# parts of a checkpoint that may begin anew, in words
PARTS = {
    'opt_state': "the optimizer's state",
    'ref_params': 'the reference policy',
    'aux/position': 'the position in the data',
    'aux/tries': 'the number of completions by prompt',
    'aux/hits': 'the number of right completions by prompt',
    'aux/kept': 'the groups of earlier steps',
    'aux/history': 'the moving averages of rewards',
    'aux/critic': 'the critic',
    'aux/probe': 'the probe',
}
OBSERVED = {'aux/probe', 'ref_params'}  # what config.log has kept, though nothing learns from it
# keys of numbers that adapt during a run -> where the state has them
ADAPTED = {f'algorithm.{name}': f'aux/coefficients/{name}' for name in ('kl_coef', 'entropy_coef')}
OF_PROBE = {'rollout.temperature', 'model.dtype'}  # keys that change the logprobs of the probe


class Damaged(BadInput):
    """A checkpoint that is not what was saved."""

    def __init__(self, path: str, problem: str, remedy: str = 'bring it back from a copy, or delete it'):
        super().__init__(path, problem, f'the checkpoint is not what was saved; {remedy}')


def manager(workdir, *, keep):
    """CheckpointManager over workdir/checkpoints, keeping the newest `keep` steps; close() waits for writes.

    All processes open it together, and its other methods too. Folders there that cannot be checkpoints are set aside;
    Damaged when there are no others.
    """
    spare_memory()
    if processes.is_first():
        _set_aside_unreadable(workdir)
    processes.exchange(f'the checkpoints of {workdir}', '')  # what comes first in there waits no longer than 30 s
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(
        os.path.abspath(os.path.join(workdir, FOLDER)), options=options, item_handlers=ocp.PyTreeCheckpointHandler()
    )


def steps(workdir: str) -> list[int]:
    """The steps of the checkpoints in a workdir, the newest first; whether they are sound is not looked at."""
    folder = os.path.join(workdir, FOLDER)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((int(name) for name in names if re.fullmatch('0|[1-9][0-9]*', name)), reverse=True)


def path_of(workdir: str, step: int) -> str:
    """The folder of the checkpoint of a step."""
    return os.path.join(os.path.abspath(workdir), FOLDER, str(step))


def save(checkpoints, state):
    """Starts writing a TrainState as the checkpoint of its step; returns before it is on disk.

    Of what adapters leave frozen there is a digest alone in it.

    FloatingPointError, and nothing written, for parameters or moments that are not finite.
    """
    trained, frozen = lora.split(state.params)
    state = state.replace(params=trained)
    digests = digest.digests(state)
    bad = [name for name, one in digests.items() if name.startswith(FINITE) and not one.finite]
    if bad:
        raise FloatingPointError(
            f'{bad[0]} is not finite after step {int(state.step)}: no checkpoint of it is written; the same command '
            'goes on from the one before'
        )
    metadata: dict[str, Any] = {'digests': {name: [one.kind, one.sums] for name, one in digests.items()}}
    if frozen is not None:
        metadata['frozen'] = digest.combined(frozen)
    checkpoints.save(int(state.step), args=ocp.args.PyTreeSave(state), custom_metadata=metadata)


def read_params(workdir: str, abstract: Any) -> tuple[Any, int]:
    """(parameters, step) of a workdir's newest sound checkpoint, laid out as the abstract ones; BadInput without one.

    Nothing in the workdir changes.
    """
    damaged = None
    for step in steps(workdir):
        try:
            return read_tree(path_of(workdir, step), {'params': abstract}, partial=True)['params'], step
        except Damaged as error:
            damaged = damaged or error
            logger.warning('%s', error)
    raise damaged or BadInput('checkpoint', os.path.join(workdir, FOLDER), 'holds no finished checkpoint; train first')


def read_tree(path: str, abstract: Any, *, partial: bool = False) -> Any:
    """The tree of a checkpoint's folder, laid out as the abstract one; partial: of which it is a part.

    Damaged when it is not what was saved; BadInput when it is of other arrays than the abstract tree's.
    """
    tree, problem = None, ''
    try:
        digests = recorded_digests(path)
        problem = _check_kinds(path, abstract, digests, partial)
        if not problem:
            arguments = ocp.args.PyTreeRestore(
                abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=partial
            )
            with during(f'reading the checkpoint of step {os.path.basename(path)}'):
                tree = ocp.PyTreeCheckpointHandler().restore(epath.Path(path) / ITEM, args=arguments)
            for name, one in digest.digests(tree).items():
                if one.sums != digests[name][1]:
                    problem = f'{name} has digest {one.sums} and was saved with {digests[name][1]}'
                    break
    except BadInput:
        raise
    except Exception as error:  # tensorstore and Orbax raise whatever bytes that make no sense lead to
        _ignore_late_callbacks()
        problem = _described(error)
    problems = filter(None, processes.exchange(f'reading {path}', problem))
    for problem in problems:
        raise Damaged(path, problem)
    return tree


Read = Callable[[str, Any], Any]  # (a checkpoint's folder, the abstract tree) -> the tree


def restore(checkpoints: Any, abstract: TrainState, read: Read = read_tree) -> TrainState | None:
    """The TrainState of the newest sound checkpoint, laid out as the abstract state's shardings; None without any.

    Newer ones are set aside, with a warning. BadInput when the checkpoint's arrays are not those of the abstract state
    (another model), and when no checkpoint is sound. read(folder, abstract) reads one, as read_tree does.
    """
    workdir, damaged = os.path.dirname(str(checkpoints.directory)), []
    for step in steps(workdir):
        try:
            state = read(path_of(workdir, step), abstract)
        except Damaged as error:
            damaged.append((step, error))
            continue
        for worse, error in damaged:
            _set_aside(workdir, worse, str(error.args[1]))
        if damaged:
            logger.warning('the run goes on from step %d', step)
        processes.exchange(f'the damaged checkpoints of {workdir}', '')
        checkpoints.reload()
        return state
    if damaged:
        raise damaged[0][1]
    return None


def abstract_tree(path: str, sharding: Any) -> Any:
    """The abstract tree of the arrays that a checkpoint's folder says it has; Damaged where it says nothing."""
    try:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _described_tree(path))
    except Exception as error:  # Orbax raises whatever bytes that make no sense lead to
        raise Damaged(path, _described(error)) from None


def _described_tree(path):
    """What Orbax says of the arrays in a checkpoint's folder; an error of any kind for what makes no sense."""
    return ocp.PyTreeCheckpointHandler().metadata(epath.Path(path) / ITEM).tree


def _ignore_late_callbacks():
    """From now on, nothing is said when an array comes, or is given up, after the loop that asked for it was closed.

    This is so where another array could not be read, some time after the error.
    """
    before = sys.unraisablehook

    def show(late):
        files = [frame.filename for frame in traceback.extract_tb(late.exc_traceback)]
        if str(late.exc_value) != 'Event loop is closed' and not any('orbax' in name for name in files):
            before(late)

    sys.unraisablehook = show
    warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
    logging.getLogger('asyncio').setLevel(logging.CRITICAL)


def recorded_digests(path: str) -> dict[str, list[str]]:
    """{name: [kind, sums]} of the arrays, as they were saved; an error of any kind where that makes no sense."""
    return _metadata(path)['custom_metadata']['digests']


def recorded_frozen(path: str) -> str:
    """The digest of what adapters left frozen when a checkpoint was saved; '' where there were none."""
    return _metadata(path)['custom_metadata'].get('frozen', '')


def _metadata(path):
    """What Orbax has written about a checkpoint; an error of any kind for what makes no sense."""
    with open(os.path.join(path, METADATA), encoding='utf8') as file:
        metadata = json.load(file)
    if not isinstance(metadata['commit_timestamp_nsecs'], int):
        raise ValueError('it has no time at which it was finished')
    return metadata


def _check_kinds(path, abstract, digests, partial):
    """What is wrong with the names, dtypes and shapes of a checkpoint's arrays; '' if nothing is.

    BadInput when they are consistently those of another model. Orbax is asked only where the digests do not agree with
    the abstract tree: each time that it is asked, tensorstore 0.1.86 loses some 100 KiB.
    """
    wanted, recorded = _kinds(abstract), {name: kind for name, (kind, _) in digests.items()}
    names = wanted.keys() if partial else wanted.keys() | recorded.keys()
    if all(recorded.get(name) == wanted.get(name) for name in names):
        return ''
    there = _kinds(_described_tree(path))
    names = wanted.keys() if partial else wanted.keys() | recorded.keys() | there.keys()
    for name in sorted(names):
        if recorded.get(name) != there.get(name):
            return f'{name} is {there.get(name)} there and was saved as {recorded.get(name)}'
    for name in sorted(names):
        if there.get(name) != wanted.get(name):
            raise BadInput(
                'checkpoint',
                path,
                f'{name} is {there.get(name)} there and {wanted.get(name)} in this run: another model, optimizer or '
                'algorithm; use another --workdir',
            )
    return ''


def _kinds(tree):
    return {name: digest.kind_of(leaf) for name, leaf in digest.leaves_by_name(tree).items()}


def _set_aside_unreadable(workdir):
    """Moves away what stands among the checkpoints and cannot be one; Damaged if it is all that is there."""
    folder = os.path.join(workdir, FOLDER)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise BadInput('checkpoints', folder, 'is no folder; move it away')
    there = steps(workdir)
    problems = {step: problem for step in there if (problem := _unreadable(path_of(workdir, step)))}
    if len(problems) == len(there):
        for step, problem in problems.items():
            path = path_of(workdir, step)
            if not os.path.isdir(path) or os.listdir(path):  # an empty folder is no checkpoint that somebody lost
                raise Damaged(path, problem)
    for step, problem in problems.items():
        _set_aside(workdir, step, problem)


def _unreadable(path):
    """Why a folder cannot be a checkpoint; '' if it can."""
    try:
        _metadata(path)  # Orbax logs what it cannot read
        ocp.PyTreeCheckpointer().metadata(path)
    except Exception as error:  # Orbax raises whatever text that makes no sense leads to
        return _described(error)
    return '' if os.path.isdir(os.path.join(path, ITEM)) else 'it holds no arrays'


def _described(error):
    return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'


def _set_aside(workdir, step, problem):
    """Moves a checkpoint to workdir/damaged, and says so."""
    to = os.path.join(workdir, DAMAGED, str(step))
    logger.warning('the checkpoint of step %d is not what was saved (%s); it is in %s now', step, problem, to)
    if not processes.is_first():
        return
    append_event(workdir, step, 'damaged', problem=problem, moved_to=to)
    if os.path.isdir(to):  # an earlier one of the same step
        shutil.rmtree(to)
    os.makedirs(os.path.dirname(to), exist_ok=True)
    os.replace(path_of(workdir, step), to)


def kinds(path: str) -> dict[str, str]:
    """Dtype and shape of each array in a checkpoint's folder, by name; Damaged when that cannot be read."""
    try:
        return _kinds(_described_tree(path))
    except Exception as error:  # Orbax raises whatever text that makes no sense leads to
        raise Damaged(path, _described(error)) from None


def newest(workdir: str) -> str:
    """The folder of the newest checkpoint of which names and shapes can be read; Damaged where there is none."""
    damaged = None
    for step in steps(workdir):
        try:
            kinds(path_of(workdir, step))
        except Damaged as error:
            damaged = damaged or error
            continue
        return path_of(workdir, step)
    raise damaged or Damaged(workdir, 'no finished checkpoint')


def check_params(path: str, abstract: Any, thing: str, value: Any) -> None:
    """BadInput of a thing and its value when a checkpoint's parameters are not like the abstract ones."""
    there = {name: kind for name, kind in kinds(path).items() if name.startswith('params/')}
    wanted = _kinds({'params': abstract})
    for name in sorted(wanted.keys() | there.keys()):
        if wanted.get(name) != there.get(name):
            raise BadInput(thing, value, f'{name} is {there.get(name)} in {path} and {wanted.get(name)} in this model')


def parts_of(amended: set[str]) -> set[str]:
    """Parts of a state that begin anew where these keys were amended after it was saved."""
    return {ADAPTED[key] for key in amended & ADAPTED.keys()} | ({'aux/probe'} if amended & OF_PROBE else set())


def observes_otherwise(path: str, abstract: TrainState) -> bool:
    """Whether a checkpoint and a run differ in what config.log keeps for the metrics, and in nothing else."""
    try:
        digests = recorded_digests(path)
    except Exception:  # whatever makes no sense there: who reads it says so
        return False
    there = _by_part({name: kind for name, (kind, _) in digests.items()})
    ours = _by_part({name: digest.kind_of(x) for name, x in digest.leaves_by_name(abstract).items()})
    different = {part for part in ours.keys() | there.keys() if ours.get(part) != there.get(part)}
    return bool(different) and different <= OBSERVED


def read_fitting(
    path: str, abstract: TrainState, initial_state: Callable[[Any], TrainState], anew: set[str]
) -> TrainState:
    """The TrainState of a checkpoint's folder; parts that do not fit the abstract one, or are in `anew`, begin anew.

    The parameters and the step always come along: BadInput when they do not fit. Anew is as initial_state(trained
    parameters) has it.
    """
    wanted = digest.leaves_by_name(abstract)
    there, ours = _by_part(kinds(path)), _by_part({n: digest.kind_of(x) for n, x in wanted.items()})
    unfit = {part for part in ours if there.get(part) != ours[part] or part in anew} - {'params', 'step'}
    gone = there.keys() - ours.keys()
    for part in sorted(part for part in unfit | gone if part not in ADAPTED.values()):
        how = 'not used any more' if part in gone else 'begins anew'
        logger.warning('%s: %s', how, PARTS.get(part, part.removeprefix('aux/')))
    leaves = {}
    if unfit:
        params = read_tree(path, {'params': abstract.params}, partial=True)['params']
        initial = digest.leaves_by_name(initial_state(params))
        leaves = {name: leaf for name, leaf in initial.items() if _part(name) in unfit | {'params'}}
        del params, initial  # before the rest is read
    rest = read_tree(path, _only(abstract, ours.keys() - {_part(name) for name in leaves}), partial=True)
    leaves |= digest.leaves_by_name(rest)
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in wanted])


def _part(name):
    """The part of a state that a leaf belongs to, which fits or begins anew as a whole."""
    names = name.split('/')
    depth = 1 if names[0] != 'aux' else 3 if names[1] == 'coefficients' else 2
    return '/'.join(names[:depth])


def _by_part(kinds):
    """Part -> {name: kind} of its leaves."""
    parts: dict[str, dict[str, str]] = {}
    for name, kind in kinds.items():
        parts.setdefault(_part(name), {})[name] = kind
    return parts


def _only(state, parts):
    """The nested dict of a state's parts."""
    tree: dict[str, Any] = {name: getattr(state, name) for name in parts if '/' not in name}
    aux = {name: value for name, value in state.aux.items() if f'aux/{name}' in parts}
    coefficients = {k: v for k, v in state.aux['coefficients'].items() if f'aux/coefficients/{k}' in parts}
    return tree | {'aux': aux | ({'coefficients': coefficients} if coefficients else {})}


def copy_cold_start(workdir: str, folder: str) -> None:
    """Copies the cold start of a workdir's run, where there is one, to the folder of another run."""
    source = os.path.join(workdir, COLD_START)
    if steps(source):
        shutil.copytree(source, os.path.join(folder, COLD_START))


def bad_batch_path(workdir: str, step: int) -> str:
    """The file of a step's batch."""
    return os.path.join(workdir, BAD, f'{step:06d}.npz')


def dump_bad_batch(workdir: str, step: int, experience: Experience) -> None:
    """Writes the batch of a step that skipped an update; all processes must call it."""
    path, leaves = bad_batch_path(workdir, step), jax.tree_util.tree_leaves_with_path(processes.fetch(experience))
    if processes.is_first():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_write(path, 'wb') as file:
            np.savez(file, **{jax.tree_util.keystr(name, simple=True, separator='.'): x for name, x in leaves})
    append_event(workdir, step, 'skipped', batch=os.path.relpath(path, workdir))


def load_bad_batch(workdir: str, step: int) -> Experience:
    """The host arrays of a step's batch; BadInput for one that is not there or cannot be read."""
    path = bad_batch_path(workdir, step)
    if not os.path.isfile(path):
        names = os.listdir(os.path.dirname(path)) if os.path.isdir(os.path.dirname(path)) else []
        steps = ', '.join(
            sorted(str(int(name[:-4])) for name in names if name[:-4].isdigit() and name.endswith('.npz'))
        )
        raise BadInput('--step', step, f'choose one of {steps}' if steps else f'{workdir} has no batch of any step')
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: dict[str, Any] = {name: file[name] for name in file.files}
        rollout: Any = Rollout(**{name: arrays.pop(f'rollout.{name}') for name in _fields(Rollout)})
        optional = {name: arrays.get(name) for name in _fields(Experience) if name != 'rollout'}
        return Experience(rollout, **optional)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(
            'batch', path, f'cannot be read ({type(error).__name__}: {error}); the run must skip it again'
        ) from None


def _fields(cls):
    return [field.name for field in dataclasses.fields(cls)]


# What follows keeps a run that saves often from growing. tensorstore 0.1.86 never frees the texts of a JSON that it has
# answered. At each save and restore Orbax asks how many bytes were moved, for a line of its log (40 KiB), and for each
# array anew what the folder's spec is in full (20 KiB for 80 arrays). The first is answered with 0, the second once a
# kind. And each save begins threads, whose memory glibc takes from 8 arenas a core, each with gaps of its own; two
# arenas take as long.
M_ARENA_MAX, ARENAS = -8, 2  # of malloc.h
ORBAX = (0, 12, 5)  # the first version whose files these replacements leave whole


class _KvStoreSpec(dict):
    """A KvStore.Spec as a dict, which tensorstore takes as well; it asks once for all that differ by paths alone."""

    def to_json(self) -> Any:
        """The spec in full."""
        paths: dict[str, str] = {}

        def stand_in(path):
            name = f'/{len(paths)}{"/" * path.endswith("/")}'
            paths[name] = path
            return name

        in_full = _resolved(json.dumps(_with_paths(self, stand_in)))
        return _with_paths(in_full, lambda name: paths.get(name, name))


def _with_paths(spec, replace):
    """A copy of the spec with other absolute paths."""
    return {
        name: replace(value)
        if name == 'path' and value.startswith('/')
        else _with_paths(value, replace)
        if isinstance(value, dict)
        else copy.deepcopy(value)
        for name, value in spec.items()
    }


@functools.lru_cache(maxsize=64)  # kinds of specs, which are a few
def _resolved(text):
    return tensorstore.KvStore.Spec(json.loads(text)).to_json()


@functools.cache
def spare_memory() -> None:
    """From now on Orbax asks less and threads share arenas; nothing changes where Orbax or libc are of another kind."""
    if 'arena_max' not in os.environ.get('GLIBC_TUNABLES', '') and 'MALLOC_ARENA_MAX' not in os.environ:
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)
    version = importlib.metadata.version('orbax-checkpoint')
    if tuple(map(int, re.findall(r'\d+', version)[:3])) < ORBAX:
        return
    try:
        orbax: Any = importlib.import_module('orbax.checkpoint._src.serialization.tensorstore_utils')
    except ImportError:
        return
    orbax.get_tensorstore_raw_bytes = lambda *_, **__: 0
    store = types.SimpleNamespace(Spec=_KvStoreSpec, open=tensorstore.KvStore.open)
    orbax.ts = types.SimpleNamespace(**vars(tensorstore) | {'KvStore': store})
