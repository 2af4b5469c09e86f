"""The update of the policy, and of the critic where the algorithm has one, from a step's experience."""

import jax
import jax.numpy as jnp

from grpo_jax import algorithms
from grpo_jax.learner import critic as critics
from grpo_jax.learner import descent, packing
from grpo_jax.learner.logprobs import completion_logprobs
from grpo_jax.models.collectives import ALONE


def new_aux(algorithm, params, critic_optimizer):
    """What a TrainState's aux holds at the start of a run from the policy's params."""
    coefficients = {name: jnp.float32(value) for name, value in algorithm.coefficients.items()}
    aux = {'bad_steps': jnp.int32(0), 'coefficients': coefficients, 'initial_entropy': jnp.float32(jnp.nan)}
    if algorithm.needs_values:
        critic = critics.new(params)
        aux['critic'] = {'params': critic, 'opt_state': critic_optimizer.init(critic)}
    return aux


def update(
    state,
    experience,
    c,
    algorithm,
    optimizer,
    *,
    group_size,
    epochs,
    minibatches,
    microbatches,
    temperature,
    chunk,
    remat,
    dtype,
    critic_optimizer=None,
    value_clip=0.0,
    critic_warmup=0,
    collectives=ALONE,
    sizes=None,
    plan=None,
    offload=False,
):
    """(TrainState, metrics f32[] by name) after epochs * minibatches optimizer updates (see descent.descend).

    A minibatch's weights are computed before it is cut into microbatches, so the cut changes nothing; with sizes, a
    packing.Packing, and a plan by it, microbatches are packed rows, and `microbatches` cuts the critic's alone. Skipped
    updates are counted in state.aux['bad_steps']; state.aux['coefficients'] adapt at the end, where the algorithm
    says so. For algorithms with a critic are critic_optimizer, value_clip, and critic_warmup, the steps at the start in
    which it learns alone. offload is that of descent.descend, of both optimizers.
    """
    coefficients, together = state.aux['coefficients'], group_size if 'group_ids' in algorithm.reads else 1
    cut = dict(group_size=group_size, epochs=epochs, minibatches=minibatches, offload=offload)
    head = dict(
        temperature=temperature,
        chunk=chunk,
        remat=remat,
        collectives=collectives,
        entropy_gradient=algorithm.needs_entropy_gradient,
    )

    def loss_of(compute, part):
        microbatch, prepared = part
        logprobs, entropy = completion_logprobs(compute, microbatch.rollout, c, **head)
        losses = algorithms.token_losses(algorithm, logprobs, entropy, microbatch, prepared, coefficients)
        return jnp.sum(prepared['weights'] * losses), (logprobs, entropy)

    def gradient(params, minibatch, of_plan):
        # cast once, not in each microbatch; the gradients of a cast are casts, so these sum to the parameters' own
        compute = jax.tree.map(lambda p: p.astype(dtype), params)
        prepared = algorithms.prepare(algorithm, minibatch)

        def packed_loss_of(compute, cells):
            found = packing.completion_logprobs(compute, minibatch.rollout, cells, c, sizes, **head)
            microbatch = packing.only(minibatch, found[2])
            losses = algorithms.token_losses(algorithm, *found[:2], microbatch, prepared, coefficients)
            return jnp.sum(jnp.where(found[2], prepared['weights'] * losses, 0.0)), found

        if of_plan is None:
            loss, grads, seen = descent.accumulate(
                loss_of, compute, (minibatch, prepared), microbatches=microbatches, together=together
            )
        else:
            loss, grads, seen = packing.accumulate(packed_loss_of, compute, minibatch, of_plan)
        return loss, grads, algorithms.metrics(algorithm, *seen, minibatch)

    params, opt_state, skipped, found = descent.descend(
        state.params,
        state.opt_state,
        experience,
        gradient,
        optimizer,
        plan=plan,
        learns=state.step >= critic_warmup,
        **cut,
    )
    initial = state.aux['initial_entropy']
    aux = state.aux | {
        'bad_steps': state.aux['bad_steps'] + skipped,
        'coefficients': algorithms.adapt(algorithm, coefficients, found, experience.rewards.shape[0]),
        'initial_entropy': jnp.where(jnp.isnan(initial), found['entropy'], initial),
    }
    if algorithm.needs_values:
        aux['critic'], learned = critics.update(
            aux['critic'],
            experience,
            c,
            critic_optimizer,
            value_clip=value_clip,
            microbatches=microbatches,
            remat=remat,
            dtype=dtype,
            collectives=collectives,
            **cut,
        )
        found |= {f'critic/{name}': value for name, value in learned.items()}
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state, aux=aux), found
