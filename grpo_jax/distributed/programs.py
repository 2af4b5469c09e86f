"""Compiled programs: each is compiled once, for fixed shapes, and refuses others by name."""
import hashlib
import os

import jax
import jax.numpy as jnp

from grpo_jax import checkpoint
from grpo_jax.distributed import sharding
from grpo_jax.models import transformer


class Program:
    """A compiled function to call, and the hash of its lowered text, which tells two runs' programs apart."""

    def __init__(self, function, digest):
        self.hash = digest
        self._function = function

    def __call__(self, *arguments):
        return self._function(*arguments)

    @property
    def memory(self):
        """The compiler's memory_analysis(), in bytes of one device."""
        return self._function.memory_analysis()


def compile_(function, *arguments, **options):
    """Program of function for arguments like these (arrays or ShapeDtypeStructs); options are jit's.

    Under `jax.disable_jit()` the function is returned as it is, to be stepped through.
    """
    if jax.config.jax_disable_jit:
        return Program(function, '')
    return compile_traced(jax.jit(function, **options).trace(*arguments))


def compile_traced(traced):
    """Program of a traced function."""
    lowered = traced.lower()
    return Program(lowered.compile(), hashed(lowered.as_text()))


def hashed(text):
    """16 hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_hashes(workdir, **programs):
    """Writes the programs' hashes to programs.json: what two runs computed differently shows there."""
    checkpoint.write_json(os.path.join(workdir, 'programs.json'), {n: p.hash for n, p in programs.items()})


def abstract(shape, dtype, sharding_):
    """ShapeDtypeStruct with a sharding."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_)


def abstract_params(c, mesh):
    """ShapeDtypeStruct of each parameter with its training sharding."""
    return jax.tree.map(lambda param, s: abstract(param.shape, jnp.float32, s),
                        transformer.param_table(c), sharding.params(c, mesh),
                        is_leaf=lambda node: isinstance(node, transformer.Param))
