"""A run has its workdir for itself."""

from collections.abc import Callable
import functools
import inspect
import os
from typing import ParamSpec, TypeVar

from grpo_jax.errors import BadInput
from grpo_jax.hosts import lock
from grpo_jax.run import checkpoint, writer
from grpo_jax.run.rows import EVENTS

P = ParamSpec('P')
R = TypeVar('R')
# what a run must be able to write, where it is there already
KEPT = ('config.json', 'programs.json', checkpoint.FOLDER, EVENTS, *writer.FILES)


def owning(run: Callable[P, R]) -> Callable[P, R]:
    """A function with the parameter workdir, which from now on runs as that folder's owner: see hosts.lock.own.

    With an argument steering that names a branch, it owns that one, and writes nothing to the workdir. BadInput also
    for files in there that cannot be written.
    """
    signature = inspect.signature(run)

    @functools.wraps(run)
    def owner(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = signature.bind(*args, **kwargs).arguments
        steering = arguments.get('steering')
        workdir = (steering and steering.branch) or arguments['workdir']  # a branch's parent is only read
        with lock.own(workdir):
            check_kept(workdir)
            return run(*args, **kwargs)

    return owner


def check_kept(workdir: str) -> None:
    """BadInput for a file that a run must keep and that is there and cannot be written."""
    for path in (os.path.join(workdir, name) for name in KEPT):
        if os.path.exists(path) and not os.access(path, os.W_OK):
            raise BadInput('--workdir', workdir, f'{path} cannot be written to; change that, or use another')
