"""Products of activations with matrices, whose gradients are made in an order that CPUs are fast at.

oneDNN copies the second factor of a product into blocks, and XLA turns the first one so that its rows are summed over:
of a gradient of [D, F], which sums over tokens, both factors as they are. Here it is the narrower one that is turned.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(spec, x, w):
    """jnp.einsum(spec, x, w), like 'btd,df->btf': w has what is summed first, then what the output ends with."""
    return jnp.einsum(spec, x, w)


def _forward(spec, x, w):
    return jnp.einsum(spec, x, w), (x, w)


def _backward(spec, kept, dy):
    x, w = kept
    (of_x, of_w), of_y = spec.split('->')[0].split(','), spec.split('->')[1]
    dw = jax.lax.platform_dependent(
        x,
        dy,
        cpu=functools.partial(_narrow_first, of_x, of_w, of_y),
        default=functools.partial(jnp.einsum, f'{of_x},{of_y}->{of_w}'),
    )
    return jnp.einsum(f'{of_y},{of_w}->{of_x}', dy, w), dw


def _narrow_first(of_x, of_w, of_y, x, dy):
    """The matrix's gradient, of which only the narrower factor is transposed; XLA by itself transposes both."""
    summed, free = (''.join(axis for axis in of_w if axis in of) for of in (of_x, of_y))
    tokens = ''.join(axis for axis in of_x if axis not in of_w)
    factors = (of_x, x, summed), (of_y, dy, free)
    (of_narrow, narrow, rows), (of_wide, wide, columns) = sorted(factors, key=lambda factor: factor[1].size)
    turned = jax.lax.optimization_barrier(jnp.einsum(f'{of_narrow}->{rows}{tokens}', narrow))
    product = jnp.einsum(f'{rows}{tokens},{of_wide}->{rows}{columns}', turned, wide)
    return jnp.einsum(f'{rows}{columns}->{of_w}', jax.lax.optimization_barrier(product))


einsum.defvjp(_forward, _backward)
