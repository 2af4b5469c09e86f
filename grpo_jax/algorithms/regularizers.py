"""Per-token terms f32[B, C] added to the loss; entropy f32[B, C] is that of the sampled distribution."""
import jax.numpy as jnp


def none(logprobs, entropy):
    """0."""
    return jnp.zeros_like(logprobs)


def entropy_bonus(logprobs, entropy, *, entropy_coef):
    """-entropy_coef * entropy: pays for keeping the distribution wide (arXiv 1602.01783, section 4)."""
    return -entropy_coef * entropy
