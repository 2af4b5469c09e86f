"""A run that begins from another run's checkpoint, and what of a checkpoint a changed config goes on with."""

from collections.abc import Callable
import contextlib
import logging
import os
import shutil
from typing import Any

import jax

from grpo_jax import data
from grpo_jax.collect import policies
from grpo_jax.errors import BadInput
from grpo_jax.hosts import lock, processes
from grpo_jax.learner.programs import Learner
from grpo_jax.learner.state import without_frozen
from grpo_jax.run import checkpoint, digest, rows, steering
from grpo_jax.run.open import MAKING, Run, barrier, make_whole_policy, make_workdir
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


def make_branch(run: Run, parent: str, learner: Learner, train: data.Dataset) -> None:
    """Makes the workdir of a Run that begins as a branch of the run in the workdir `parent`, where that is to be done.

    Its first checkpoint is the state that it begins from; config.json comes last. Nothing is written in parent.
    """
    child = run.workdir
    if child == parent or os.path.exists(os.path.join(child, 'config.json')):
        return
    changes = steering.changes(parent, run.settings.recorded)
    barrier(None, run.settings.recorded, run.settings.data.origins, {}, ())
    temporary = os.path.join(child, MAKING)
    if processes.is_first():
        os.makedirs(temporary, exist_ok=True)
        _clear(temporary)  # of what a process that was killed has left
    try:
        processes.exchange(f'the folder of the branch {child}', '')
        step = _make_contents(run, parent, changes, learner, train, temporary)
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
        # config.json, with which the run is begun, comes last
        for name in sorted(os.listdir(temporary), key=lambda name: name == 'config.json'):
            target = os.path.join(child, name)
            if os.path.isdir(target):
                shutil.rmtree(target)  # moved there by a process that was killed
            os.replace(os.path.join(temporary, name), target)
        os.rmdir(temporary)
    processes.exchange(f'the branch {child}', '')
    logger.warning('%s begins from step %d of %s', child, step, parent)
    for change in changes:
        logger.warning('%s', change)


def _make_contents(run, parent, changes, learner, train, folder):
    """Writes to a folder what the workdir of a branch has at its start; returns the step."""
    settings, model = run.settings, run.model
    if processes.is_first() and settings.model.lora.rank and settings.model.random_init:
        checkpoint.copy_cold_start(parent, folder)  # which has what stays frozen
    processes.exchange(f'what stays frozen in {folder}', '')
    state = _inherit(run, parent, changes, learner, train)
    if any(change.key == 'reference.path' for change in changes):
        state = policies.anchor(state, learner.state, settings.reference.path, model.config)
    step = int(state.step)
    refuse_fewer_steps(settings.steps, step)
    with contextlib.closing(checkpoint.manager(folder, keep=None)) as checkpoints:
        checkpoint.save(checkpoints, state)
    differences = {change.key: [change.old, change.new] for change in changes}
    rows.append_event(folder, step, 'branched', parent=os.path.abspath(parent), changes=differences)
    make_workdir(run, train, step, folder)
    return step


def refuse_fewer_steps(steps: int, done: int) -> None:
    """BadInput for a run that is to have fewer steps than it has: its last evaluation would be of another step."""
    if done > steps:
        raise BadInput('steps', steps, f'the run has {done} already; use that many or more')


def _clear(folder):
    """Removes all that is in a folder."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        else:
            os.remove(entry)


def _inherit(run, parent, changes, learner, train):
    """The TrainState of the parent's newest sound checkpoint, as far as it fits the learner."""
    changed, damaged = {change.key for change in changes}, None
    anew = set()
    if any(key.startswith('data.') and steering.kind_of(key) == steering.FIXED for key in changed) or (
        changed & set(steering.KINDS[steering.PATH]) - {'model.path'}
        and not steering.are_same_data(run.settings.data.origins, train, parent)
    ):
        anew |= set(OF_DATA)
    for step in checkpoint.steps(parent):
        amended = steering.amended_since(parent, step, changes)
        path = checkpoint.path_of(parent, step)
        try:
            state = read_fitting(path, without_frozen(learner.state), learner.initial, anew | _anew(amended))
            return state.replace(params=make_whole_policy(run, state.params, path, parent))
        except checkpoint.Damaged as error:
            logger.warning('%s', error)
            damaged = damaged or error
    raise damaged or BadInput('--workdir', parent, 'holds no checkpoint any more')


def make_reader(run: Run, learner: Learner) -> checkpoint.Read:
    """Reads a checkpoint of a Run that goes on with other settings than it was saved with.

    Numbers that were amended since have their new values, and what does not fit them, or other settings of the log,
    begins anew.
    """
    changes = steering.changes(run.workdir, run.settings.recorded)

    def read(path, abstract):
        amended = steering.amended_since(run.workdir, int(os.path.basename(path)), changes)
        if not amended and not _observes_otherwise(path, abstract):
            return checkpoint.read_tree(path, abstract)
        return read_fitting(path, abstract, learner.initial, _anew(amended))

    return read


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


def read_fitting(
    path: str, abstract: TrainState, initial_state: Callable[[Any], TrainState], anew: set[str]
) -> TrainState:
    """The TrainState of a checkpoint's folder; parts that do not fit the abstract one, or are in `anew`, begin anew.

    The parameters and the step always come along: BadInput when they do not fit. Anew is as initial_state(trained
    parameters) has it.
    """
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
        initial = digest.leaves_by_name(initial_state(params))
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
