"""Where the loop's programs run: here colocated, sampler and learner on one mesh.

The one place that applies jit and shardings. A program is compiled once, for fixed shapes, before the
first step; a compiled program refuses any other shape by name, so nothing recompiles silently. Under
`jax.disable_jit()` the functions are returned as they are, to be stepped through.
"""
from collections.abc import Callable
import hashlib
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import checkpoint, learner, sampler
from grpo_jax.distributed import sharding
from grpo_jax.distributed.mesh import ROW_AXES
from grpo_jax.errors import BadInput
from grpo_jax.models import transformer
from grpo_jax.types import Experience, Prompts, Rollout, TrainState


class Shapes(NamedTuple):
    """The sizes that programs are compiled for."""

    prompts: int      # P
    group_size: int   # G
    queries: int      # Q
    tokens: int       # C


class Program:
    """A compiled function to call, and the hash of its lowered text, which tells two runs' programs apart."""

    def __init__(self, function, digest):
        self.hash = digest
        self._function = function

    def __call__(self, *arguments):
        return self._function(*arguments)


class Learner(NamedTuple):
    """The learner's programs."""

    initial: Callable            # (params) -> TrainState on the mesh
    score: Program               # (TrainState, Rollout) -> (old, reference) f32[B, C] logprobs, None where not needed
    update: Program              # (TrainState, Experience) -> (TrainState, metrics); the old state is donated
    state: Any                   # abstract TrainState with shardings, to restore onto


def make_sampler(c, mesh, shapes, *, dtype, **sampling):
    """Program (params, Prompts, key, step) -> Rollout; sampling holds the other arguments of sampler.generate."""
    _divides(mesh, 'data.prompts_per_step', shapes.prompts)
    rows, replicated = sharding.rows(mesh), sharding.replicated(mesh)

    def sample(params, prompts, key, step):
        weights = jax.tree.map(lambda p: p.astype(dtype), params)
        weights = jax.lax.with_sharding_constraint(weights, sharding.sampler_params(c, mesh))
        keys = sampler.row_keys(key, step, prompts.ids, shapes.group_size)
        return sampler.generate(weights, prompts, keys, step, c, group_size=shapes.group_size,
                                max_tokens=shapes.tokens, **sampling)

    return _compile(sample, abstract_params(c, mesh), _prompts(shapes, rows),
                    jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=replicated),
                    jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated), out_shardings=rows)


def make_learner(c, algorithm, optimizer, mesh, shapes, *, dtype, **learning):
    """Learner of an algorithm; learning holds the other arguments of learner.update.

    BadInput when minibatches, microbatches and mesh do not divide the batch.
    """
    cut = learning['minibatches'] * learning['microbatches']
    if shapes.prompts % learning['minibatches'] or shapes.prompts * shapes.group_size % cut:
        raise BadInput('learner.minibatches x microbatches', (learning['minibatches'], learning['microbatches']),
                       f'does not cut {shapes.prompts} prompts of {shapes.group_size} completions into equal parts '
                       'of whole groups; choose divisors')
    _divides(mesh, 'data.prompts_per_step', shapes.prompts)
    _divides(mesh, 'rows of a microbatch', shapes.prompts * shapes.group_size // cut)
    rows, replicated = sharding.rows(mesh), sharding.replicated(mesh)
    off_policy = learning['epochs'] * learning['minibatches'] > 1

    def initial(params):
        reference = jax.tree.map(jnp.copy, params) if algorithm.kl_coef else None
        return TrainState(jnp.int32(0), params, optimizer.init(params), reference, {'bad_steps': jnp.int32(0)})

    def logprobs(params, rollout):
        compute = jax.tree.map(lambda p: p.astype(dtype), params)
        return learner.completion_logprobs(compute, rollout, c, temperature=learning['temperature'],
                                           chunk=learning['chunk'], remat=False)[0]

    def score(state, rollout):
        return (logprobs(state.params, rollout) if off_policy else None,
                logprobs(state.ref_params, rollout) if algorithm.kl_coef else None)

    def update(state, experience):
        return learner.update(state, experience, c, algorithm, optimizer, dtype=dtype,
                              group_size=shapes.group_size, **learning)

    params = abstract_params(c, mesh)
    abstract = jax.eval_shape(initial, params)
    layout = sharding.state(abstract, optimizer, c, mesh)
    state = jax.tree.map(lambda x, s: _abstract(x.shape, x.dtype, s), abstract, layout)
    rollout = _rollout(shapes, rows)
    floats = rollout.logprobs
    experience = Experience(
        rollout=rollout, advantages=_abstract((floats.shape[0], 1), jnp.float32, rows),
        rewards=_abstract(floats.shape[:1], jnp.float32, rows), old_logprobs=floats if off_policy else None,
        ref_logprobs=floats if algorithm.kl_coef else None, group_ids=rollout.version)
    return Learner(
        initial=jax.jit(initial, out_shardings=layout),
        score=_compile(score, state, rollout, out_shardings=rows),
        update=_compile(update, state, experience, donate_argnums=0, out_shardings=(layout, replicated)),
        state=state)


def put_rows(tree, mesh):
    """Host arrays with a leading row axis, laid out on the mesh."""
    return jax.device_put(tree, sharding.rows(mesh))


def write_hashes(workdir, **programs):
    """Writes the programs' hashes to programs.json: what two runs computed differently shows there."""
    checkpoint.write_json(os.path.join(workdir, 'programs.json'), {n: p.hash for n, p in programs.items()})


def abstract_params(c, mesh):
    """ShapeDtypeStruct of each float32 parameter with its training sharding."""
    return jax.tree.map(lambda param, s: _abstract(param.shape, jnp.float32, s),
                        transformer.param_table(c), sharding.params(c, mesh),
                        is_leaf=lambda node: isinstance(node, transformer.Param))


def _compile(function, *arguments, **options):
    jitted = jax.jit(function, **options)
    if jax.config.jax_disable_jit:
        return Program(function, '')
    lowered = jitted.lower(*arguments)
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]
    return Program(lowered.compile(), digest)


def _prompts(shapes, rows):
    p, q = shapes.prompts, shapes.queries
    return Prompts(_abstract((p, q), jnp.int32, rows), _abstract((p, q), bool, rows), _abstract((p,), jnp.int32, rows))


def _rollout(shapes, rows):
    b, q, c = shapes.prompts * shapes.group_size, shapes.queries, shapes.tokens
    return Rollout(tokens=_abstract((b, q + c), jnp.int32, rows), prompt_mask=_abstract((b, q), bool, rows),
                   completion_mask=_abstract((b, c), bool, rows), logprobs=_abstract((b, c), jnp.float32, rows),
                   truncated=_abstract((b,), bool, rows), version=_abstract((b,), jnp.int32, rows))


def _abstract(shape, dtype, sharding_):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_)


def _divides(mesh, name, count):
    devices = 1
    for axis in ROW_AXES:
        devices *= mesh.shape[axis]
    if count % devices:
        raise BadInput(name, count, f'must be a multiple of mesh.data x mesh.fsdp = {devices}; '
                       f'the next one is {count + -count % devices}')
