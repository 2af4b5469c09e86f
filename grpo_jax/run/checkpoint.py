"""Orbax checkpoints of a TrainState, which is all that a run needs to resume: written atomically in the background.

Each checkpoint records a digest of every array, and arrays that are read back are compared with their digests. A
checkpoint is sound when they are equal. A run resumes from its newest sound checkpoint; newer damaged ones, and all
folders that cannot be checkpoints, are moved to workdir/damaged. If none is sound, none is moved and the run ends.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import json
import logging
import math
import os
import re
import shutil
import sys
import traceback
from typing import Any
import warnings
import zipfile

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp

from grpo_jax import ranges
from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.hosts import processes
from grpo_jax.hosts.files import atomic_write
from grpo_jax.models import lora
from grpo_jax.run import digest
from grpo_jax.run.rows import append_event, read_rows
from grpo_jax.text import during
from grpo_jax.types import Experience, Rollout, TrainState

logger = logging.getLogger('grpo_jax')
FOLDER, DAMAGED, COLD_START, BAD = 'checkpoints', 'damaged', 'cold_start', 'bad'  # in the workdir
METADATA, ITEM = '_CHECKPOINT_METADATA', 'default'  # Orbax's names of a file and a folder in a checkpoint
PENDING = 'pending/'  # begins the names of arrays in TrainState.pending
# arrays that must be finite; in others NaN may stand for a number that is missing
FINITE = ('params/', 'opt_state/', 'ref_params/', 'aux/critic/', 'aux/coefficients/')
# parts of a checkpoint that may be reset, in words
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
    'pending': 'the completions under way',
}
OBSERVED = {'aux/probe', 'ref_params'}  # parts that a run may keep for config.log alone, without learning from them
# parts that have a meaning only for the data of the run that saved them
DATA_PARTS = {*(f'aux/{name}' for name in ('position', 'tries', 'hits', 'kept', 'history', 'probe')), 'pending'}
TRAIN_SPLIT = 'content of the train split'  # key of an amendment
# config keys of numbers that adapt during a run -> the parts of the state that hold them
ADAPTED = {f'algorithm.{name}': f'aux/coefficients/{name}' for name in ('kl_coef', 'entropy_coef')}
# config keys on which the shapes of completions depend
RESHAPING = {'data.prompts_per_step', 'data.max_prompt_tokens', 'rollout.group_size', 'rollout.max_tokens'}
PROBE_KEYS = {'rollout.temperature', 'model.dtype'}  # config keys that change the logprobs of the probe


class Damaged(BadInput):
    """A checkpoint that cannot be read, or whose arrays differ from those that were saved."""

    def __init__(self, path: str, problem: str):
        self.problem, remedy = problem, 'bring it back from a copy, or delete it'
        super().__init__(path, NO_VALUE, f'is not the checkpoint that was saved ({problem}); {remedy}')


class Best:
    """Remembers a run's best evaluation so far; as a PreservationPolicy of Orbax it keeps that step's checkpoint."""

    def __init__(self, workdir: str, figure: str):
        """Reads workdir's evaluations up to its newest checkpoint; the one with the highest `figure` is the best."""
        self.figure, self.value, self.step = figure, -math.inf, 0
        path, newest = os.path.join(workdir, 'evaluations.jsonl'), max(steps(workdir), default=0)
        for row in read_rows(path) if os.path.exists(path) else ():
            if row['step'] <= newest:
                self.add(row['step'], row)

    def add(self, step: int, results: Mapping[str, Any]) -> bool:
        """Adds the evaluation before a step; returns whether it is the best yet. BadInput if step 0 has no figure."""
        if step == 0 and self.figure not in results:
            raise BadInput('checkpoint.best', self.figure, f'is no figure; {ranges.nearest(self.figure, results)}')
        value = results.get(self.figure, -math.inf)
        if better := value > self.value or step == self.step:  # a repeated evaluation is as good as it was
            self.step, self.value = step, value
        return better

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """A bool for each of Orbax's checkpoints: whether it is the one with the best evaluation."""
        return [checkpoint.step == self.step for checkpoint in checkpoints]


