"""Gradient descent on experience: minibatches (one optimizer update each) of microbatches (one gradient each)."""

import jax
import jax.numpy as jnp
import optax


def descend(
    params,
    opt_state,
    experience,
    gradient,
    optimizer,
    *,
    group_size,
    epochs,
    minibatches,
    plan=None,
    learns=True,
    offload=False,
):
    """(params, opt_state, skipped i32[], metrics f32[] by name) after epochs * minibatches optimizer updates.

    A minibatch holds whole groups. gradient(params, minibatch, its part of the plan, a packing.Plan or None) is
    (loss, gradient, metrics). Without learns, a bool[], nothing but the metrics comes of it. An update whose loss or
    gradient is not finite is skipped and counted. Metrics are means over the minibatches; those named *_max are maxima.
    With offload, opt_state lies in the host's memory between updates, and must be given there.
    """
    parts = jax.tree.map(lambda x: interleave(x, minibatches, group_size), experience), plan

    def one_update(carry, part):
        params, opt_state, skipped = carry
        minibatch, of_plan = part
        loss, grads, found = gradient(params, minibatch, of_plan)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # without tokens (all groups dropped) there is nothing to learn, and momentum must not act alone
        apply = learns & finite & jnp.any(minibatch.rollout.loss_mask)

        def step(params, opt_state):
            changes, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, changes), opt_state

        def step_from_host(params, opt_state):
            params, opt_state = step(params, jax.device_put(opt_state, jax.memory.Space.Device))
            return params, jax.device_put(opt_state, jax.memory.Space.Host)

        if offload:  # a branch, since XLA would bring opt_state before the gradient, to lie beside the activations
            params, opt_state = jax.lax.cond(apply, step_from_host, lambda *old: old, params, opt_state)
        else:
            params, opt_state = jax.tree.map(
                lambda new, old: jnp.where(apply, new, old), step(params, opt_state), (params, opt_state)
            )
        found |= {'loss': loss, 'grad_norm': norm, 'finite': finite.astype(jnp.float32)}
        return (params, opt_state, skipped + ~finite), found

    def one_epoch(carry, _):
        return jax.lax.scan(one_update, carry, parts)

    (params, opt_state, skipped), found = jax.lax.scan(one_epoch, (params, opt_state, jnp.int32(0)), length=epochs)
    found = {name: jnp.max(x) if name.endswith('_max') else jnp.mean(x) for name, x in found.items()}
    return params, opt_state, skipped, found


def accumulate(loss_of, params, minibatch, *, microbatches, together):
    """(loss, gradient, seen) of a minibatch, summed in float32 over microbatches of blocks of `together` rows.

    loss_of(params, microbatch) is (loss, rows' arrays); seen are those arrays in the minibatch's order.
    """
    cut = jax.tree.map(lambda x: interleave(x, microbatches, together), minibatch)

    def add(carry, part):
        (loss, seen), grads = jax.value_and_grad(loss_of, has_aux=True)(params, part)
        return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads)), seen

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (loss, grads), seen = jax.lax.scan(add, (jnp.float32(0), zero), cut)
    return loss, grads, jax.tree.map(lambda x: deal_back(x, together), seen)


def interleave(x, parts, block):
    """[rows, ...] -> [parts, rows / parts, ...], dealing out blocks of rows in turn.

    Dealing keeps rows on the device that holds them when rows are sharded in contiguous runs.
    """
    dealt = x.reshape(x.shape[0] // (parts * block), parts, block, *x.shape[1:]).swapaxes(0, 1)
    return dealt.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def deal_back(x, block):
    """The inverse of interleave."""
    parts, rows = x.shape[:2]
    return x.reshape(parts, rows // block, block, *x.shape[2:]).swapaxes(0, 1).reshape(parts * rows, *x.shape[2:])
