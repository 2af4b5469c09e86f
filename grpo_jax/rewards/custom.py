"""A user's own reward, FILE.py:NAME: plain functions run in worker processes, which a deadline can end."""

import functools
import importlib.util
import inspect
import os
from types import SimpleNamespace
from typing import Any

from grpo_jax import PACKAGE
from grpo_jax.errors import BadInput
from grpo_jax.workers.pool import Pool


def name_of(path: str) -> str:
    """What a part is called in metrics and options: the function of FILE.py:NAME, or the name itself."""
    return path.rpartition(':')[2]


def load_file(path: str, pool: Pool) -> SimpleNamespace:
    """The functions of path's file: reward, and extract and steps where it has them.

    Functions that are asynchronous or take all completions at once stay in this process.
    """
    file, _, name = path.rpartition(':')
    file = next((place for place in (file, os.path.join(PACKAGE, file)) if os.path.isfile(place)), None)
    if file is None:
        raise BadInput('reward.parts', path, 'no such file; give FILE.py:NAME')
    module = _import(file)
    function = getattr(module, name, None)
    if not callable(function):
        raise BadInput('reward.parts', path, f'{file} has no function {name}')
    others = {key: getattr(module, key) for key in ('extract', 'steps') if hasattr(module, key)}
    if inspect.iscoroutinefunction(function) or 'completions' in inspect.signature(function).parameters:
        return SimpleNamespace(reward=function, **others)

    @functools.wraps(function)
    def reward(completion, example, **options):
        return pool.call(run, os.path.abspath(file), name, completion, example, options)

    return SimpleNamespace(reward=reward, **others)


def run(file: str, name: str, completion: str, example: Any, options: dict) -> Any:
    """The named function's reward, in a worker."""
    return getattr(_import(file), name)(completion, example, **options)


@functools.cache
def _import(file):
    """The module of a file, once a process, as imports go."""
    spec: Any = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(file))[0], file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
