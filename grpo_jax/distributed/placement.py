"""Where the loop's programs run: here colocated, sampler and learner on one mesh.

This package is the one place that applies jit and shardings. A program is compiled once, for fixed shapes,
before the first step; a compiled program refuses any other shape by name, so nothing recompiles silently.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import algorithms, learner
from grpo_jax.distributed import multihost, rollouts, sharding
from grpo_jax.distributed.mesh import ROW_AXES
from grpo_jax.distributed.programs import Program, abstract, abstract_params, compile_
from grpo_jax.errors import BadInput
from grpo_jax.learner import critic, scores
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
    score: Program               # (TrainState, Rollout) -> dict of the fields of Experience that must be known first;
                                 # of a reward model, f32[B, C] scores
    update: Program              # (TrainState, Experience) -> (TrainState, metrics); the old state is donated
    state: Any                   # abstract TrainState with shardings, to restore onto


def make_sampler(c, mesh, shapes, sampling, tables, **options):
    """sampler.engine.Engine, (params, Prompts, key, step) -> Rollout; options are those of rollouts.make_engine.

    BadInput when the mesh does not divide the prompts, or the cache's budget holds not even one group.
    """
    _divides(mesh, 'data.prompts_per_step', shapes.prompts)
    return rollouts.make_engine(c, mesh, shapes, sampling, tables, **options)


def make_learner(c, algorithm, optimizer, mesh, shapes, *, dtype, collected=None, **learning):
    """Learner of an algorithm; learning holds the other arguments of learner.update.

    collected is a tree of ShapeDtypeStructs that joins the state's aux, as zeros: what collect keeps between steps.

    BadInput when minibatches, microbatches and mesh do not divide the batch.
    """
    cut = learning['minibatches'] * learning['microbatches']
    if shapes.prompts % learning['minibatches'] or shapes.prompts * shapes.group_size % cut:
        raise BadInput('learner.minibatches x microbatches', (learning['minibatches'], learning['microbatches']),
                       f'does not cut {shapes.prompts} prompts of {shapes.group_size} completions into equal parts '
                       'of whole groups; choose divisors')
    _divides(mesh, 'data.prompts_per_step', shapes.prompts)
    _divides(mesh, 'rows of a microbatch', shapes.prompts * shapes.group_size // cut)
    rows = sharding.rows(mesh)
    scored = algorithm.scored(learning['epochs'] * learning['minibatches'])
    columns = shapes.tokens if algorithms.by_token(algorithm) else 1
    if 'group_ids' in algorithm.reads and shapes.prompts % cut:
        raise BadInput('learner.microbatches', learning['microbatches'], f'cuts groups of {shapes.group_size} apart, '
                       'and the loss is one of whole groups; choose a divisor of the minibatch\'s prompts')

    def initial(params):
        reference = jax.tree.map(jnp.copy, params) if algorithm.keeps_reference else None
        aux = learner.new_aux(algorithm, params, learning.get('critic_optimizer'))
        aux |= jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), collected or {})
        return TrainState(jnp.int32(0), params, optimizer.init(params), reference, aux)

    def logprobs(params, rollout):
        compute = jax.tree.map(lambda p: p.astype(dtype), params)
        return learner.completion_logprobs(compute, rollout, c, temperature=learning['temperature'],
                                           chunk=learning['chunk'], remat=False)

    def score(state, rollout):
        found = {}
        if {'old_logprobs', 'old_entropy'} & scored:
            found['old_logprobs'], found['old_entropy'] = logprobs(state.params, rollout)
        if 'ref_logprobs' in scored:
            found['ref_logprobs'], _ = logprobs(state.ref_params, rollout)
        found = {name: found[name] for name in scored}
        if algorithm.needs_values:
            found['values'] = learner.values(state.aux['critic']['params'], rollout, c, remat=False, dtype=dtype)
        return found

    def update(state, experience):
        return learner.update(state, experience, c, algorithm, optimizer, dtype=dtype,
                              group_size=shapes.group_size, **learning)

    params = abstract_params(c, mesh)
    shape = jax.eval_shape(initial, params)
    layout = sharding.state(shape, optimizer, learning.get('critic_optimizer'), c, mesh)
    learned = [*scored, *(('values', 'returns') if algorithm.needs_values else ())]
    return _compiled(initial, score, update, shape, layout, abstract_experience(shapes, rows, columns, learned), mesh)


def make_reward_learner(c, optimizer, mesh, shapes, *, dtype, remat, **learning):
    """Learner of a reward model, whose initial takes a policy; learning holds the other arguments of scores.update.

    BadInput when microbatches and mesh do not divide the batch.
    """
    if shapes.prompts % learning['microbatches']:
        raise BadInput('learner.microbatches', learning['microbatches'], f'does not cut {shapes.prompts} examples '
                       'into equal parts; choose a divisor')
    _divides(mesh, 'supervised.batch / learner.microbatches', shapes.prompts // learning['microbatches'])
    rows, replicated = sharding.rows(mesh), sharding.replicated(mesh)

    def initial(policy):
        params = critic.new(policy)
        return TrainState(jnp.int32(0), params, optimizer.init(params), None, {'bad_steps': jnp.int32(0)})

    def score(state, rollout):
        return scores.of_completions(state.params, rollout, c, remat=False, dtype=dtype)

    def update(state, experience):
        return scores.update(state, experience, c, optimizer, group_size=shapes.group_size, remat=remat, dtype=dtype,
                             **learning)

    shape, of_params = jax.eval_shape(initial, abstract_params(c, mesh)), sharding.scalar_params(c, mesh)
    layout = jax.tree.map(lambda _: replicated, shape).replace(
        params=of_params, opt_state=sharding.moments(optimizer, shape.opt_state, of_params, mesh))
    return _compiled(initial, score, update, shape, layout, abstract_experience(shapes, rows, 1, ('returns',)), mesh)


def _compiled(initial, score, update, shape, layout, experience, mesh):
    """Learner of functions; shape is the abstract TrainState that initial makes, layout its shardings."""
    state = jax.tree.map(lambda x, s: abstract(x.shape, x.dtype, s), shape, layout)
    return Learner(
        initial=jax.jit(initial, out_shardings=layout),
        score=compile_(score, state, experience.rollout, out_shardings=sharding.rows(mesh)),
        update=compile_(update, state, experience, donate_argnums=0,
                        out_shardings=(layout, sharding.replicated(mesh))),
        state=state)


def put_rows(tree, mesh):
    """Host arrays with a leading row axis, laid out on the mesh; every process has all rows."""
    return multihost.put(tree, sharding.rows(mesh))


def abstract_rollout(shapes, rows):
    """ShapeDtypeStructs of a Rollout of these shapes."""
    b, q, c = shapes.prompts * shapes.group_size, shapes.queries, shapes.tokens
    return Rollout(tokens=abstract((b, q + c), jnp.int32, rows), prompt_mask=abstract((b, q), bool, rows),
                   completion_mask=abstract((b, c), bool, rows), logprobs=abstract((b, c), jnp.float32, rows),
                   truncated=abstract((b,), bool, rows), version=abstract((b, c), jnp.int32, rows),
                   forced=abstract((b, c), bool, rows))


def abstract_experience(shapes, rows, columns, known):
    """ShapeDtypeStructs of an Experience with `columns` columns of advantages and the optional fields known."""
    rollout = abstract_rollout(shapes, rows)
    floats = rollout.logprobs
    return Experience(
        rollout=rollout, advantages=abstract((floats.shape[0], columns), jnp.float32, rows),
        rewards=abstract(floats.shape[:1], jnp.float32, rows), group_ids=abstract(floats.shape[:1], jnp.int32, rows),
        **dict.fromkeys(('old_logprobs', 'ref_logprobs')) | dict.fromkeys(known, floats))


def _divides(mesh, name, count):
    devices = 1
    for axis in ROW_AXES:
        devices *= mesh.shape[axis]
    if count % devices:
        raise BadInput(name, count, f'must be a multiple of mesh.data x mesh.fsdp = {devices}; '
                       f'the next one is {count + -count % devices}')
