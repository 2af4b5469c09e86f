"""Per-token policy losses f32[B, C] of ratio f32[B, C], advantages f32[B, 1 or C], logprobs f32[B, C]."""
import jax.numpy as jnp


def clip(ratio, advantages, logprobs, *, clip_low, clip_high):
    """max(-A x, -A clip(x, 1 - clip_low, 1 + clip_high)): PPO (arXiv 1707.06347, eq. 7).

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10). The gradient is zero iff
    A > 0 and x > 1 + clip_high, or A < 0 and x < 1 - clip_low.
    """
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(-advantages * ratio, -advantages * clipped)


def dual_clip(ratio, advantages, logprobs, *, clip_low, clip_high, dual_clip):
    """clip, and for A < 0 at most -dual_clip A: a bound on far-off negative tokens (arXiv 1912.09729, eq. 5)."""
    loss = clip(ratio, advantages, logprobs, clip_low=clip_low, clip_high=clip_high)
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


def policy_gradient(ratio, advantages, logprobs):
    """-A logprob: REINFORCE; the ratio is not used."""
    return -advantages * logprobs