def manager(workdir, *, keep, best=None):
    """Orbax's CheckpointManager of workdir/checkpoints; its close() waits until all checkpoints are written.

    keep: how many of the newest checkpoints stay; None keeps all. best: a Best, whose checkpoint stays too. Folders
    that cannot be checkpoints are moved to workdir/damaged; raises Damaged when no other folder is left, unless all are
    empty. All processes must call this and its methods.
    """
    spare_memory()
    if processes.is_first():
        _set_aside_unreadable(workdir)
    # the processes meet first: inside the manager one waits at most 30 s for another
    processes.exchange(f'the checkpoints of {workdir}', '')
    path = os.path.abspath(os.path.join(workdir, FOLDER))
    os.makedirs(path, exist_ok=True)
    own = ocp.options.MultiprocessingOptions(active_processes={*processes.members()} if processes.in_group() else None)
    policies = [ocp.checkpoint_managers.LatestN(keep), *([best] if best else [])]
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
        create=False,  # which Orbax refuses to some of the processes
        multiprocessing_options=own,
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=own)
    return ocp.CheckpointManager(path, options=options, item_handlers=handler)


def steps(workdir: str) -> list[int]:
    """The steps of the checkpoints in a workdir, the newest first; they may be damaged."""
    folder = os.path.join(workdir, FOLDER)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((int(name) for name in names if re.fullmatch('0|[1-9][0-9]*', name)), reverse=True)


def path_of(workdir: str, step: int) -> str:
    """The folder of a step's checkpoint."""
    return os.path.join(os.path.abspath(workdir), FOLDER, str(step))


def save(checkpoints, state):
    """Starts to write a TrainState as the checkpoint of its step; returns before the checkpoint is on the disk.

    checkpoints: a CheckpointManager. Beside adapters, the frozen weights are not written, only their digest. Raises
    FloatingPointError and writes nothing when an array of FINITE is not finite. All processes must call it.
    """
    trained, frozen = lora.split(state.params)
    pending = state.pending if isinstance(state.pending, dict) else state.pending and state.pending.pack()
    state = state.replace(params=trained, pending=pending)
    digests = digest.digests(state)
    bad = [name for name, one in digests.items() if name.startswith(FINITE) and not one.finite]
    if bad:
        raise FloatingPointError(
            f'{bad[0]} is not finite after step {int(state.step)}: no checkpoint of it is written; the same command '
            'goes on from the one before'
        )
    metadata: dict[str, Any] = {'digests': {name: [one.kind, one.sums] for name, one in digests.items()}}
    if frozen is not None:
        metadata['frozen'] = digest.hash_tree(frozen)
    if processes.in_group() and len(processes.members()) == 1:
        state = jax.device_get(state)  # beside other processes Orbax refuses arrays that lie on one process's devices
    checkpoints.save(int(state.step), args=ocp.args.PyTreeSave(state), custom_metadata=metadata)


def read_newest(workdir: str, read: Callable[[str], Any], only: int | None = None) -> tuple[Any, int]:
    """(read(folder), step) of a workdir's newest checkpoint for which `read` raises no Damaged.

    only: read the checkpoint of this step alone. Warns of damaged checkpoints, and leaves them where they are. Raises
    BadInput when step `only` or the workdir has no checkpoint, and Damaged when no checkpoint is sound.
    """
    damaged, saved = None, steps(workdir)
    if only is not None and only not in saved:
        raise BadInput('--step', only, f'has no checkpoint in {workdir}; choose one of {saved}')
    for step in saved if only is None else [only]:
        try:
            return read(path_of(workdir, step)), step
        except Damaged as error:
            damaged = damaged or error
            logger.warning('%s', error)
    remedy = 'holds no finished checkpoint; train first, or name another run'
    raise damaged or BadInput('checkpoint', os.path.join(workdir, FOLDER), remedy)


def read_params(workdir: str, abstract: Any, only: int | None = None) -> tuple[Any, int]:
    """(parameters, step) of a workdir's newest sound checkpoint, or of step `only`; raises what read_newest raises.

    abstract: ShapeDtypeStructs with the shardings of the result.
    """
    return read_newest(workdir, lambda path: read_tree(path, {'params': abstract}, partial=True)['params'], only)


