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
import optax

from grpo_jax import algorithms, learner
from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.learner import critic, packing, partition, reward_model
from grpo_jax.models import heads, transformer
from grpo_jax.sharding import batches, specs
from grpo_jax.sharding.compiled import Executable, abstract, abstract_params, make_executable, options_on
from grpo_jax.sharding.mesh import BATCH_AXES
from grpo_jax.types import TrainState

BLOCK = {'cpu': 64, 'gpu': 128, 'tpu': 256}  # columns of packed rows that attention takes at once


class Learner(NamedTuple):
    """The learner's programs."""

    initial: Callable  # (params) -> TrainState on the mesh
    logprobs: Executable  # (TrainState, Rollout) -> dict of the fields of Experience that must be known first;
    # of a reward model, f32[B, C] scores
    update: Executable  # (TrainState, Experience) -> (TrainState, metrics); the old state is donated
    state: Any  # abstract TrainState with shardings, to restore onto


def make_learner(
    c,
    algorithm,
    optimizer,
    mesh,
    shapes,
    *,
    dtype,
    collected=None,
    pack_columns=0,
    pack_rows=1,
    offload=(),
    ahead=True,
    **learning,
):
    """Learner of an algorithm; learning holds the other arguments of learner.update.

    collected is a tree of ShapeDtypeStructs that joins the state's aux, as zeros: what collect keeps between steps.
    With pack_columns, microbatches are pack_rows packed rows of that length on each device. ahead=False compiles
    programs when they are first called. offload names what waits in the hosts' memory: optimizer, reference.

    BadInput when minibatches, microbatches and mesh do not divide the batch, or packed rows are too short.
    """
    cut = learning['minibatches'] * learning['microbatches']
    if shapes.prompts % learning['minibatches'] or shapes.prompts * shapes.group_size % cut:
        raise BadInput(
            'learner.minibatches x microbatches',
            (learning['minibatches'], learning['microbatches']),
            f'does not cut {shapes.prompts} prompts of {shapes.group_size} completions into equal parts '
            'of whole groups; choose divisors',
        )
    batches.check_divides(mesh, 'data.prompts_per_step', shapes.prompts)
    batches.check_divides(mesh, 'rows of a microbatch', shapes.prompts * shapes.group_size // cut, BATCH_AXES)
    batches.check_columns(mesh, shapes)
    sizes = pack_columns and _packing(mesh, shapes, pack_columns, pack_rows, 'group_ids' in algorithm.reads)
    rows, collectives = specs.over_rows(mesh), partition.make_collectives(c, mesh)
    needed = algorithm.needed_logprobs(learning['epochs'] * learning['minibatches'])
    columns = shapes.tokens if algorithms.by_token(algorithm) else 1
    if 'group_ids' in algorithm.reads and shapes.prompts % cut:
        raise BadInput(
            'learner.microbatches',
            learning['microbatches'],
            f'cuts groups of {shapes.group_size} apart, '
            "and the loss is one of whole groups; choose a divisor of the minibatch's prompts",
        )

    def initial(params):
        reference = jax.tree.map(jnp.copy, params) if algorithm.keeps_reference else None
        aux = learner.new_aux(algorithm, params, learning.get('critic_optimizer'))
        aux |= jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), collected or {})
        return TrainState(jnp.int32(0), params, optimizer.init(params), reference, aux)

    def logprobs(params, rollout, plan):
        compute = jax.tree.map(lambda p: p.astype(dtype), params)
        head = dict(temperature=learning['temperature'], chunk=learning['chunk'], remat='none', collectives=collectives)
        if plan is None:
            return learner.completion_logprobs(compute, rollout, c, **head)
        return packing.rollout_logprobs(compute, rollout, plan, c, sizes, **head)

    def score(state, rollout, plan=None):
        found = {}
        if {'old_logprobs', 'old_entropy'} & needed:
            found['old_logprobs'], found['old_entropy'] = logprobs(state.params, rollout, plan)
        if 'ref_logprobs' in needed:
            reference = state.ref_params
            if 'reference' in offload:
                reference = jax.device_put(reference, jax.memory.Space.Device)
            found['ref_logprobs'], _ = logprobs(reference, rollout, plan)
        found = {name: found[name] for name in needed}
        if algorithm.needs_values:
            found['values'] = learner.values(
                state.aux['critic']['params'], rollout, c, remat='none', dtype=dtype, collectives=collectives
            )
        return found

    def update(state, experience, plan=None):
        return learner.update(
            state,
            experience,
            c,
            algorithm,
            optimizer,
            dtype=dtype,
            group_size=shapes.group_size,
            collectives=collectives,
            sizes=sizes,
            plan=plan,
            offload='optimizer' in offload,
            **learning,
        )

    shape = jax.eval_shape(initial, abstract_params(transformer.param_table(c), mesh))
    lies = state_shardings(shape, optimizer, learning.get('critic_optimizer'), c, mesh, offload)
    learned = [*needed, *(('values', 'returns') if algorithm.needs_values else ())]
    plan = functools.partial(_plan, sizes=sizes, mesh=mesh, minibatches=learning['minibatches']) if sizes else None
    return _compiled(
        initial,
        score,
        update,
        shape,
        lies,
        batches.abstract_experience(shapes, rows, columns, learned),
        mesh,
        ahead,
        score_plan=plan if needed else None,
        update_plan=plan,
    )


