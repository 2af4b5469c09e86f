"""The batches of skipped updates, in workdir/bad: written so that `grpo-jax replay_bad` can look into them."""

import dataclasses
import os
from typing import Any
import zipfile

import jax
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.hosts.files import atomic_write
from grpo_jax.run import events
from grpo_jax.types import Experience, Rollout

FOLDER = 'bad'  # in the workdir


def path_of(workdir: str, step: int) -> str:
    """The file of a step's batch."""
    return os.path.join(workdir, FOLDER, f'{step:06d}.npz')


def dump(workdir: str, step: int, experience: Experience) -> None:
    """Writes the batch of a step of which an update was skipped; all processes must call it."""
    path, leaves = path_of(workdir, step), jax.tree_util.tree_leaves_with_path(processes.fetch(experience))
    if processes.is_first():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with atomic_write(path, 'wb') as file:
            np.savez(file, **{jax.tree_util.keystr(name, simple=True, separator='.'): x for name, x in leaves})
    events.append(workdir, step, 'skipped', batch=os.path.relpath(path, workdir))


def load_batch(workdir: str, step: int) -> Experience:
    """The host arrays of a step's batch; BadInput for one that is not there or cannot be read."""
    path = path_of(workdir, step)
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