def read_tree(path: str, abstract: Any, *, partial: bool = False) -> Any:
    """The arrays of a checkpoint, read from its folder and compared with their digests.

    path: the folder; abstract: a tree of ShapeDtypeStructs with the shardings of the result; partial: the checkpoint
    may have more arrays than the abstract tree. Raises Damaged when a digest differs or the files cannot be read, and
    BadInput when names, dtypes or shapes differ from the abstract tree's. All processes must call it.
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
    except Exception as error:  # tensorstore and Orbax raise many kinds of errors for damaged files
        _ignore_late_callbacks()
        problem = _describe_error(error)
    problems = filter(None, processes.exchange(f'reading {path}', problem))
    for problem in problems:
        raise Damaged(path, problem)
    return tree


Read = Callable[[str, Any], Any]  # (a checkpoint's folder, an abstract tree) -> the tree of arrays


def restore(checkpoints: Any, abstract: TrainState, read: Read = read_tree) -> TrainState | None:
    """The TrainState of the newest sound checkpoint; None when there is no checkpoint.

    checkpoints: a CheckpointManager; abstract: ShapeDtypeStructs with the shardings of the result; read(folder,
    abstract): reads one checkpoint. Newer damaged checkpoints are moved to workdir/damaged, with a warning. Raises
    BadInput when the checkpoint's arrays differ from the abstract state's (another model), and Damaged when no
    checkpoint is sound. All processes must call it.
    """
    workdir, damaged = os.path.dirname(str(checkpoints.directory)), []
    for step in steps(workdir):
        try:
            path = path_of(workdir, step)
            state = read(path, abstract.replace(pending=recorded_pending(path)))
        except Damaged as error:
            damaged.append((step, error))
            continue
        for worse, error in damaged:
            _set_aside(workdir, worse, error.problem)
        if damaged:
            logger.warning('the run goes on from step %d', step)
        processes.exchange(f'the damaged checkpoints of {workdir}', '')
        checkpoints.reload()
        return state
    if damaged:
        raise damaged[0][1]
    return None


def abstract_tree(path: str, sharding: Any) -> Any:
    """ShapeDtypeStructs, all with this sharding, of the arrays in a checkpoint's folder; raises Damaged as `kinds`."""
    try:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _array_metadata(path))
    except Exception as error:  # Orbax raises many kinds of errors for damaged files
        raise Damaged(path, _describe_error(error)) from None


def _array_metadata(path):
    """Orbax's metadata of the arrays in a checkpoint's folder. Raises errors of many kinds for damaged files."""
    return ocp.PyTreeCheckpointHandler().metadata(epath.Path(path) / ITEM).tree


def _ignore_late_callbacks():
    """Silences, from now on, Orbax callbacks that arrive after a failed read.

    When one array cannot be read, the others arrive or are cancelled later, after the event loop was closed.
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
    """{name: [kind, sums]} of a checkpoint's arrays, see digest.Digest; raises many kinds of errors if damaged."""
    return _read_metadata(path)['custom_metadata']['digests']


def recorded_pending(path: str) -> dict[str, np.ndarray] | None:
    """{name: u8 zeros} shaped as the arrays of TrainState.pending in a checkpoint; None without any. Raises Damaged."""
    try:
        kinds = {name: kind for name, (kind, _) in recorded_digests(path).items()}
    except Exception as error:  # Orbax raises many kinds of errors for damaged files
        raise Damaged(path, _describe_error(error)) from None
    sizes = {
        name.removeprefix(PENDING): int(re.sub('[^0-9]', '', kind.removeprefix('uint8')))
        for name, kind in kinds.items()
        if name.startswith(PENDING)
    }
    return {name: np.zeros(size, np.uint8) for name, size in sizes.items()} or None


def check_reshaping(pending: Mapping[str, Any] | None, amended: set[str]) -> None:
    """Raises BadInput if amended config keys change the shapes of completions, and a checkpoint has some `pending`."""
    keys = sorted(amended & RESHAPING)
    if pending and keys:
        raise BadInput(
            '--amend',
            ', '.join(keys),
            'changes the shapes of completions, of which some are under way in the checkpoint; go on with the old '
            'value, or begin a branch, which samples their prompts again: --branch=FOLDER',
        )