def make_reward_learner(c, optimizer, mesh, shapes, *, dtype, remat, offload=(), **learning):
    """Learner of a reward model, whose initial takes a policy, or a reward model that is to learn on.

    learning holds the other arguments of reward_model.update; offload is that of make_learner. BadInput when microbatches and
    mesh do not divide the batch.
    """
    if shapes.prompts % learning['microbatches']:
        raise BadInput(
            'learner.microbatches',
            learning['microbatches'],
            f'does not cut {shapes.prompts} examples into equal parts; choose a divisor',
        )
    batches.check_divides(mesh, 'supervised.batch / learner.microbatches', shapes.prompts // learning['microbatches'])
    batches.check_columns(mesh, shapes)
    rows, replicated, collectives = specs.over_rows(mesh), specs.replicated(mesh), partition.make_collectives(c, mesh)
    waits = 'optimizer' in offload

    def initial(params):
        params = params if 'value_head' in params else critic.new(params)
        return TrainState(jnp.int32(0), params, optimizer.init(params), None, {'bad_steps': jnp.int32(0)})

    def score(state, rollout):
        return reward_model.of_completions(state.params, rollout, c, remat='none', dtype=dtype, collectives=collectives)

    def update(state, experience):
        return reward_model.update(
            state,
            experience,
            c,
            optimizer,
            group_size=shapes.group_size,
            remat=remat,
            dtype=dtype,
            collectives=collectives,
            offload=waits,
            **learning,
        )

    shape, of_params = (
        jax.eval_shape(initial, abstract_params(transformer.param_table(c), mesh)),
        specs.params(heads.param_table(c), mesh),
    )
    lies = jax.tree.map(lambda _: replicated, shape).replace(
        params=of_params, opt_state=moments(optimizer, shape.opt_state, of_params, mesh, waits)
    )
    return _compiled(
        initial, score, update, shape, lies, batches.abstract_experience(shapes, rows, 1, ('returns',)), mesh
    )


def state_shardings(abstract, optimizer, critic_optimizer, c, mesh, offload=()):
    """Shardings of an abstract TrainState: moments, reference and critic lie like the parameters.

    What offload names, of 'optimizer' (and the critic's) and 'reference', lies in the hosts' memory.
    """
    of_params, everywhere, waits = (
        specs.params(transformer.param_table(c), mesh),
        specs.replicated(mesh),
        'optimizer' in offload,
    )
    aux = jax.tree.map(lambda _: everywhere, abstract.aux)
    if 'critic' in aux:
        of_critic, of_moments = specs.params(heads.param_table(c), mesh), abstract.aux['critic']['opt_state']
        aux['critic'] = {
            'params': of_critic,
            'opt_state': moments(critic_optimizer, of_moments, of_critic, mesh, waits),
        }
    reference = specs.in_host(of_params) if 'reference' in offload else of_params
    return abstract.replace(
        step=everywhere,
        params=of_params,
        aux=aux,
        ref_params=None if abstract.ref_params is None else reference,
        opt_state=moments(optimizer, abstract.opt_state, of_params, mesh, waits),
    )


def moments(optimizer, opt_state, of_params, mesh, waits=False):
    """Shardings of an optimizer's abstract state: what it keeps of each parameter lies like the parameter.

    If it waits, all of it does so in the hosts' memory.
    """
    found = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        opt_state,
        of_params,
        transform_non_params=lambda _: specs.replicated(mesh),
    )
    return specs.in_host(found) if waits else found


def _compiled(initial, score, update, shape, lies, experience, mesh, ahead=True, score_plan=None, update_plan=None):
    """Learner of functions; shape is the abstract TrainState that initial makes, lies its shardings.

    A plan(state, batch) makes the packing.Plan that the program takes too.
    """
    state = jax.tree.map(lambda x, s: abstract(x.shape, x.dtype, s), shape, lies)
    options = dict(ahead=ahead, compiler_options=options_on(mesh))
    return Learner(
        initial=jax.jit(initial, out_shardings=lies),
        logprobs=make_executable(
            score, state, experience.rollout, extra=score_plan, out_shardings=specs.over_rows(mesh), **options
        ),
        update=make_executable(
            update,
            state,
            experience,
            extra=update_plan,
            donate_argnums=0,
            out_shardings=(lies, specs.replicated(mesh)),
            **options,
        ),
        state=state,
    )


def _packing(mesh, shapes, columns, rows, whole_groups):
    """packing.Packing of these sizes; BadInput where they cannot work."""
    parts = mesh.shape['context']
    block = math.gcd(columns // parts, BLOCK[mesh.devices.flat[0].platform])
    found = packing.Packing(
        rows * batches.devices_along(mesh, BATCH_AXES),
        columns,
        block,
        shapes.group_size,
        shapes.queries,
        shapes.tokens,
        whole_groups,
    )
    packing.check(found)
    if columns % (8 * parts):
        raise BadInput(
            'learner.pack_columns',
            columns,
            f'must be a multiple of 8 x mesh.context = {8 * parts}; the next one is {columns + -columns % (8 * parts)}',
        )
    return found


def _plan(_, batch, *, sizes, mesh, minibatches):
    """packing.Plan on the mesh of a Rollout or an Experience; abstract of an abstract one."""
    rollout = getattr(batch, 'rollout', batch)
    lies = packing.Plan(NamedSharding(mesh, PartitionSpec(None, None, BATCH_AXES, 'context')), specs.replicated(mesh))
    if isinstance(rollout.prompt_mask, jax.ShapeDtypeStruct):
        most = sizes.microbatches(rollout.prompt_mask.shape[0] // sizes.group_size // minibatches)
        return packing.Plan(
            abstract((minibatches, most, sizes.rows, sizes.columns), jnp.int32, lies.cells),
            abstract((minibatches,), jnp.int32, lies.count),
        )
    found = packing.plan(*processes.fetch((rollout.prompt_mask, rollout.completion_mask)), sizes, minibatches)
    return jax.tree.map(processes.put, found, lies)
