"""Products whose gradients are ordered by hand, against autodiff's."""

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import linear


@pytest.mark.parametrize(
    'spec, x, w',
    [
        ('btd,df->btf', (2, 6, 4), (4, 16)),
        ('btf,fd->btd', (2, 6, 16), (16, 4)),
        ('btd,dnh->btnh', (2, 6, 8), (8, 2, 3)),
        ('btnh,nhd->btd', (2, 6, 2, 3), (2, 3, 5)),
    ],
)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_gradients_are_autodiffs(spec, x, w, dtype):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), dtype) for shape in (x, w))

    def loss(product, x, w):
        return jnp.sum(jnp.sin(product(spec, x, w).astype(jnp.float32)))

    expected = jax.value_and_grad(loss, (1, 2))(jnp.einsum, x, w)
    gradients = jax.jit(jax.value_and_grad(loss, (1, 2)), static_argnums=0)(linear.matmul, x, w)
    assert jax.tree.map(jnp.result_type, gradients) == jax.tree.map(jnp.result_type, expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32),
            np.asarray(b, np.float32),
            rtol=1e-5 if dtype == 'float32' else 0.05,
            atol=1e-5 if dtype == 'float32' else 0.05,
        ),
        gradients,
        expected,
    )


@pytest.mark.parametrize('platform, barriers', [('cpu', True), ('tpu', False), ('cuda', False)])
def test_only_cpus_have_the_order_prescribed(platform, barriers):
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(linear.matmul('btd,df->btf', x, w) ** 2)))
    text = export.export(gradient, platforms=[platform])(jnp.ones((4, 16)), jnp.ones((2, 6, 4))).mlir_module()
    assert ('optimization_barrier' in text) == barriers
