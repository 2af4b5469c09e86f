"""Gradient descent on a batch: minibatches (one optimizer update each) of microbatches (one gradient each)."""

import jax
import jax.numpy as jnp
import optax

from grpo_jax.algorithms import PooledMean
from grpo_jax.learner.options import Cut
from grpo_jax.models import transformer


def descend(params, opt_state, batch, packed, gradient, optimizer, cut: Cut, learns: bool | jax.Array = True):
    """(params, opt_state, skipped i32[], metrics f32[] by name) after cut.epochs * cut.minibatches optimizer updates.

    A minibatch holds whole groups of the batch, an Experience or a LabelledBatch. gradient(params, minibatch, packed)
    is (loss, gradient, metrics), with the minibatch's part of packed, PackedRows or None. Without learns, a bool[],
    nothing but the metrics changes. An update is skipped and counted where loss, gradient, or what it would make of a
    parameter or moment is not finite. Metrics are means over the minibatches; those named *_max are maxima, and
    PooledMeans the means of all that they hold. With cut.offload, opt_state lies in the host's memory between updates,
    and must be given there.
    """
    parts = jax.tree.map(lambda x: interleave(x, cut.minibatches, cut.group_size), batch), packed

    def one_update(carry, part):
        params, opt_state, skipped = carry
        minibatch, packed = part
        loss, grads, metrics = gradient(params, minibatch, packed)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # without tokens (all groups dropped) there is nothing to learn, and momentum must not act alone
        apply = learns & finite & jnp.any(minibatch.loss_mask)

        def updated(params, opt_state):
            changes, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, changes), opt_state

        def step(params, opt_state):
            old = params, opt_state
            # computed twice, since what is computed once would lie in memory beside the old until it is judged
            sound = all_finite(updated(*jax.lax.optimization_barrier(old)))
            return jax.tree.map(lambda new, old: jnp.where(apply & sound, new, old), updated(*old), old), sound

        def step_from_host(params, opt_state):
            (params, opt_state), sound = step(params, jax.device_put(opt_state, jax.memory.Space.Device))
            return (params, jax.device_put(opt_state, jax.memory.Space.Host)), sound

        if cut.offload:  # a branch, since XLA would bring opt_state before the gradient, to lie beside the activations
            (params, opt_state), sound = jax.lax.cond(
                apply, step_from_host, lambda *old: (old, jnp.bool(True)), params, opt_state
            )
        else:
            (params, opt_state), sound = step(params, opt_state)
        finite &= sound | ~apply
        metrics |= _norms_by_part(grads) | {'loss': loss, 'grad_norm': norm, 'finite': finite.astype(jnp.float32)}
        return (params, opt_state, skipped + ~finite), metrics

    def one_epoch(carry, _):
        return jax.lax.scan(one_update, carry, parts)

    carry, metrics = jax.lax.scan(one_epoch, (params, opt_state, jnp.int32(0)), length=cut.epochs)
    for name, values in metrics.items():  # of all minibatches
        if isinstance(values, PooledMean):
            metrics[name] = values.value
        else:
            metrics[name] = jnp.max(values) if name.endswith('_max') else jnp.mean(values)
    return *carry, metrics


def _norms_by_part(grads):
    """gradient_norm/<part of the model> f32[]: of the same sums of squares as the norm of the whole."""
    squares = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        part = transformer.part_of(name.removesuffix('/a').removesuffix('/b'))  # an adapter's is its matrix's
        squares[part] = squares.get(part, 0.0) + jnp.sum(jnp.square(leaf))
    return {f'gradient_norm/{part}': jnp.sqrt(square) for part, square in squares.items()}


def all_finite(tree) -> jax.Array:
    """Whether all numbers of a tree are finite, as a bool[]."""
    return jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree), jnp.bool(True))


def accumulate(loss_of, params, minibatch, *, microbatches, together):
    """(loss, gradient, outputs) of a minibatch, summed in float32 over microbatches of blocks of `together` rows.

    loss_of(params, microbatch) is (loss, arrays of rows); outputs are those arrays in the minibatch's order.
    """
    cut = jax.tree.map(lambda x: interleave(x, microbatches, together), minibatch)

    def add(carry, part):
        (loss, outputs), grads = jax.value_and_grad(loss_of, has_aux=True)(params, part)
        return (carry[0] + loss, jax.tree.map(jnp.add, carry[1], grads)), outputs

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (loss, grads), outputs = jax.lax.scan(add, (jnp.float32(0), zero), cut)
    return loss, grads, jax.tree.map(lambda x: deal_back(x, together), outputs)


def interleave(x, parts: int, block: int):
    """[rows, ...] -> [parts, rows / parts, ...], dealing out blocks of rows in turn.

    Dealing keeps rows on the device that holds them when rows are sharded in contiguous runs.
    """
    dealt = x.reshape(x.shape[0] // (parts * block), parts, block, *x.shape[1:]).swapaxes(0, 1)
    return dealt.reshape(parts, x.shape[0] // parts, *x.shape[1:])


def deal_back(x, block: int):
    """The inverse of interleave."""
    parts, rows = x.shape[:2]
    return x.reshape(parts, rows // block, block, *x.shape[2:]).swapaxes(0, 1).reshape(parts * rows, *x.shape[2:])
