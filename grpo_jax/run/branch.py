"""Branches: a run that begins from another run's checkpoint, with the parts of it that fit its config."""

import contextlib
import logging
import os
import shutil

from grpo_jax import data
from grpo_jax.collect import policies
from grpo_jax.errors import BadInput
from grpo_jax.hosts import lock, processes
from grpo_jax.learner.programs import Learner, without_frozen
from grpo_jax.ranges import Kind
from grpo_jax.run import checkpoint, rows, steering
from grpo_jax.run.open import MAKING, Run, barrier, make_whole_policy, make_workdir, refuse_fewer_steps
from grpo_jax.run.settings import kind_of

logger = logging.getLogger('grpo_jax')
OF_DATA = (
    'aux/position',
    'aux/tries',
    'aux/hits',
    'aux/kept',
    'aux/history',
    'aux/probe',
)  # what means nothing on other data


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
    data_kinds = {kind_of(key) for key in changed if key.startswith('data.')}
    anew = set()
    if Kind.FIXED in data_kinds or (
        Kind.PATH in data_kinds and not steering.are_same_data(run.settings.data.origins, train, parent)
    ):
        anew |= set(OF_DATA)
    for step in checkpoint.steps(parent):
        amended = steering.amended_since(parent, step, changes)
        path = checkpoint.path_of(parent, step)
        try:
            state = checkpoint.read_fitting(
                path, without_frozen(learner.state), learner.initial, anew | checkpoint.parts_of(amended)
            )
            return state.replace(params=make_whole_policy(run, state.params, path, parent))
        except checkpoint.Damaged as error:
            logger.warning('%s', error)
            damaged = damaged or error
    raise damaged or BadInput('--workdir', parent, 'holds no checkpoint any more')
