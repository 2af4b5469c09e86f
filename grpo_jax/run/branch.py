"""A run that begins from another run's checkpoint, and what of a checkpoint a changed config goes on with."""

from collections.abc import Mapping
import contextlib
import dataclasses
import logging
import os
import shutil
from typing import Any, NamedTuple

import jax

from grpo_jax.errors import BadInput
from grpo_jax.hosts import lock, processes
from grpo_jax.learner.programs import Learner
from grpo_jax.learner.state import without_frozen
from grpo_jax.models import hf
from grpo_jax.run import checkpoint, digest, reference, steering
from grpo_jax.run.experiment import Experiment, agree, claim, open_experiment, recorded_config
from grpo_jax.run.loop import Loop
from grpo_jax.run.origins import are_same_data, recorded_origins
from grpo_jax.run.rows import append_event, recorded_events
from grpo_jax.types import TrainState

logger = logging.getLogger('grpo_jax')
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
MAKING = 'branching'  # the folder in a branch's workdir in which it is made
OF_DATA = (
    'aux/position',
    'aux/tries',
    'aux/hits',
    'aux/kept',
    'aux/history',
    'aux/probe',
)  # what means nothing on other data
OBSERVED = {'aux/probe', 'ref_params'}  # what config.log has kept, though nothing learns from it
# keys of numbers that adapt during a run -> where the state has them
ADAPTED = {f'algorithm.{name}': f'aux/coefficients/{name}' for name in ('kl_coef', 'entropy_coef')}
OF_PROBE = {'rollout.temperature', 'model.dtype'}  # keys of which the logprobs are that the probe compares with


class Parent(NamedTuple):
    """The run that a branch is to begin from."""

    workdir: str
    changes: tuple[steering.Change, ...]  # of the branch's config to the parent's


def open_run(
    config: Any, workdir: str, functions: Mapping | None, steered: steering.Steering
) -> tuple[Experiment, Parent | None]:
    """(Experiment of the run in workdir, or of its branch; the Parent of a branch that is to begin).

    BadInput when the branch's folder holds something else than a run that was begun from workdir.
    """
    if not steered.branch:
        return open_experiment(config, workdir, functions=functions, steered=steered), None
    _check_folders(workdir, steered.branch)
    if os.path.exists(os.path.join(steered.branch, 'config.json')):
        return open_experiment(config, steered.branch, functions=functions, steered=steered), None
    parent = Parent(workdir, steering.changes(workdir, recorded_config(config)))
    inherited = [change for change in parent.changes if change.kind == steering.INHERITED]
    if inherited:
        steering.refuse(inherited, workdir, steered)
    other_model = any(change.key == 'model.path' for change in parent.changes)
    folder = hf.find(config.model.path) if other_model else os.path.join(workdir, 'model')
    experiment = open_experiment(
        config, steered.branch, folder=folder, functions=functions, origins=recorded_origins(workdir), steered=steered
    )
    checkpoint.check_params(checkpoint.newest(workdir), experiment.abstract_trained(), '--branch', steered.branch)
    return experiment, parent


def _check_folders(workdir, branch):
    """BadInput when branch cannot be a branch of the run in workdir."""
    outer, inner = os.path.realpath(workdir), os.path.realpath(branch)
    if os.path.commonpath([outer, inner]) in (outer, inner):
        raise BadInput('--branch', branch, f'and {workdir} must not lie in one another; name a folder beside it')
    if os.path.exists(os.path.join(branch, 'config.json')):
        begun = [row['parent'] for row in recorded_events(branch) if row['event'] == 'branched']
        if os.path.abspath(workdir) not in begun:
            raise BadInput('--branch', branch, f'holds a run that was not begun from {workdir}; name a new folder')
        return
    names = {*os.listdir(branch)} if os.path.isdir(branch) else {''} if os.path.lexists(branch) else set()
    if MAKING not in names and names - {lock.FILE}:
        raise BadInput('--branch', branch, 'is there and holds no run; name a new folder')
    if not os.path.isfile(os.path.join(workdir, 'config.json')):
        raise BadInput('--workdir', workdir, 'holds no run (no config.json) that --branch could begin from')
    if not checkpoint.steps(workdir):
        raise BadInput('--workdir', workdir, 'holds no finished checkpoint that --branch could begin from')


def begin(experiment: Experiment, parent: Parent | None, learner: Learner) -> None:
    """Makes the workdir of a branch, whose first checkpoint is the state that it begins from; config.json comes last.

    Nothing is done without a parent, in whose workdir nothing is written.
    """
    if parent is None:
        return
    agree(experiment, None, {}, ())
    child = experiment.workdir
    temporary = os.path.join(child, MAKING)
    if processes.is_first():
        os.makedirs(temporary, exist_ok=True)
        _clear(temporary)  # of what a process that was killed has left
    try:
        processes.exchange(f'the folder of the branch {child}', '')
        step = _make(experiment, parent, learner, temporary)
        processes.exchange(f'the first checkpoint of the branch {child}', '')
    except BaseException:
        if processes.is_first():
            _clear(temporary)
            if {*os.listdir(child)} <= {MAKING, lock.FILE}:  # else it tells that the rest is of a branch
                os.rmdir(temporary)
                with contextlib.suppress(OSError):  # it has an owner
                    os.rmdir(child)
        raise
    if processes.is_first():
        _move_up(temporary, child)
    processes.exchange(f'the branch {child}', '')
    logger.warning('%s begins from step %d of %s', child, step, parent.workdir)
    for change in parent.changes:
        logger.warning('%s', change)


