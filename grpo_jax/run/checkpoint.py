"""Orbax checkpoints: atomic, asynchronous, with a keep policy; they hold all that a run needs to go on."""

import os

import jax
import orbax.checkpoint as ocp

from grpo_jax import activity
from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes


def manager(workdir, *, keep):
    """CheckpointManager over workdir/checkpoints, keeping the newest `keep` steps; close() waits for writes.

    All processes open it together, and its other methods too.
    """
    processes.exchange(f'the checkpoints of {workdir}', '')  # what comes first in there waits no longer than 30 s
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=True
    )
    return ocp.CheckpointManager(
        os.path.abspath(os.path.join(workdir, 'checkpoints')),
        options=options,
        item_handlers=ocp.PyTreeCheckpointHandler(),
    )


def exists(workdir) -> bool:
    """Whether a workdir holds a finished checkpoint, which is then what a run begins with."""
    folder = os.path.join(workdir, 'checkpoints')
    return os.path.isdir(folder) and any(name.isdigit() for name in os.listdir(folder))


def save(checkpoints, state):
    """Starts writing a TrainState as the checkpoint of its step; returns before it is on disk."""
    checkpoints.save(int(state.step), args=ocp.args.PyTreeSave(state))


def restore(checkpoints, abstract):
    """The TrainState of the newest checkpoint, laid out as the abstract state's shardings; None without one.

    BadInput when the checkpoint's arrays are not those of the abstract state (another model).
    """
    return None if checkpoints.latest_step() is None else _restore(checkpoints, abstract, partial=False)


def restore_params(checkpoints, abstract):
    """The parameters alone of the newest checkpoint, laid out as the abstract parameters; BadInput without one."""
    if checkpoints.latest_step() is None:
        raise BadInput('checkpoint', str(checkpoints.directory), 'holds no finished checkpoint; train first')
    return _restore(checkpoints, {'params': abstract}, partial=True)['params']


def _restore(checkpoints, abstract, *, partial):
    step = checkpoints.latest_step()
    wanted, there = _shapes(abstract), _shapes(checkpoints.item_metadata(step).tree)
    names = wanted.keys() if partial else wanted.keys() | there.keys()
    wrong = sorted(name for name in names if wanted.get(name) != there.get(name))
    if wrong:
        raise BadInput(
            'checkpoint',
            os.path.join(str(checkpoints.directory), str(step)),
            f'{wrong[0]} has shape {there.get(wrong[0])} there and {wanted.get(wrong[0])} in this run: '
            'another model, optimizer or algorithm; use another --workdir',
        )
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    with activity.during(f'reading the checkpoint of step {step}'):
        return checkpoints.restore(
            step, args=ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=partial)
        )


def _shapes(tree):
    return {_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path):
    return '/'.join(str(getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key)))) for key in path)