def recorded_frozen(path: str) -> str:
    """The digest of the frozen weights when a checkpoint was saved; '' where the model had no adapters."""
    return _read_metadata(path)['custom_metadata'].get('frozen', '')


def _read_metadata(path):
    """Orbax's metadata file of a checkpoint, as a dict. Raises errors of many kinds for damaged files."""
    with open(os.path.join(path, METADATA), encoding='utf8') as file:
        metadata = json.load(file)
    if not isinstance(metadata['commit_timestamp_nsecs'], int):
        raise ValueError('it has no time at which it was finished')
    return metadata


def _check_kinds(path, abstract, digests, partial):
    """Compares names, dtypes and shapes of a checkpoint's arrays; returns in words what is damaged, or ''.

    path: the checkpoint's folder; abstract: the wanted tree; digests: of recorded_digests; partial: the checkpoint may
    have more arrays. Raises BadInput when the checkpoint is sound, but of another model. Orbax reads its
    metadata only where the digests differ from the abstract tree, since each read leaks 100 KiB in tensorstore 0.1.86.
    """
    wanted, recorded = _kinds_by_name(abstract), {name: kind for name, (kind, _) in digests.items()}
    names = wanted.keys() if partial else wanted.keys() | recorded.keys()
    if all(recorded.get(name) == wanted.get(name) for name in names):
        return ''
    actual = _kinds_by_name(_array_metadata(path))
    names = wanted.keys() if partial else wanted.keys() | recorded.keys() | actual.keys()
    for name in sorted(names):
        if recorded.get(name) != actual.get(name):
            return f'{name} is {actual.get(name)} there and was saved as {recorded.get(name)}'
    for name in sorted(names):
        if actual.get(name) != wanted.get(name):
            raise BadInput(
                'checkpoint',
                path,
                f'{name} is {actual.get(name)} there and {wanted.get(name)} in this run: another model, optimizer or '
                'algorithm; use another --workdir',
            )
    return ''


def _kinds_by_name(tree):
    """{name: dtype and shape, like float32[4,8]} of the leaves of a tree."""
    return {name: digest.kind_of(leaf) for name, leaf in digest.leaves_by_name(tree).items()}


def _set_aside_unreadable(workdir):
    """Moves folders that cannot be checkpoints to workdir/damaged; Damaged if none is left, unless all are empty."""
    folder = os.path.join(workdir, FOLDER)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise BadInput('checkpoints', folder, 'is no folder; move it away')
    saved = steps(workdir)
    problems = {step: problem for step in saved if (problem := _find_problem(path_of(workdir, step)))}
    if len(problems) == len(saved):
        for step, problem in problems.items():
            path = path_of(workdir, step)
            if not os.path.isdir(path) or os.listdir(path):  # an empty folder is no checkpoint that somebody lost
                raise Damaged(path, problem)
    for step, problem in problems.items():
        _set_aside(workdir, step, problem)


def _find_problem(path):
    """Why a folder cannot be a checkpoint; '' if it can."""
    log = logging.getLogger('absl')
    level = log.level
    try:
        _read_metadata(path)  # before Orbax, which would log what it cannot read
        log.setLevel(logging.ERROR)  # Orbax warns that a sound checkpoint has no metadata of another kind
        ocp.PyTreeCheckpointer().metadata(path)
    except Exception as error:  # Orbax raises many kinds of errors for damaged files
        return _describe_error(error)
    finally:
        log.setLevel(level)
    return '' if os.path.isdir(os.path.join(path, ITEM)) else 'it holds no arrays'


def _describe_error(error):
    """An error's type and the first 200 characters of its message, on one line."""
    return f'{type(error).__name__}: {" ".join(str(error).split())[:200]}'


