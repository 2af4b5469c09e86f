"""Gradient descent on a batch: minibatches (one optimizer update each) of microbatches (one gradient each)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from grpo_jax.algorithms import PooledMean
from grpo_jax.learner.options import Minibatching
from grpo_jax.models import transformer


def descend(params, opt_state, batch, packed, gradient, optimizer, cut: Minibatching, learns: bool | jax.Array = True):
    """(params, opt_state, skipped i32[], metrics f32[] by name) after cut.epochs * cut.minibatches optimizer updates.

    A minibatch holds whole groups of the batch, an Experience or a LabelledBatch. gradient(params, minibatch, packed)
    is (loss, gradient, metrics), with the minibatch's part of packed, PackedCells or None. Without learns, a bool[],
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


class Microbatches(NamedTuple):
    """The microbatches of a minibatch of B rows."""

    count: int | jax.Array
    part: Callable[[Any], Any]  # number of a microbatch -> what a loss reads of it
    place: Callable[[Any, Any], Any]  # (its arrays, its number) -> arrays [B, ...], with 0 for other microbatches


def cut_rows(minibatch: Any, count: int, together: int) -> Microbatches:
    """`count` Microbatches of equal parts of a minibatch's rows; each block of `together` rows stays in one."""
    dealt = jax.tree.map(lambda x: interleave(x, count, together), minibatch)

    def place(arrays, index):
        parts = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype).at[index].set(x), arrays)
        return jax.tree.map(lambda x: deal_back(x, together), parts)

    return Microbatches(count, lambda index: jax.tree.map(lambda x: x[index], dealt), place)


def accumulate(loss_of: Callable[[Any, Any], Any], params: Any, microbatches: Microbatches) -> tuple[Any, Any, Any]:
    """(loss, gradient, outputs) of a minibatch: sums over its microbatches, of gradients in float32.

    loss_of(params, what the loss reads of a microbatch) is (loss, arrays), which come together in outputs.
    """

    def gradient_of(index):
        (loss, arrays), grads = jax.value_and_grad(loss_of, has_aux=True)(params, microbatches.part(index))
        return loss, grads, microbatches.place(arrays, index)

    def outputs_of(index):
        return microbatches.place(loss_of(params, microbatches.part(index))[1], index)

    grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return sum_over(gradient_of, microbatches.count, (jnp.float32(0), grads, zeros_like(outputs_of)))


def sum_over(term: Callable[[Any], Any], count: int | jax.Array, zeros: Any) -> Any:
    """zeros + term(0) + term(1) + ..., `count` in all."""
    return jax.lax.fori_loop(0, count, lambda index, sums: jax.tree.map(jnp.add, sums, term(index)), zeros)


def zeros_like(term: Callable[[Any], Any]) -> Any:
    """Zeros of the shapes and dtypes of term(0), which is not computed."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(term, jnp.int32(0)))


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
