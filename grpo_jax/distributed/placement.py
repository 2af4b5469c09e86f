"""Where the loop's programs run: here colocated, sampler and learner on one mesh.

This package is the one place that applies jit and shardings. A program is compiled once, for fixed shapes,
before the first step; a compiled program refuses any other shape by name, so nothing recompiles silently.
"""
from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from grpo_jax import algorithms, learner
from grpo_jax.distributed import multihost, partition, rollouts, sharding
from grpo_jax.distributed.mesh import BATCH_AXES, ROW_AXES
from grpo_jax.distributed.programs import Program, abstract, abstract_params, compile_, options_on
from grpo_jax.errors import BadInput
from grpo_jax.learner import critic, packing, scores
from grpo_jax.types import Experience, Rollout, TrainState

BLOCK = {'cpu': 64, 'gpu': 128, 'tpu': 256}  # columns of packed rows that attention takes at once


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


def make_learner(c, algorithm, optimizer, mesh, shapes, *, dtype, collected=None, pack_columns=0, pack_rows=1,
                 offload=(), ahead=True, **learning):
    """Learner of an algorithm; learning holds the other arguments of learner.update.

    collected is a tree of ShapeDtypeStructs that joins the state's aux, as zeros: what collect keeps between steps.
    With pack_columns, microbatches are pack_rows packed rows of that length on each device. ahead=False compiles
    programs when they are first called. offload names what waits in the hosts' memory: optimizer, reference.

    BadInput when minibatches, microbatches and mesh do not divide the batch, or packed rows are too short.
    """
    cut = learning['minibatches'] * learning['microbatches']
    if shapes.prompts % learning['minibatches'] or shapes.prompts * shapes.group_size % cut:
        raise BadInput('learner.minibatches x microbatches', (learning['minibatches'], learning['microbatches']),
                       f'does not cut {shapes.prompts} prompts of {shapes.group_size} completions into equal parts '
                       'of whole groups; choose divisors')
    _divides(mesh, 'data.prompts_per_step', shapes.prompts)
    _divides(mesh, 'rows of a microbatch', shapes.prompts * shapes.group_size // cut, BATCH_AXES)
    _divides_columns(mesh, shapes)
    sizes = pack_columns and _packing(mesh, shapes, pack_columns, pack_rows, 'group_ids' in algorithm.reads)
    rows, layout = sharding.rows(mesh), partition.layout(c, mesh)
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

    def logprobs(params, rollout, plan):
        compute = jax.tree.map(lambda p: p.astype(dtype), params)
        head = dict(temperature=learning['temperature'], chunk=learning['chunk'], remat='none', layout=layout)
        if plan is None:
            return learner.completion_logprobs(compute, rollout, c, **head)
        return packing.score(compute, rollout, plan, c, sizes, **head)

    def score(state, rollout, plan=None):
        found = {}
        if {'old_logprobs', 'old_entropy'} & scored:
            found['old_logprobs'], found['old_entropy'] = logprobs(state.params, rollout, plan)
        if 'ref_logprobs' in scored:
            reference = state.ref_params
            if 'reference' in offload:
                reference = jax.device_put(reference, jax.memory.Space.Device)
            found['ref_logprobs'], _ = logprobs(reference, rollout, plan)
        found = {name: found[name] for name in scored}
        if algorithm.needs_values:
            found['values'] = learner.values(state.aux['critic']['params'], rollout, c, remat='none', dtype=dtype,
                                             layout=layout)
        return found

    def update(state, experience, plan=None):
        return learner.update(state, experience, c, algorithm, optimizer, dtype=dtype, group_size=shapes.group_size,
                              layout=layout, sizes=sizes, plan=plan, offload='optimizer' in offload, **learning)

    shape = jax.eval_shape(initial, abstract_params(c, mesh))
    lies = sharding.state(shape, optimizer, learning.get('critic_optimizer'), c, mesh, offload)
    learned = [*scored, *(('values', 'returns') if algorithm.needs_values else ())]
    plan = functools.partial(_plan, sizes=sizes, mesh=mesh, minibatches=learning['minibatches']) if sizes else None
    return _compiled(initial, score, update, shape, lies, abstract_experience(shapes, rows, columns, learned), mesh,
                     ahead, score_plan=plan if scored else None, update_plan=plan)


def make_reward_learner(c, optimizer, mesh, shapes, *, dtype, remat, offload=(), **learning):
    """Learner of a reward model, whose initial takes a policy, or a reward model that is to learn on.

    learning holds the other arguments of scores.update; offload is that of make_learner. BadInput when microbatches and
    mesh do not divide the batch.
    """
    if shapes.prompts % learning['microbatches']:
        raise BadInput('learner.microbatches', learning['microbatches'], f'does not cut {shapes.prompts} examples '
                       'into equal parts; choose a divisor')
    _divides(mesh, 'supervised.batch / learner.microbatches', shapes.prompts // learning['microbatches'])
    _divides_columns(mesh, shapes)
    rows, replicated, layout = sharding.rows(mesh), sharding.replicated(mesh), partition.layout(c, mesh)
    waits = 'optimizer' in offload

    def initial(params):
        params = params if 'value_head' in params else critic.new(params)
        return TrainState(jnp.int32(0), params, optimizer.init(params), None, {'bad_steps': jnp.int32(0)})

    def score(state, rollout):
        return scores.of_completions(state.params, rollout, c, remat='none', dtype=dtype, layout=layout)

    def update(state, experience):
        return scores.update(state, experience, c, optimizer, group_size=shapes.group_size, remat=remat, dtype=dtype,
                             layout=layout, offload=waits, **learning)

    shape, of_params = jax.eval_shape(initial, abstract_params(c, mesh)), sharding.scalar_params(c, mesh)
    lies = jax.tree.map(lambda _: replicated, shape).replace(
        params=of_params, opt_state=sharding.moments(optimizer, shape.opt_state, of_params, mesh, waits))
    return _compiled(initial, score, update, shape, lies, abstract_experience(shapes, rows, 1, ('returns',)), mesh)


def _compiled(initial, score, update, shape, lies, experience, mesh, ahead=True, score_plan=None, update_plan=None):
    """Learner of functions; shape is the abstract TrainState that initial makes, lies its shardings.

    A plan(state, batch) makes the packing.Plan that the program takes too.
    """
    state = jax.tree.map(lambda x, s: abstract(x.shape, x.dtype, s), shape, lies)
    options = dict(ahead=ahead, compiler_options=options_on(mesh))
    return Learner(
        initial=jax.jit(initial, out_shardings=lies),
        score=compile_(score, state, experience.rollout, extra=score_plan, out_shardings=sharding.rows(mesh),
                       **options),
        update=compile_(update, state, experience, extra=update_plan, donate_argnums=0,
                        out_shardings=(lies, sharding.replicated(mesh)), **options),
        state=state)


def _packing(mesh, shapes, columns, rows, whole_groups):
    """packing.Packing of these sizes; BadInput where they cannot work."""
    parts = mesh.shape['context']
    block = math.gcd(columns // parts, BLOCK[mesh.devices.flat[0].platform])
    found = packing.Packing(rows * _devices(mesh, BATCH_AXES), columns, block, shapes.group_size, shapes.queries,
                            shapes.tokens, whole_groups)
    packing.check(found)
    if columns % (8 * parts):
        raise BadInput('learner.pack_columns', columns, f'must be a multiple of 8 x mesh.context = {8 * parts}; the '
                       f'next one is {columns + -columns % (8 * parts)}')
    return found


def _plan(_, batch, *, sizes, mesh, minibatches):
    """packing.Plan on the mesh of a Rollout or an Experience; abstract of an abstract one."""
    rollout = getattr(batch, 'rollout', batch)
    lies = packing.Plan(NamedSharding(mesh, PartitionSpec(None, None, BATCH_AXES, 'context')),
                        sharding.replicated(mesh))
    if isinstance(rollout.prompt_mask, jax.ShapeDtypeStruct):
        most = sizes.microbatches(rollout.prompt_mask.shape[0] // sizes.group_size // minibatches)
        return packing.Plan(abstract((minibatches, most, sizes.rows, sizes.columns), jnp.int32, lies.cells),
                            abstract((minibatches,), jnp.int32, lies.count))
    found = packing.plan(*multihost.fetch((rollout.prompt_mask, rollout.completion_mask)), sizes, minibatches)
    return jax.tree.map(multihost.put, found, lies)


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


def _divides(mesh, name, count, axes=ROW_AXES):
    devices = _devices(mesh, axes)
    if count % devices:
        raise BadInput(name, count, f'must be a multiple of {" x ".join(f"mesh.{axis}" for axis in axes)} = {devices}; '
                       f'the next one is {count + -count % devices}')


def _divides_columns(mesh, shapes):
    columns, parts = shapes.queries + shapes.tokens, mesh.shape['context']
    if columns % parts:
        raise BadInput('data.max_prompt_tokens + rollout.max_tokens', columns, f'must be a multiple of mesh.context = '
                       f'{parts}; the next one is {columns + -columns % parts}')


def _devices(mesh, axes):
    return math.prod(mesh.shape[axis] for axis in axes)