def _set_aside(workdir, step, problem):
    """Moves a damaged checkpoint to workdir/damaged, with a warning and an event."""
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
    """{name: dtype and shape} of the arrays in a checkpoint's folder; raises Damaged when they cannot be read."""
    try:
        return _kinds_by_name(_array_metadata(path))
    except Exception as error:  # Orbax raises many kinds of errors for damaged files
        raise Damaged(path, _describe_error(error)) from None


def is_checkpoint(path: str) -> bool:
    """Whether a path is the folder of a checkpoint."""
    return os.path.isfile(os.path.join(path, METADATA))


def check_params(path: str, abstract: Any, thing: str, value: Any) -> None:
    """Raises BadInput(thing, value) where a checkpoint's parameters have other names, dtypes or shapes than `abstract`.

    path: the checkpoint's folder, or the workdir whose newest checkpoint it is.
    """
    saved = kinds(path) if is_checkpoint(path) else read_newest(path, kinds)[0]
    actual = {name: kind for name, kind in saved.items() if name.startswith('params/')}
    wanted = _kinds_by_name({'params': abstract})
    for name in sorted(wanted.keys() | actual.keys()):
        if wanted.get(name) != actual.get(name):
            raise BadInput(
                thing,
                value,
                f'{name} is {actual.get(name)} in {path} and {wanted.get(name)} in this model; use the model and '
                'adapters of that run, or name another checkpoint',
            )


def parts_to_reset(amended: set[str]) -> set[str]:
    """The parts of a checkpoint that must be reset because these config keys were amended after it was saved."""
    parts = {ADAPTED[key] for key in amended & ADAPTED.keys()} | ({'aux/probe'} if amended & PROBE_KEYS else set())
    return parts | (DATA_PARTS if TRAIN_SPLIT in amended else set())


def differs_in_observed(path: str, abstract: TrainState) -> bool:
    """Whether the arrays in a checkpoint's folder differ from a run's abstract state, and in OBSERVED parts alone."""
    try:
        digests = recorded_digests(path)
    except Exception:  # damaged: the error comes when the checkpoint is read
        return False
    saved = _group_by_part({name: kind for name, (kind, _) in digests.items()})
    needed = _group_by_part(_kinds_by_name(abstract))
    different = {part for part in needed.keys() | saved.keys() if needed.get(part) != saved.get(part)}
    return bool(different) and different <= OBSERVED


def read_fitting(
    path: str, abstract: TrainState, initial_state: Callable[[Any], TrainState], reset_parts: set[str]
) -> TrainState:
    """The TrainState of a checkpoint, in which parts that do not fit the abstract state begin anew, with a warning.

    path: the checkpoint's folder; abstract: ShapeDtypeStructs with the shardings of the result; initial_state(trained
    parameters): the state whose values these parts take; reset_parts: parts that begin anew though they fit. Raises
    BadInput when the parameters or the step, which never begin anew, do not fit, and Damaged as read_tree does.
    """
    if 'pending' in reset_parts:
        abstract = abstract.replace(pending=None)
    abstract_leaves = digest.leaves_by_name(abstract)
    saved, needed = _group_by_part(kinds(path)), _group_by_part(_kinds_by_name(abstract))
    reset = {part for part in needed if saved.get(part) != needed[part] or part in reset_parts} - {'params', 'step'}
    unused = saved.keys() - needed.keys()
    for part in sorted(part for part in reset | unused if part not in ADAPTED.values()):
        how = 'not used any more' if part in unused else 'begins anew'
        logger.warning('%s: %s', how, PARTS.get(part, part.removeprefix('aux/')))
    leaves = {}
    if reset:
        params = read_tree(path, {'params': abstract.params}, partial=True)['params']
        initial = digest.leaves_by_name(initial_state(params))
        leaves = {name: leaf for name, leaf in initial.items() if _part_of(name) in reset | {'params'}}
        del params, initial  # frees their memory before other parts are read
    other_parts = needed.keys() - {_part_of(name) for name in leaves}
    leaves |= digest.leaves_by_name(read_tree(path, _select_parts(abstract, other_parts), partial=True))
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in abstract_leaves])


def _part_of(name):
    """The part of a state that the leaf of this name belongs to; a part is kept or reset as a whole."""
    names = name.split('/')
    depth = 1 if names[0] != 'aux' else 3 if names[1] == 'coefficients' else 2
    return '/'.join(names[:depth])