def _make(experiment, parent, learner, folder):
    """Writes to a folder what the workdir of a branch has at its start; returns the step."""
    if processes.is_first():
        checkpoint.copy_cold_start(experiment, parent.workdir, folder)
    processes.exchange(f'what stays frozen in {folder}', '')
    state = _inherit(experiment, parent, learner)
    if any(change.key == 'reference.path' for change in parent.changes):
        state = reference.anchor(experiment, state, learner.state)
    step = int(state.step)
    refuse_fewer_steps(experiment, step)
    with contextlib.closing(checkpoint.manager(folder, keep=None)) as checkpoints:
        checkpoint.save(checkpoints, state)
    differences = {change.key: [change.old, change.new] for change in parent.changes}
    append_event(folder, step, 'branched', parent=os.path.abspath(parent.workdir), changes=differences)
    claim(dataclasses.replace(experiment, workdir=folder), step)
    return step


def refuse_fewer_steps(experiment: Experiment, done: int) -> None:
    """BadInput for a run that is to have fewer steps than it has: its last evaluation would be of another step."""
    if done > experiment.settings.steps:
        raise BadInput('steps', experiment.settings.steps, f'the run has {done} already; use that many or more')


def _clear(folder):
    """Removes all that is in a folder."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        else:
            os.remove(entry)


def _move_up(folder, workdir):
    """Moves what lies in a folder to the workdir around it; config.json, with which the run is begun, comes last."""
    for name in sorted(os.listdir(folder), key=lambda name: name == 'config.json'):
        target = os.path.join(workdir, name)
        if os.path.isdir(target):
            shutil.rmtree(target)  # moved there by a process that was killed
        os.replace(os.path.join(folder, name), target)
    os.rmdir(folder)


def _inherit(experiment, parent, learner):
    """The TrainState of the parent's newest sound checkpoint, as far as it fits the learner."""
    changed, damaged = {change.key for change in parent.changes}, None
    anew = set()
    if any(key.startswith('data.') and steering.kind_of(key) == steering.FIXED for key in changed) or (
        changed & set(steering.KINDS[steering.PATH]) - {'model.path'} and not are_same_data(experiment, parent.workdir)
    ):
        anew |= set(OF_DATA)
    for step in checkpoint.steps(parent.workdir):
        amended = steering.amended_since(parent.workdir, step, parent.changes)
        path = checkpoint.path_of(parent.workdir, step)
        try:
            state = read_fitting(path, learner, anew | _anew(amended))
            return state.replace(params=checkpoint.with_frozen(experiment, state.params, path, parent.workdir))
        except checkpoint.Damaged as error:
            logger.warning('%s', error)
            damaged = damaged or error
    raise damaged or BadInput('--workdir', parent.workdir, 'holds no checkpoint any more')


def restore(loop: Loop, experiment: Experiment, learner: Learner) -> TrainState | None:
    """The TrainState that a run goes on from, None at its start.

    Numbers that were amended since the checkpoint have their new values, and what does not fit them, or other settings
    of the log, begins anew.
    """

    def read(path, abstract):
        step = int(os.path.basename(path))
        amended = steering.amended_since(experiment.workdir, step, experiment.changes)
        if not amended and not _observes_otherwise(path, abstract):
            return checkpoint.read_tree(path, abstract)
        return read_fitting(path, learner, _anew(amended))

    return loop.restore(learner.state, read)


def _anew(amended):
    """Parts of a state that begin anew where these keys were amended after it was saved."""
    return {ADAPTED[key] for key in amended & ADAPTED.keys()} | ({'aux/probe'} if amended & OF_PROBE else set())


def _observes_otherwise(path, abstract):
    """Whether a checkpoint and a run differ in what config.log keeps for the metrics, and in nothing else."""
    try:
        digests = checkpoint.recorded_digests(path)
    except Exception:  # whatever makes no sense there: who reads it says so
        return False
    there = _by_part({name: kind for name, (kind, _) in digests.items()})
    ours = _by_part({name: digest.kind_of(x) for name, x in digest.leaves_by_name(abstract).items()})
    different = {part for part in ours.keys() | there.keys() if ours.get(part) != there.get(part)}
    return bool(different) and different <= OBSERVED


def read_fitting(path: str, learner: Learner, anew: set[str]) -> TrainState:
    """The TrainState of a checkpoint's folder; parts that do not fit the learner's, or are in `anew`, begin anew.

    The parameters and the step always come along: BadInput when they do not fit. Anew is as learner.initial has it.
    Of the parameters it has those that are trained.
    """
    abstract = without_frozen(learner.state)
    wanted = digest.leaves_by_name(abstract)
    there, ours = _by_part(checkpoint.kinds(path)), _by_part({n: digest.kind_of(x) for n, x in wanted.items()})
    unfit = {part for part in ours if there.get(part) != ours[part] or part in anew} - {'params', 'step'}
    gone = there.keys() - ours.keys()
    for part in sorted(part for part in unfit | gone if part not in ADAPTED.values()):
        how = 'not used any more' if part in gone else 'begins anew'
        logger.warning('%s: %s', how, PARTS.get(part, part.removeprefix('aux/')))
    leaves = {}
    if unfit:
        params = checkpoint.read_tree(path, {'params': abstract.params}, partial=True)['params']
        initial = digest.leaves_by_name(learner.initial(params))
        leaves = {name: leaf for name, leaf in initial.items() if _part(name) in unfit | {'params'}}
        del params, initial  # before the rest is read
    rest = checkpoint.read_tree(path, _only(abstract, ours.keys() - {_part(name) for name in leaves}), partial=True)
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
