"""Lets equal runs of one process share the learner's programs, since tracing an update takes half of a small run."""

import dataclasses
import functools
import sys
import types

import jax

from grpo_jax.sharding import compiled

MADE = {}  # {key: (Executable, the objects whose ids are in the key)}, the oldest first
MOST = 24  # programs that are kept, since each takes memory
# packages whose functions are traced, which a test may patch
TRACED = ('grpo_jax.algorithms', 'grpo_jax.learner', 'grpo_jax.models', 'grpo_jax.sharding')
make_executable = compiled.make_executable


def install():
    """Makes the package share them: two programs are one if their functions, all that these close over, and all that a
    test may have patched are equal."""
    compiled.make_executable = share


def share(name, function, arguments, mesh, out_shardings, donate=None):
    """What compiled.make_executable returns, the same for equal arguments."""
    kept = []
    settings = jax._src.config.trace_context(), jax.config.jax_compilation_cache_dir, jax.config.jax_disable_jit
    key = name, settings, world(), *(describe(x, kept) for x in (function, arguments, mesh, out_shardings, donate))
    made = MADE.pop(key, None) or (make_executable(name, function, arguments, mesh, out_shardings, donate), kept)
    MADE[key] = made
    while len(MADE) > MOST:
        del MADE[next(iter(MADE))]
    return made[0]


def world():
    """What a test may patch: the ids of all that modules of traced functions, and their registries, hold."""
    ids = []
    for name in sorted(sys.modules):
        if name.startswith(TRACED):
            for value in vars(sys.modules[name]).values():
                ids.append(id(value))
                if isinstance(value, dict):
                    ids += map(id, value.values())
    return hash(tuple(ids))


def describe(x, kept):
    """Something hashable that is equal for equal values; an object of an unknown kind equals itself alone."""
    inner = functools.partial(describe, kept=kept)
    if isinstance(x, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in x.__closure__ or ())
        return x.__module__, x.__qualname__, x.__code__, inner(x.__defaults__), inner(x.__kwdefaults__), inner(cells)
    if isinstance(x, types.MethodType):
        return inner(x.__func__), inner(x.__self__)
    if isinstance(x, functools.partial):
        return 'partial', inner(x.func), inner(x.args), inner(x.keywords)
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(inner, x))
    if isinstance(x, dict):
        return dict, tuple((inner(k), inner(v)) for k, v in x.items())
    if isinstance(x, (set, frozenset)):
        return frozenset, frozenset(map(inner, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x), tuple(inner(getattr(x, field.name)) for field in dataclasses.fields(x))
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, x.dtype, x.sharding
    if x is None or isinstance(x, (str, bytes, bool, int, float, type, jax.sharding.Mesh, jax.sharding.Sharding)):
        return type(x), x
    kept.append(x)  # so that no other object gets its id
    return id(x)