def _group_by_part(kinds):
    """{part: {name: kind}}, from {name: kind} of all leaves."""
    parts: dict[str, dict[str, str]] = {}
    for name, kind in kinds.items():
        parts.setdefault(_part_of(name), {})[name] = kind
    return parts


def _select_parts(state, parts):
    """A nested dict that has only these parts of a state."""
    tree: dict[str, Any] = {name: getattr(state, name) for name in parts if '/' not in name}
    aux = {name: value for name, value in state.aux.items() if f'aux/{name}' in parts}
    coefficients = {k: v for k, v in state.aux['coefficients'].items() if f'aux/coefficients/{k}' in parts}
    return tree | {'aux': aux | ({'coefficients': coefficients} if coefficients else {})}


def copy_cold_start(workdir: str, folder: str) -> None:
    """Copies the checkpoints of a workdir's cold start, if it has some, to another run's folder."""
    source = os.path.join(workdir, COLD_START)
    if steps(source):
        shutil.copytree(source, os.path.join(folder, COLD_START))


def bad_batch_path(workdir: str, step: int) -> str:
    """The file that holds a step's batch when the step skipped an update."""
    return os.path.join(workdir, BAD, f'{step:06d}.npz')


def dump_bad_batch(workdir: str, step: int, experience: Experience) -> None:
    """Writes the batch of a step that skipped an update to bad_batch_path, and an event; all processes call it."""
    path, leaves = bad_batch_path(workdir, step), jax.tree_util.tree_leaves_with_path(processes.fetch(experience))
    if processes.is_first():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_write(path, 'wb') as file:
            np.savez(file, **{jax.tree_util.keystr(name, simple=True, separator='.'): x for name, x in leaves})
    append_event(workdir, step, 'skipped', batch=os.path.relpath(path, workdir))


def load_bad_batch(workdir: str, step: int) -> Experience:
    """The Experience, of host arrays, that dump_bad_batch wrote for a step; BadInput if it is missing or unreadable."""
    path = bad_batch_path(workdir, step)
    if not os.path.isfile(path):
        names = os.listdir(os.path.dirname(path)) if os.path.isdir(os.path.dirname(path)) else []
        steps = ', '.join(
            sorted(str(int(name[:-4])) for name in names if name[:-4].isdigit() and name.endswith('.npz'))
        )
        remedy = f'choose one of {steps}' if steps else f'{workdir} has none of any step; name another --workdir'
        raise BadInput('--step', step, f'has no batch of a skipped update; {remedy}')
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: dict[str, Any] = {name: file[name] for name in file.files}
        rollout: Any = Rollout(**{name: arrays.pop(f'rollout.{name}') for name in _field_names(Rollout)})
        optional = {name: arrays.get(name) for name in _field_names(Experience) if name != 'rollout'}
        return Experience(rollout, **optional)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(
            'batch', path, f'cannot be read ({type(error).__name__}: {error}); choose another, or repeat that step'
        ) from None


def _field_names(cls):
    """The names of a dataclass's fields, in order."""
    return [field.name for field in dataclasses.fields(cls)]


# tensorstore 0.1.86 never frees the JSON texts that it returns. At each save and restore Orbax requests the number of
# bytes that were moved, for a line of its log (40 KiB); it gets 0 here. Besides, each save starts threads, for which
# glibc uses up to 8 arenas a core, and each arena has unused gaps; two arenas are as fast.
M_ARENA_MAX, ARENAS = -8, 2  # M_ARENA_MAX is a constant of malloc.h


@functools.cache
def spare_memory() -> None:
    """Makes Orbax and glibc use less memory from now on; another libc, or an Orbax of another form, stays as it is."""
    if 'arena_max' not in os.environ.get('GLIBC_TUNABLES', '') and 'MALLOC_ARENA_MAX' not in os.environ:
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)
    with contextlib.suppress(ImportError):
        orbax: Any = importlib.import_module('orbax.checkpoint._src.serialization.tensorstore_utils')
        orbax.get_tensorstore_raw_bytes = lambda *_, **__: 0
