"""Where the loop's programs run: here colocated, sampler and learner on one mesh.

This package is the one place that applies jit and shardings. A program is compiled once, for fixed shapes,
before the first step; a compiled program refuses any other shape by name, so nothing recompiles silently.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import learner
from grpo_jax.distributed import rollouts, sharding
from grpo_jax.distributed.mesh import ROW_AXES
from grpo_jax.distributed.programs import Program, abstract, abstract_params, compile_
from grpo_jax.errors import BadInput
from grpo_jax.types import Experience, Rollout, TrainState


class Shapes(NamedTuple):
    """The sizes that programs are compiled for."""

    prompts: int      # P
    group_size: int   # G
    queries: int      # Q
    tokens: int       # C


class Learner(NamedTuple):
    """The learner's programs."""

    initial: Callable            # (params) -> TrainState on the mesh
    score: Program               # (TrainState, Rollout) -> (old, reference) f32[B, C] logprobs, None where not needed
    update: Program              # (TrainState, Experience) -> (TrainState, metrics); the old state is donated
    state: Any                   # abstract TrainState with shardings, to restore onto


def make_sampler(c, mesh, shapes, sampling, tables, **options):
    """sampler.engine.Engine, (params, Prompts, key, step) -> Rollout; options are those of rollouts.make_engine.

    BadInput when the mesh does not divide the prompts, or the cache's budget holds not even one group.
    """
    _divides(mesh, 'data.prompts_per_step', shapes.prompts)
    return rollouts.make_engine(c, mesh, shapes, sampling, tables, **options)


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
    shape = jax.eval_shape(initial, params)
    layout = sharding.state(shape, optimizer, c, mesh)
    state = jax.tree.map(lambda x, s: abstract(x.shape, x.dtype, s), shape, layout)
    rollout = _rollout(shapes, rows)
    floats = rollout.logprobs
    experience = Experience(
        rollout=rollout, advantages=abstract((floats.shape[0], 1), jnp.float32, rows),
        rewards=abstract(floats.shape[:1], jnp.float32, rows), old_logprobs=floats if off_policy else None,
        ref_logprobs=floats if algorithm.kl_coef else None, group_ids=abstract(floats.shape[:1], jnp.int32, rows))
    return Learner(
        initial=jax.jit(initial, out_shardings=layout),
        score=compile_(score, state, rollout, out_shardings=rows),
        update=compile_(update, state, experience, donate_argnums=0, out_shardings=(layout, replicated)),
        state=state)


def put_rows(tree, mesh):
    """Host arrays with a leading row axis, laid out on the mesh."""
    return jax.device_put(tree, sharding.rows(mesh))


def _rollout(shapes, rows):
    b, q, c = shapes.prompts * shapes.group_size, shapes.queries, shapes.tokens
    return Rollout(tokens=abstract((b, q + c), jnp.int32, rows), prompt_mask=abstract((b, q), bool, rows),
                   completion_mask=abstract((b, c), bool, rows), logprobs=abstract((b, c), jnp.float32, rows),
                   truncated=abstract((b,), bool, rows), version=abstract((b, c), jnp.int32, rows),
                   forced=abstract((b, c), bool, rows))


def _divides(mesh, name, count):
    devices = 1
    for axis in ROW_AXES:
        devices *= mesh.shape[axis]
    if count % devices:
        raise BadInput(name, count, f'must be a multiple of mesh.data x mesh.fsdp = {devices}; '
                       f'the next one is {count + -count % devices}')
