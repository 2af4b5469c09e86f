"""Reads of rows whose gradient adds up in one order, whatever the device.

A gather's gradient is a scatter that adds. Elsewhere XLA adds in the order of the rows that were read; on GPUs it adds
as threads come, so that no run repeats another one's bits, or, where it must not, one row after another, which takes
long.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from grpo_jax.types import Array


def take(x: Float[Array, 'N ...'], index: Int[Array, ' n']) -> Float[Array, 'n ...']:
    """The rows of x with those numbers, each from 0 to N - 1, perhaps several times."""
    return _take(x, index, len(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _take(x, index, _):
    return x[index]


def _add_up(rows, index, gradient):
    """The gradient of x, of so many rows."""
    sums = jax.lax.platform_dependent(
        index, gradient, cuda=functools.partial(_in_order, rows), default=functools.partial(_scattered, rows)
    )
    return sums, None


_take.defvjp(lambda x, index, _: (x[index], index), _add_up)


def pick(x: Float[Array, 'V n'], index: Int[Array, ' n']) -> Float[Array, ' n']:
    """One number of each column, that of the row with the number of its index."""
    return _pick(x, index, len(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _pick(x, index, _):
    return _read(x, index)


def _read(x, index):
    return jnp.take_along_axis(x, index[None], 0)[0]


def _put_back(rows, index, gradient):
    """The gradient of x, of so many rows."""

    def placed(index, gradient):  # no two meet, which XLA does not see of what is below
        empty = jnp.zeros((rows, len(index)), gradient.dtype)
        return empty.at[index, jnp.arange(len(index))].set(gradient, unique_indices=True)

    def scattered(index, gradient):  # column by column: TPUs move far less than for one scatter of pairs
        x = jax.ShapeDtypeStruct((rows, len(index)), gradient.dtype)
        return jax.linear_transpose(lambda x: _read(x, index), x)(gradient)[0]

    return jax.lax.platform_dependent(index, gradient, cuda=placed, default=scattered), None


_pick.defvjp(lambda x, index, _: (_read(x, index), index), _put_back)


def _scattered(rows, index, gradient):
    return jnp.zeros((rows, *gradient.shape[1:]), gradient.dtype).at[index].add(gradient)


def _in_order(rows, index, gradient):
    """The sums of the gradient by index: over runs of the sorted ones, pairwise, in float32."""
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
