"""Lets equal runs of one process share their programs, as tracing and lowering take half of a small run."""

import dataclasses
import functools
import sys
import types

import jax

from grpo_jax.sampler import programs
from grpo_jax.sharding import compiled

MADE = {}  # {key: (Executable, the objects whose ids are in the key)} of learners, the oldest first
MOST = 24  # programs that are kept, since each takes memory
SAMPLERS, MOST_OF_SAMPLERS = {}, 128  # {key: Executable} of samplers, which have some ten small ones each
# packages whose functions are traced, which a test may patch
TRACED = ('grpo_jax.algorithms', 'grpo_jax.learner', 'grpo_jax.models', 'grpo_jax.sampler', 'grpo_jax.sharding')
make_executable, make_of_sampler = compiled.make_executable, programs.SamplerPrograms._make


def install():
    """Makes the package share them: two programs are one if their functions, all that these close over, and all that a
    test may have patched are equal."""
    compiled.make_executable = share
    programs.SamplerPrograms._make = share_of_sampler


def forget():
    """Makes the next runs make all programs anew."""
    MADE.clear()
    SAMPLERS.clear()


def share_of_sampler(sampler, program):
    """What SamplerPrograms._make returns, the same for the same program of equal samplers."""
    key = program, sampler._spec_of(program), settings(), world()
    return keep(SAMPLERS, MOST_OF_SAMPLERS, key, lambda: make_of_sampler(sampler, program))


def share(name, function, arguments, mesh, out_shardings, donate=None):
    """What compiled.make_executable returns, the same for equal arguments."""
    kept = []
    key = name, settings(), world(), *(describe(x, kept) for x in (function, arguments, mesh, out_shardings, donate))
    made = keep(
        MADE, MOST, key, lambda: (make_executable(name, function, arguments, mesh, out_shardings, donate), kept)
    )
    return made[0]


def keep(made, most, key, make):
    """The value of a key in `made`, or make(), which is then kept there beside the last ones that were asked for."""
    value = made.pop(key, None) or make()
    made[key] = value
    while len(made) > most:
        del made[next(iter(made))]
    return value


def settings():
    """What of jax's settings is in a program or in how it is compiled."""
    return jax._src.config.trace_context(), jax.config.jax_compilation_cache_dir, jax.config.jax_disable_jit


def world():
    """What a test may patch: the ids of all that modules of traced functions, and their registries, hold."""
    ids = []
    for module in traced_modules(len(sys.modules)):
        for name, value in vars(module).items():
            ids.append(id(value))
            if isinstance(value, dict) and name != '__builtins__':  # which libraries add to
                ids += map(id, value.values())
    return hash(tuple(ids))


@functools.lru_cache(1)
def traced_modules(count):
    """The modules of traced functions; count: of all modules that are loaded."""
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(TRACED)]


def describe(x, kept, around=()):
    """Something hashable that is equal for equal values; an object of an unknown kind equals itself alone.

    kept: a list that unknown objects are added to; around: ids of what x is in, since a function may close over itself.
    """
    if id(x) in around:
        return 'around', around.index(id(x))
    inner = functools.partial(describe, kept=kept, around=(*around, id(x)))
    if isinstance(x, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in x.__closure__ or ())
        return x.__module__, x.__qualname__, x.__code__, inner(x.__defaults__), inner(x.__kwdefaults__), inner(cells)
    if isinstance(x, types.MethodType):
        return inner(x.__func__), inner(x.__self__)
    if isinstance(x, functools.partial):
        return 'partial', inner(x.func), inner(x.args), inner(x.keywords)
    if isinstance(x, jax.custom_vjp):
        return 'custom_vjp', inner(x.fun), inner(x.fwd), inner(x.bwd), inner(x.nondiff_argnums)
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
