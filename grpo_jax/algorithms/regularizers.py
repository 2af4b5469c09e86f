"""Per-token terms f32[B, C] whose means are added to the loss, whatever weights the policy loss has.

A mean is over all tokens of the minibatch, or over the tokens that the piece's property acts_on selects. What a
regularizer may read: all that a surrogate may (see surrogates), with correct f32[B] 1 for right and else 0; weights,
selected and top_covariance f32[B, C]; entropy_coef and kl_coef f32[], which may adapt. checks.READABLE lists the names.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from grpo_jax.algorithms import pieces, reductions
from grpo_jax.ranges import Coefficient
from grpo_jax.types import Array


def entropy_bonus(entropy: Float[Array, 'B C'], entropy_coef: float | Float[Array, '']) -> Float[Array, 'B C']:
    """-entropy_coef * entropy: pays for keeping the distribution wide (arXiv 1602.01783, section 4)."""
    return -entropy_coef * entropy


@pieces.properties(zero_at_first=True)
def llds(
    log_ratio: Float[Array, 'B C'],
    advantages: pieces.Advantages,
    mask: Bool[Array, 'B C'],
    *,
    llds_coef: Coefficient = 0.2,  # price of a nat that right completions lose
) -> Float[Array, 'B C']:
    """llds_coef * max(old logprob - logprob, 0), in spans whose summed logprob has fallen: LLDS (arXiv 2512.04220).

    The term acts in rows with A >= 0 alone, and is exactly 0 while the policy is still the old one. A span is an
    unbroken run of sampled tokens; a completion of a single turn is one span, as in the paper's response-level gate.
    """
    lost = jnp.where(mask, -log_ratio, 0.0)
    begins = mask & ~jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    span = jnp.cumsum(begins, -1)
    totals = jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, mask.shape[1] + 1)[i])(lost, span)
    gate = jax.lax.stop_gradient(totals > 0) & (advantages >= 0)
    return llds_coef * jnp.where(gate, jnp.maximum(lost, 0.0), 0.0)


def _right_tokens(mask: Bool[Array, 'B C'], correct: Float[Array, ' B']) -> Bool[Array, 'B C']:
    """Which tokens belong to right completions, bool[B, C]."""
    return mask & (correct >= 1)[:, None]


@pieces.properties(acts_on=_right_tokens)
def positive_nll(
    logprobs: Float[Array, 'B C'],
    correct: Float[Array, ' B'],
    *,
    positive_nll_coef: Coefficient = 0.1,  # weight of imitating right completions
) -> Float[Array, 'B C']:
    """-positive_nll_coef * logprob in right completions, else 0: VAPO (arXiv 2504.05118, eq. 11).

    Its mean is over the tokens of right completions.
    """
    return -positive_nll_coef * jnp.where(correct >= 1, 1.0, 0.0)[:, None] * logprobs


def behaviour_k2(
    logprobs: Float[Array, 'B C'],
    sampler_logprobs: Float[Array, 'B C'],
    *,
    behaviour_coef: Coefficient = 1e-3,  # strength of the pull to the policy that sampled
) -> Float[Array, 'B C']:
    """behaviour_coef * (logprob - sampler's)^2: a pull to the policy that sampled (prime-rl's default with DPPO)."""
    return behaviour_coef * jnp.square(reductions.clamp(logprobs - sampler_logprobs))


@pieces.properties(zero_at_first=True)
def kl_cov(
    log_ratio: Float[Array, 'B C'],
    top_covariance: Float[Array, 'B C'],
    *,
    kl_cov_coef: Coefficient = 1.0,  # strength of the pull to the old policy, on these tokens
) -> Float[Array, 'B C']:
    """kl_cov_coef * |log ratio| on the tokens of highest covariance, else 0: KL-Cov (arXiv 2505.22617, eq. 12)."""
    return kl_cov_coef * top_covariance * reductions.absolute(log_ratio)


def distill(
    teacher_kl: Float[Array, 'B C'],
    *,
    distill_coef: Coefficient = 1.0,  # weight of the KL to the teacher
) -> Float[Array, 'B C']:
    """distill_coef * KL(policy, teacher) at each token: on-policy distillation as a loss.

    It is the reverse KL of MiniLLM (arXiv 2306.08543, eq. 1) and GKD (arXiv 2306.13649, section 3.1), but its gradient
    leaves out how a token changes the KL of later tokens.
    """
    return distill_coef * teacher_kl
