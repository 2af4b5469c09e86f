"""Per-token policy losses f32[B, C].

What a surrogate may read: advantages f32[B, 1 or C]; mask bool[B, C]; group_ids i32[B]; correct, rewards f32[B]; and
f32[B, C]: ratio, log_ratio, token_ratio, logprobs, base_logprobs (which the ratio divides by), ref_logprobs,
sampler_logprobs, entropy, log_rho, drift, teacher_kl. checks.READABLE lists the names, losses.make_inputs says what
they are. In formulas A is the advantage, x the ratio.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from grpo_jax.algorithms import pieces, reductions
from grpo_jax.ranges import NotNegative, Positive, Range
from grpo_jax.types import Array

Power = Annotated[float, Range(least=0, most=1e3)]


@pieces.properties(bounded=True)
def clip(
    ratio: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    *,
    clip_low: NotNegative = 0.2,  # a token with A < 0 has no gradient once its ratio is below 1 - clip_low
    clip_high: NotNegative = 0.2,  # a token with A > 0 has no gradient once its ratio is above 1 + clip_high
) -> Float[Array, 'B C']:
    """max(-A x, -A clip(x, 1 - clip_low, 1 + clip_high)): PPO (arXiv 1707.06347, eq. 7).

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10). The gradient is zero iff
    A > 0 and x > 1 + clip_high, or A < 0 and x < 1 - clip_low.
    """
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(-advantages * ratio, -advantages * clipped)


@pieces.properties(bounded=True)
def dual_clip(
    ratio: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    *,
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    # largest loss of a token with A < 0, in units of -A
    dual_clip: Annotated[float, Range(least=1)] = 3.0,
) -> Float[Array, 'B C']:
    """clip, but at most -dual_clip A for A < 0, which bounds the loss where x is large (arXiv 1912.09729, eq. 5)."""
    loss = clip(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)


def policy_gradient(advantages: pieces.Advantages, logprobs: Float[Array, 'B C']) -> Float[Array, 'B C']:
    """-A logprob: REINFORCE; with A = 1 cross entropy. The ratio is not used."""
    return -advantages * logprobs


def importance(ratio: Float[Array, 'B C'], advantages: pieces.Advantages) -> Float[Array, 'B C']:
    """-A x, without a trust region: for ratios that are clipped already, or tokens that a selection masks."""
    return -advantages * ratio


@pieces.properties(bounded=True)
def cispo(
    ratio: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    logprobs: Float[Array, 'B C'],
    *,
    cispo_cap: Annotated[float, Range(least=1)] = 5.0,  # largest weight, absolute: 1 + verl's epsilon
) -> Float[Array, 'B C']:
    """-min(x, cispo_cap) A logprob, where only logprob is differentiated: CISPO (arXiv 2506.13585, eq. 4)."""
    return -jax.lax.stop_gradient(jnp.minimum(ratio, cispo_cap)) * advantages * logprobs


@pieces.properties(bounded=True)
def sapo(
    ratio: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    *,
    sapo_positive: Annotated[float, Range(least=1e-3, most=1e3)] = 1.0,  # temperature of A > 0
    sapo_negative: Annotated[float, Range(least=1e-3, most=1e3)] = 1.05,  # temperature of A <= 0
) -> Float[Array, 'B C']:
    """-(4 / tau) sigmoid(tau (x - 1)) A, tau = sapo_positive for A > 0, else sapo_negative: SAPO (arXiv 2511.20347)."""
    tau = jnp.where(advantages > 0, sapo_positive, sapo_negative)
    return -(4 / tau) * jax.nn.sigmoid(tau * (ratio - 1)) * advantages


@pieces.properties(bounded=True)
def dppo_tv(
    ratio: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    logprobs: Float[Array, 'B C'],
    base_logprobs: Float[Array, 'B C'],
    *,
    dppo_low: Positive = 0.2,  # how far a token's probability may fall; beyond, a token with A < 0 has no gradient
    dppo_high: Positive = 0.2,  # how far a token's probability may rise; beyond, a token with A > 0 has no gradient
) -> Float[Array, 'B C']:
    """-A x, or 0 where the token's probability has moved too far the way A pushes: DPPO (arXiv 2602.04879), TV form.

    Too far: p - base_p is above dppo_high for A > 0, or below -dppo_low for A < 0.
    """
    moved = jnp.exp(logprobs) - jnp.exp(base_logprobs)
    far = jnp.where(advantages > 0, moved > dppo_high, moved < -dppo_low)
    return jnp.where(far, 0.0, -advantages * ratio)


@pieces.properties(bounded=True)
def dppo_kl(
    ratio: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    logprobs: Float[Array, 'B C'],
    base_logprobs: Float[Array, 'B C'],
    *,
    dppo_low: Positive = 0.2,
    dppo_high: Positive = 0.2,
) -> Float[Array, 'B C']:
    """dppo_tv with the distance KL(base || now) over two outcomes: this token, or any other (arXiv 2602.04879)."""
    now, base = (jnp.clip(jnp.exp(jax.lax.stop_gradient(x)), 1e-6, 1 - 1e-6) for x in (logprobs, base_logprobs))
    distance = base * jnp.log(base / now) + (1 - base) * jnp.log((1 - base) / (1 - now))
    far = jnp.where(advantages > 0, (distance > dppo_high) & (now > base), (distance > dppo_low) & (now < base))
    return jnp.where(far, 0.0, -advantages * ratio)


@pieces.properties(bounded=True)
def vespo(
    log_ratio: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    logprobs: Float[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    *,
    vespo_powers: tuple[Power, Power] = (2.0, 3.0),  # k of the weight W^k e^(lambda (1 - W)): of A > 0, of A <= 0
    vespo_rates: tuple[Power, Power] = (3.0, 2.0),  # lambda of that weight: of A > 0, of A <= 0
) -> Float[Array, 'B C']:
    """-W^k e^(lambda (1 - W)) A logprob, where only logprob is differentiated: VESPO (arXiv 2602.10693).

    W is the product of the row's token ratios.
    """
    power, rate = (jnp.where(advantages > 0, *pair) for pair in (vespo_powers, vespo_rates))
    log_product = reductions.clamp(reductions.row_sum(log_ratio, mask))
    weight = jnp.exp(power * log_product + rate * (1 - jnp.exp(log_product)))
    return -jax.lax.stop_gradient(weight) * advantages * logprobs


@pieces.properties(margin=reductions.pair_margins)
def dpo(
    logprobs: Float[Array, 'B C'],
    ref_logprobs: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    mask: Bool[Array, 'B C'],
    group_ids: Int[Array, ' B'],
    *,
    dpo_beta: Annotated[float, Range(above=0, most=1e3)] = 0.1,  # larger holds the policy nearer to the reference
    dpo_length_norm: bool = False,  # logprobs of a pair are means over tokens, not sums
) -> Float[Array, 'B C']:
    """-log sigmoid(beta (chosen - rejected)) on the pair's tokens: DPO (arXiv 2305.18290, eq. 7).

    chosen and rejected are the summed logprobs minus the reference's in the group's rows with advantage +1 and -1
    (advantages.best_and_worst); with dpo_length_norm they are means. With pair_mean weights the loss is the mean over
    pairs. A group must lie within one microbatch.
    """
    margin = reductions.pair_margins(
        logprobs, ref_logprobs, advantages, mask, group_ids, dpo_beta=dpo_beta, dpo_length_norm=dpo_length_norm
    )
    return jnp.broadcast_to(-jax.nn.log_sigmoid(margin)[:, None], mask.shape)
