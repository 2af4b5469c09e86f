"""Branches: a new run starts from another run's checkpoint and keeps the parts that fit its own config."""

import contextlib
import importlib
import logging
import os
import shutil

import jax.numpy as jnp

from grpo_jax import algorithms
from grpo_jax.collect import policies
from grpo_jax.hosts import lock, processes
from grpo_jax.learner.programs import Learner, without_frozen
from grpo_jax.ranges import Kind
from grpo_jax.run import checkpoint, rows, steering
from grpo_jax.run.loop import barrier
from grpo_jax.run.open import MAKING, Run, make_whole_policy, make_workdir, refuse_fewer_steps
from grpo_jax.run.settings import kind_of
from grpo_jax.types import TrainState

logger = logging.getLogger('grpo_jax')


def make_branch(run: Run, parent: str, learner: Learner) -> None:
    """Makes the workdir of a branch, with its first checkpoint, unless it exists already or the Run is no branch.

    run: the branch, or a Run whose workdir is `parent`, for which nothing is done; parent: the workdir of the run that
    the branch starts from, in which nothing is written; learner: the branch's Learner.
    config.json is written last, so that a workdir without it holds an unfinished branch. All processes must call it.
    Raises BadInput when the parent's checkpoint does not fit the branch, Damaged when the parent has no sound one.
    """
    child = run.workdir
    if child == parent or os.path.exists(os.path.join(child, 'config.json')):
        return
    changes = steering.changes(parent, run.settings.recorded)
    changes += tuple(steering.piece_changes(parent, algorithms.describe_pieces(run.algorithm)))
    changes += steering.contents_changes(parent, run.contents.digests)
    barrier(None, run.settings.recorded, run.settings.data.origins, {}, run.contents.digests)
    temporary = os.path.join(child, MAKING)
    if processes.is_first():
        os.makedirs(temporary, exist_ok=True)
        _clear(temporary)  # a killed process may have left files there
    try:
        processes.exchange(f'the folder of the branch {child}', '')
        step = _make_contents(run, parent, changes, learner, temporary)
        processes.exchange(f'the first checkpoint of the branch {child}', '')
    except BaseException:
        if processes.is_first():
            _clear(temporary)
            # beside other files the empty folder stays: it tells that they are an unfinished branch
            if {*os.listdir(child)} <= {MAKING, lock.FILE}:
                os.rmdir(temporary)
                with contextlib.suppress(OSError):  # it holds the lock of its owner
                    os.rmdir(child)
        raise
    if processes.is_first():
        # config.json comes last: a workdir that has it holds a run
        for name in sorted(os.listdir(temporary), key=lambda name: name == 'config.json'):
            target = os.path.join(child, name)
            if os.path.isdir(target):
                shutil.rmtree(target)  # a killed process moved it there
            os.replace(os.path.join(temporary, name), target)
        os.rmdir(temporary)
    processes.exchange(f'the branch {child}', '')
    logger.warning('%s begins from step %d of %s', child, step, parent)
    for change in changes:
        logger.warning('%s', change)


def _make_contents(run, parent, changes, learner, folder):
    """Writes the first checkpoint and the other files of a new branch to a folder; returns the checkpoint's step."""
    settings, model = run.settings, run.model
    if processes.is_first() and settings.model.lora.rank and settings.model.random_init:
        checkpoint.copy_cold_start(parent, folder)  # its weights are the frozen ones
    processes.exchange(f'the frozen weights in {folder}', '')
    state = _inherit(run, parent, changes, learner)
    if any(change.key == 'reference.path' for change in changes):
        state = policies.load_reference(state, learner.abstract_state, settings.reference.path, model.config)
    step = int(state.step)
    refuse_fewer_steps(settings.steps, step)
    with contextlib.closing(checkpoint.manager(folder, keep=None)) as checkpoints:
        checkpoint.save(checkpoints, state)
    differences = {change.key: [change.old, change.new] for change in changes}
    rows.append_event(folder, step, 'branched', parent=os.path.abspath(parent), changes=differences)
    make_workdir(run, step, folder)
    return step


def _clear(folder):
    """Removes every file and folder in a folder."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry)
        else:
            os.remove(entry)


def _inherit(run, parent, changes, learner):
    """The TrainState that a branch starts from: its parent's newest sound checkpoint, where unfit parts begin anew."""
    changed = {change.key for change in changes}
    other_data = Kind.FIXED in {kind_of(key) for key in changed if key.startswith('data.')}
    reset_parts = checkpoint.DATA_PARTS if other_data or checkpoint.TRAIN_SPLIT in changed else set()

    def read(path):
        """The branch's first TrainState from one checkpoint of the parent."""
        amended = steering.keys_amended_since(parent, int(os.path.basename(path)), changes)
        state = checkpoint.read_fitting(
            path,
            without_frozen(learner.abstract_state),
            learner.initial,
            reset_parts | checkpoint.parts_to_reset(amended),
        )
        state = draw_pending_again(state, path, reset_parts)
        return state.replace(params=make_whole_policy(run, state.params, path, parent))

    return checkpoint.read_newest(parent, read)[0]


def draw_pending_again(state: TrainState, path: str, reset_parts: set[str]) -> TrainState:
    """Returns the state, moved back in the data's order to the oldest prompt that is under way in a checkpoint.

    path: the checkpoint's folder; reset_parts: if 'aux/position' is in it, the state is unchanged. The branch samples
    these prompts again, since it may sample and judge in another way, and drops kept groups that were sampled ahead.
    """
    pending = checkpoint.recorded_pending(path)
    if not pending or 'aux/position' in reset_parts:
        return state
    pending = checkpoint.read_tree(path, {'pending': pending}, partial=True)['pending']
    position = importlib.import_module('grpo_jax.collect.pending').oldest_position(pending)
    aux = state.aux | {'position': jnp.int32(position)}
    if kept := aux.get('kept'):  # groups of draws that were sampled ahead, too
        aux['kept'] = kept | {'filled': kept['filled'] * (kept['since'] < state.step)}
    return state.replace(aux=aux)
