"""Gradient descent on a batch: minibatches (one optimizer update each) of microbatches (one gradient each)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.algorithms import PooledMean
from grpo_jax.learner.options import Minibatching
from grpo_jax.models import transformer


def descend(
    params, opt_state, batch, packed, gradient, optimizer, minibatching: Minibatching, learns: bool | jax.Array = True
):
    """Makes epochs * minibatches optimizer updates; returns (params, opt_state, skipped i32[], metrics f32[] by name).

    batch: an Experience or a LabelledBatch; a minibatch holds whole groups of it. packed: its PackedCells, or None
    where rows are padded. gradient(params, minibatch, the minibatch's packed) returns (loss, gradient, metrics).
    optimizer: an optax transformation. learns, bool[]: where false, metrics are computed and nothing changes.

    An update is skipped, and counted in `skipped`, if the loss, the gradient, or any new parameter or moment is not
    finite. A metric is the mean over all updates, skipped ones too; a metric *_max is the maximum, and a PooledMean
    pools all values.
    With minibatching.offload, opt_state lies in the host's memory between updates, and must lie there from the start.
    """
    minibatches = jax.tree.map(lambda x: interleave(x, minibatching.minibatches, minibatching.group_size), batch)

    def one_update(carry, minibatch_and_cells):
        """Carry and metrics after one optimizer update, for jax.lax.scan."""
        params, opt_state, skipped = carry
        minibatch, packed = minibatch_and_cells
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
            # computed twice: the new values, computed once, would lie in memory beside the old until they are judged
            sound = all_finite(updated(*jax.lax.optimization_barrier(old)))
            return jax.tree.map(lambda new, old: jnp.where(apply & sound, new, old), updated(*old), old), sound

        def step_from_host(params, opt_state):
            (params, opt_state), sound = step(params, jax.device_put(opt_state, jax.memory.Space.Device))
            return (params, jax.device_put(opt_state, jax.memory.Space.Host)), sound

        # a branch, since XLA would bring opt_state before the gradient, to lie beside the activations
        if minibatching.offload:
            (params, opt_state), sound = jax.lax.cond(
                apply, step_from_host, lambda *old: (old, jnp.bool(True)), params, opt_state
            )
        else:
            (params, opt_state), sound = step(params, opt_state)
        finite &= sound | ~apply
        metrics |= _norms_by_part(grads) | {'loss': loss, 'grad_norm': norm, 'finite': finite.astype(jnp.float32)}
        return (params, opt_state, skipped + ~finite), metrics

    def one_epoch(carry, _):
        return jax.lax.scan(one_update, carry, (minibatches, packed))

    carry, metrics = jax.lax.scan(one_epoch, (params, opt_state, jnp.int32(0)), length=minibatching.epochs)
    for name, values in metrics.items():  # f32[epochs, minibatches]
        if isinstance(values, PooledMean):
            metrics[name] = values.value
        else:
            metrics[name] = jnp.max(values) if name.endswith('_max') else jnp.mean(values)
    return *carry, metrics


def _norms_by_part(grads):
    """{gradient_norm/<part of the model>: f32[]}; the squares of these norms add up to the squared norm of `grads`."""
    squares = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        part = transformer.part_of(name.removesuffix('/a').removesuffix('/b'))  # an adapter is counted with its matrix
        squares[part] = squares.get(part, 0.0) + jnp.sum(jnp.square(leaf))
    return {f'gradient_norm/{part}': jnp.sqrt(square) for part, square in squares.items()}


def all_finite(tree) -> jax.Array:
    """Whether all numbers of a tree are finite, as a bool[]."""
    return jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree), jnp.bool(True))


class Microbatches(NamedTuple):
    """A minibatch of B rows, cut into `count` microbatches."""

    count: int | jax.Array
    get: Callable[[Any], Any]  # (index) -> the microbatch, as loss_of of `accumulate` reads it
    place: Callable[[Any, Any], Any]  # (arrays of a microbatch, its index) -> arrays [B, ...], 0 in all other rows


def cut_rows(minibatch: Any, count: int, together: int) -> Microbatches:
    """Cuts a minibatch's rows into `count` Microbatches of equal size; each block of `together` rows stays in one."""
    microbatches = jax.tree.map(lambda x: interleave(x, count, together), minibatch)

    def place(arrays, index):
        stacked = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype).at[index].set(x), arrays)
        return jax.tree.map(lambda x: undo_interleave(x, together), stacked)

    return Microbatches(count, lambda index: jax.tree.map(lambda x: x[index], microbatches), place)


def accumulate(
    loss_of: Callable[[Any, Any], Any], params: Any, microbatches: Microbatches, zeros: Any = ()
) -> tuple[Any, Any, Any]:
    """(loss f32[], gradient, outputs) of a minibatch; loss and gradient are sums over its microbatches, in float32.

    loss_of(params, microbatch) returns (loss, arrays); outputs are these arrays for all rows of the minibatch.
    zeros has the outputs' shapes and dtypes.
    """

    def gradient_of(index):
        (loss, arrays), grads = jax.value_and_grad(loss_of, has_aux=True)(params, microbatches.get(index))
        return loss, grads, microbatches.place(arrays, index)

    grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return sum_over(gradient_of, microbatches.count, (jnp.float32(0), grads, zeros))


def sum_over(term: Callable[[Any], Any], count: int | jax.Array, zeros: Any) -> Any:
    """zeros + term(0) + ... + term(count - 1), where each term is a tree of arrays."""
    return jax.lax.fori_loop(0, count, lambda index, sums: jax.tree.map(jnp.add, sums, term(index)), zeros)


def zeros_like(term: Callable[[Any], Any]) -> Any:
    """Zeros of the shapes and dtypes of term(0), which is not computed."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(term, jnp.int32(0)))


def interleave(x, count: int, block: int):
    """Deals x [rows, ...] into [count, rows / count, ...]: blocks of `block` rows are dealt out in turn, like cards.

    Dealing keeps rows on the device that holds them when rows are sharded in contiguous runs.
    """
    dealt = x.reshape(x.shape[0] // (count * block), count, block, *x.shape[1:]).swapaxes(0, 1)
    return dealt.reshape(count, x.shape[0] // count, *x.shape[1:])


def undo_interleave(x, block: int):
    """The inverse of interleave: returns x [count, rows, ...] as [count * rows, ...], in the order from before."""
    count, rows = x.shape[:2]
    return x.reshape(count, rows // block, block, *x.shape[2:]).swapaxes(0, 1).reshape(count * rows, *x.shape[2:])
