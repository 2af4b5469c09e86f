"""KL estimators on a three-way categorical, where every expectation can be written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.algorithms import kl, losses

P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])


def expected_gradient(estimator):
    """Gradient in the logits of the expected loss, with samples drawn from P and not differentiated."""

    def loss(logits):
        return jnp.sum(P * estimator(jax.nn.log_softmax(logits), jnp.log(Q)))

    return jax.grad(loss)(jnp.log(P))


@pytest.mark.parametrize('estimator, expected', [(kl.k1, 0.025267), (kl.k2, 0.024862), (kl.k3, 0.025267)])
def test_expected_value(estimator, expected):
    # KL(p || q) = .5 ln(.5/.4) + .3 ln(.3/.4) = .111572 - .086305 = .025267; k2 is biased
    np.testing.assert_allclose(jnp.sum(P * estimator(jnp.log(P), jnp.log(Q))), expected, atol=1e-6)


def test_k1_as_a_loss_pulls_nowhere():
    # E[grad log p] = 0: the reason why make refuses it
    np.testing.assert_allclose(expected_gradient(kl.k1), [0, 0, 0], atol=1e-7)


def test_k2_as_a_loss_has_the_gradient_of_the_reverse_kl():
    true = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jnp.log(Q))))(jnp.log(P))
    np.testing.assert_allclose(true, [0.0989, -0.0939, -0.0051], atol=5e-5)
    np.testing.assert_allclose(expected_gradient(kl.k2), true, atol=1e-7)


def test_k3_as_a_loss_has_the_gradient_of_the_forward_kl():
    # grad KL(q || p) = p - q
    np.testing.assert_allclose(expected_gradient(kl.k3), P - Q, atol=1e-7)


def test_none_is_zero_without_a_gradient():
    assert jax.value_and_grad(lambda x: jnp.sum(kl.none(x)))(jnp.log(0.3)) == (0, 0)


@pytest.mark.parametrize('difference', [-50.0, -20.5, -1.0, -1e-3, 0.0, 1e-3, 1.0, 3.0, 50.0, 1e30])
def test_k3_is_never_negative_and_at_most_its_clamp(difference):
    assert 0 <= kl.k3(jnp.float32(0), jnp.float32(difference)) <= kl.MAX_K3


@pytest.mark.parametrize('estimator', [kl.k1, kl.k2, kl.k3])
@pytest.mark.parametrize('difference', [-1e30, -50.0, 50.0, 1e30])
def test_gradient_is_finite_however_far_the_reference(estimator, difference):
    value, gradient = jax.value_and_grad(estimator)(jnp.float32(0), jnp.float32(difference))
    assert np.isfinite(value) and np.isfinite(gradient)


@pytest.mark.parametrize('difference', [-25.0, -19.0, -1.0, 0.5, 2.5, 3.0, 25.0])
def test_clamped_says_where_k3_lost_its_gradient(difference):
    # e^2.5 - 3.5 = 8.7 is inside, e^3 - 4 = 16.1 is beyond the clamp of 10
    gradient = jax.grad(kl.k3)(jnp.float32(0), jnp.float32(difference))
    assert bool(losses.is_kl_clamped(jnp.float32(0), jnp.float32(difference), kl.MAX_K3)) == (gradient == 0)
