"""Reads rows or numbers of an array by index; on every device, the gradient is summed in one fixed order.

A gather's gradient is a scatter that adds. On CPUs and TPUs, XLA adds in the order in which the rows were read. On GPUs
it adds in any order, so that two runs differ in their bits; with deterministic operations it adds one row after
another, which is slow.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from grpo_jax.types import Array


def take(x: Float[Array, 'N ...'], index: Int[Array, ' n']) -> Float[Array, 'n ...']:
    """x[index]: rows of x by number, 0 to N - 1; a row may be read several times."""
    return _take(x, index, len(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _take(x, index, _):
    return x[index]


def _take_backward(rows, index, gradient):
    """(gradient of x [rows, ...], None for index) in _take, from the gradient of its output."""
    sums = jax.lax.platform_dependent(
        index, gradient, cuda=functools.partial(_sum_in_order, rows), default=functools.partial(_sum_by_scatter, rows)
    )
    return sums, None


_take.defvjp(lambda x, index, _: (x[index], index), _take_backward)


def pick(x: Float[Array, 'V n'], index: Int[Array, ' n']) -> Float[Array, ' n']:
    """One number per column: x[index[i], i] for column i."""
    return _pick(x, index, len(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pick(x, index, _):
    return _take_by_column(x, index)


def _take_by_column(x, index):
    """x[index[i], i] for each column i."""
    return jnp.take_along_axis(x, index[None], 0)[0]


def _pick_backward(rows, index, gradient):
    """(gradient of x [rows, n], None for index) in _pick, from the gradient of its output."""

    def placed(index, gradient):  # `unique_indices` tells XLA that it need not add
        empty = jnp.zeros((rows, len(index)), gradient.dtype)
        return empty.at[index, jnp.arange(len(index))].set(gradient, unique_indices=True)

    def scattered(index, gradient):  # column by column: TPUs move far less than for one scatter of pairs
        x = jax.ShapeDtypeStruct((rows, len(index)), gradient.dtype)
        return jax.linear_transpose(lambda x: _take_by_column(x, index), x)(gradient)[0]

    return jax.lax.platform_dependent(index, gradient, cuda=placed, default=scattered), None


_pick.defvjp(lambda x, index, _: (_take_by_column(x, index), index), _pick_backward)


def _sum_by_scatter(rows, index, gradient):
    """The sums [rows, ...] of the gradient's rows [n, ...] by index, in the order in which the device scatters."""
    return jnp.zeros((rows, *gradient.shape[1:]), gradient.dtype).at[index].add(gradient)


# jitted, so that a program for another platform, which has no use for these many operations, traces them once
@functools.partial(jax.jit, static_argnums=0)
def _sum_in_order(rows, index, gradient):
    """The sums [rows, ...] of the gradient's rows [n, ...] by index, added pairwise in float32 after a sort."""
    order = jnp.argsort(index, stable=True)
    index = index[order]
    begins = jnp.concatenate([jnp.ones(1, bool), index[1:] != index[:-1]])

    def join(left, right):
        (begun, total), (begins, more) = left, right
        fresh = begins.reshape(-1, *[1] * (more.ndim - 1))
        return begun | begins, jnp.where(fresh, more, total + more)

    _, sums = jax.lax.associative_scan(join, (begins, gradient[order].astype(jnp.float32)))
    ends = jnp.concatenate([begins[1:], jnp.ones(1, bool)])
    places = jnp.where(ends, index, rows + jnp.arange(len(index)))  # beyond the rows: dropped
    empty = jnp.zeros((rows, *gradient.shape[1:]), gradient.dtype)
    return empty.at[places].set(sums.astype(gradient.dtype), mode='drop', unique_indices=True)
