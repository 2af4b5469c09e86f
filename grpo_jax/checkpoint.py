"""Orbax checkpoints: atomic, asynchronous, with a keep policy; they hold all that a run needs to go on."""
import json
import os

import jax
import numpy as np
import orbax.checkpoint as ocp

from grpo_jax.errors import BadInput


def manager(workdir, *, keep):
    """CheckpointManager over workdir/checkpoints, keeping the newest `keep` steps; close() waits for writes."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True,
                                           cleanup_tmp_directories=True)
    return ocp.CheckpointManager(os.path.abspath(os.path.join(workdir, 'checkpoints')), options=options)


def save(checkpoints, state):
    """Starts writing a TrainState as the checkpoint of its step; returns before it is on disk."""
    checkpoints.save(int(state.step), args=ocp.args.StandardSave(state))


def restore(checkpoints, abstract):
    """The TrainState of the newest checkpoint, laid out as the abstract state's shardings; None without one.

    BadInput when the checkpoint's arrays are not those of the abstract state (another model).
    """
    step = checkpoints.latest_step()
    if step is None:
        return None
    _same_shapes(checkpoints.item_metadata(step), abstract, os.path.join(str(checkpoints.directory), str(step)))
    return checkpoints.restore(step, args=ocp.args.StandardRestore(abstract))


def restore_params(checkpoints, abstract):
    """The parameters alone of the newest checkpoint, laid out as the abstract parameters; BadInput without one."""
    step = checkpoints.latest_step()
    if step is None:
        raise BadInput('checkpoint', str(checkpoints.directory), 'holds no finished checkpoint; train first')
    saved = checkpoints.item_metadata(step)
    _same_shapes(saved.params if hasattr(saved, 'params') else saved['params'], abstract, str(checkpoints.directory))
    return checkpoints.restore(step, args=ocp.args.PyTreeRestore(
        {'params': abstract}, restore_args=ocp.checkpoint_utils.construct_restore_args({'params': abstract}),
        partial_restore=True))['params']


def _same_shapes(saved, abstract, path):
    def shapes(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {_name(path): tuple(leaf.shape) for path, leaf in leaves}

    wanted, there = shapes(abstract), shapes(saved)
    wrong = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    if wrong:
        name = wrong[0]
        raise BadInput('checkpoint', path, f'{name} has shape {there.get(name)} there and {wanted.get(name)} in this '
                       'run: another model, optimizer or algorithm; use another --workdir')


def _name(path):
    return '/'.join(str(getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key)))) for key in path)


def write_json(path, value):
    """Writes value to path as JSON, whole or not at all."""
    temporary = f'{path}.writing'
    with open(temporary, 'w', encoding='utf8') as file:
        json.dump(value, file, indent=2, sort_keys=True, default=_plain)
        file.write('\n')
    os.replace(temporary, path)


def _plain(value):
    return value.item() if isinstance(value, np.generic) else list(value)
