"""Per-token estimators f32[B, C] of KL(policy || reference) from logprobs and ref_logprobs f32[B, C].

With d = ref - logprobs (clamped to +-20): k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1
(http://joschu.net/blog/kl-approx.html). As a loss on sampled tokens they differ: in expectation, the gradient of k1
is zero, k2 has the gradient of the reverse KL, and k3 has the gradient of the forward KL.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from grpo_jax.algorithms import pieces, reductions
from grpo_jax.types import Array

MAX_K3 = 10.0  # above this, one token would outweigh the batch; the clamp also stops its gradient


def none(logprobs: Float[Array, '...']) -> Float[Array, '...']:
    """0 for every token; no reference is needed."""
    return jnp.zeros_like(logprobs)


def k1(logprobs: Float[Array, '...'], ref_logprobs: Float[Array, '...']) -> Float[Array, '...']:
    """logprobs - ref: unbiased and signed; the only one allowed in the reward, and not allowed in the loss."""
    return -_difference(logprobs, ref_logprobs)


def absolute(logprobs: Float[Array, '...'], ref_logprobs: Float[Array, '...']) -> Float[Array, '...']:
    """|logprobs - ref|, with derivative 0 where the two are equal."""
    return reductions.absolute(_difference(logprobs, ref_logprobs))


def k2(logprobs: Float[Array, '...'], ref_logprobs: Float[Array, '...']) -> Float[Array, '...']:
    """(ref - logprobs)^2 / 2: slightly biased in value; as a loss, it has exactly the gradient of the reverse KL."""
    return 0.5 * jnp.square(_difference(logprobs, ref_logprobs))


@pieces.properties(clamped_at=MAX_K3)
def k3(logprobs: Float[Array, '...'], ref_logprobs: Float[Array, '...']) -> Float[Array, '...']:
    """With d = ref - logprobs, e^d - d - 1 >= 0: GRPO's term (arXiv 2402.03300, eq. 4), clamped to 10."""
    d = _difference(logprobs, ref_logprobs)
    return jnp.minimum(jnp.expm1(d) - d, MAX_K3)


@pieces.properties(clamped_at=MAX_K3)
def k3_importance(
    logprobs: Float[Array, '...'], ref_logprobs: Float[Array, '...'], token_ratio: Float[Array, '...']
) -> Float[Array, '...']:
    """token_ratio * k3, both differentiated: exact reverse-KL gradient, DeepSeek-V3.2 (arXiv 2512.02556, eq. 7)."""
    return token_ratio * k3(logprobs, ref_logprobs)


@pieces.properties(clamped_at=MAX_K3)
def k3_straight_through(logprobs: Float[Array, '...'], ref_logprobs: Float[Array, '...']) -> Float[Array, '...']:
    """The value of k3 with the gradient of k2."""
    pull = k2(logprobs, ref_logprobs)
    return pull + jax.lax.stop_gradient(k3(logprobs, ref_logprobs) - pull)


def _difference(logprobs, ref_logprobs):
    """ref_logprobs - logprobs, clamped to +-20."""
    return reductions.clamp(ref_logprobs - logprobs)
