"""The policy loss, its metrics and its gradient coefficients, from an Algorithm and arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float
import numpy as np

from grpo_jax.algorithms import kl, pieces, ratios, reductions, weights
from grpo_jax.algorithms.algorithm import Algorithm
from grpo_jax.types import HEAD_BY_TOKEN, Array, Experience, HeadOutput


def prepare(algorithm: Algorithm, experience: Experience) -> dict[str, Float[Array, 'B C']]:
    """Computes the inputs of the loss that depend on a whole minibatch, before it is cut; returns f32[B, C] by name.

    The names are `weights`, `selected` (how much each token counts), `weights of NAME` for each regularizer NAME and,
    if a piece reads it, `top_covariance` (1 for the tokens of highest covariance, else 0).
    """
    mask, rollout = experience.loss_mask, experience.rollout
    old_logprobs: Any = experience.old_logprobs  # None where no piece reads it
    inputs = pieces.Inputs(
        {
            'mask': mask,
            'advantages': experience.advantages,
            'group_ids': experience.group_ids,
            'correct': correct_of(experience),
            'old_logprobs': old_logprobs,
            'old_entropy': experience.old_entropy,
            'log_rho': lambda: jnp.where(mask, old_logprobs - rollout.logprobs, 0.0),
            'covariance': lambda: reductions.token_covariance(experience.advantages, old_logprobs, mask),
        }
    )
    prepared = {'selected': pieces.call(algorithm.selection, inputs)}
    counted = mask
    if algorithm.denominator == 'selected':
        counted = mask & (prepared['selected'] > 0) & (pieces.call(algorithm.correction, inputs) > 0)
    prepared['weights'] = pieces.call(algorithm.weights, inputs | {'mask': counted})
    for regularizer in algorithm.regularizers:
        acts_on = pieces.property_of(regularizer, 'acts_on')
        prepared[_weights_key(regularizer)] = weights.token_mean(pieces.call(acts_on, inputs) if acts_on else mask)
    if 'top_covariance' in algorithm.reads:
        prepared['top_covariance'] = reductions.mark_highest(
            inputs['covariance'], mask, jnp.maximum(algorithm.covariance_share * jnp.sum(mask), 1)
        )
    return prepared


def token_losses(
    algorithm: Algorithm,
    output: HeadOutput,
    experience: Experience,
    prepared: Mapping[str, Float[Array, 'B C']],
    coefficients: Mapping[str, Any],
) -> Float[Array, 'B C']:
    """Each token's share of the loss, f32[B, C], 0 where masked; the loss is the sum of all shares.

    The shares can be differentiated by the output.

    output: the policy's; its top_logprobs belong to experience.teacher_ids. prepared: from `prepare`, on the whole
    minibatch. coefficients: Algorithm.coefficients, as they have adapted.

    The policy loss and its KL term are multiplied by the algorithm's weights. A regularizer is a mean over the tokens
    that it acts on, so that its coefficient means the same under all weights. Without old_logprobs the log ratio is
    logprobs - stop_gradient(logprobs): the ratio is exactly 1, and its gradient is the policy gradient.
    """
    inputs = _loss_inputs(algorithm, output, experience, prepared, coefficients)
    terms = _terms(algorithm, inputs, coefficients)
    loss = terms.pop('surrogate')
    loss = prepared['weights'] * (loss + terms.pop('kl') if 'kl' in terms else loss)
    for regularizer in algorithm.regularizers:
        loss = loss + prepared[_weights_key(regularizer)] * terms[pieces.name_of(regularizer)]
    return jnp.where(inputs['mask'], loss, 0.0)


def loss_terms(
    algorithm: Algorithm,
    output: HeadOutput,
    experience: Experience,
    prepared: Mapping[str, Float[Array, 'B C']],
    coefficients: Mapping[str, Any],
) -> dict[str, Float[Array, 'B C']]:
    """The terms of token_losses before their weights, f32[B, C] by name: surrogate, kl and the regularizers."""
    inputs = _loss_inputs(algorithm, output, experience, prepared, coefficients)
    terms = _terms(algorithm, inputs, coefficients)
    return {name: jnp.broadcast_to(term, output.logprobs.shape) for name, term in terms.items()}


def _loss_inputs(algorithm, output, experience, prepared, coefficients):
    """The pieces.Inputs of a loss: what `make_inputs` and `prepare` return, and the coefficients."""
    acts = coefficients.get('entropy_acts', 1.0)
    inputs = make_inputs(algorithm, output, experience) | prepared
    return inputs | {**coefficients, 'entropy_coef': coefficients['entropy_coef'] * acts}


def _terms(algorithm, inputs, coefficients):
    """The terms of the loss by name, before their weights; each is f32[B, C], or broadcasts to it."""
    # a piece is called with the inputs that its parameters name, see pieces.call
    correction = jax.lax.stop_gradient(pieces.call(algorithm.correction, inputs))
    terms = {'surrogate': pieces.call(algorithm.surrogate, inputs) * correction * inputs['selected']}
    if algorithm.kl_coef and algorithm.kl_placement == 'loss':
        factor = correction if algorithm.kl_corrected else 1.0
        terms['kl'] = coefficients['kl_coef'] * factor * pieces.call(algorithm.kl, inputs)
    return terms | {pieces.name_of(piece): pieces.call(piece, inputs) for piece in algorithm.regularizers}


def _weights_key(regularizer):
    """The key of a regularizer's weights in the dict that `prepare` returns."""
    return f'weights of {pieces.name_of(regularizer)}'


def policy_loss(
    algorithm: Algorithm,
    logprobs: Float[Array, 'B C'],
    experience: Experience,
    entropy: Float[Array, 'B C'] | None = None,
    top_logprobs: Float[Array, 'B C k'] | None = None,
) -> tuple[Float[Array, ''], dict[str, Float[Array, '']]]:
    """(loss f32[], metrics f32[] by name) of a minibatch; differentiable in logprobs alone. No model is needed.

    For notebooks and loops of your own; a run's learner calls token_losses for microbatches (learner/update.py).
    experience: the minibatch. entropy: of the policy; None: 0, also in the metrics. top_logprobs: the policy's logprobs
    for experience.teacher_ids, for algorithms with teacher_top_k.
    """
    entropy = jnp.zeros_like(logprobs) if entropy is None else entropy
    prepared = prepare(algorithm, experience)
    coefficients: dict[str, Any] = dict(algorithm.coefficients)
    if algorithm.entropy_target:
        mask = experience.loss_mask
        coefficients['entropy_acts'] = jnp.mean(entropy, where=mask) <= algorithm.entropy_target
    output = HeadOutput(logprobs, entropy, top_logprobs)
    losses = token_losses(algorithm, output, experience, prepared, coefficients)
    fixed = output._replace(logprobs=jax.lax.stop_gradient(logprobs))
    return jnp.sum(losses), metrics(algorithm, fixed, experience)


def gradient_coefficients(
    algorithm: Algorithm,
    logprobs: Float[Array, 'B C'],
    experience: Experience,
    entropy: Float[Array, 'B C'] | None = None,
) -> Float[Array, 'B C']:
    """Minus the derivative of policy_loss by each logprob, f32[B, C]: how hard a token is pushed up, or down.

    The weights of the loss are included. An entropy bonus is not, since it acts through the whole distribution.
    DeepSeekMath (arXiv 2402.03300, appendix A.1) writes every method in this form.
    """
    return -jax.grad(lambda x: policy_loss(algorithm, x, experience, entropy)[0])(logprobs)


def metrics(algorithm: Algorithm, output: HeadOutput, experience: Experience) -> dict[str, Float[Array, '']]:
    """Metrics of one minibatch, f32[] by name: means over the tokens of loss_mask, unless the name says otherwise."""
    mask = experience.loss_mask
    logprobs, inputs = output.logprobs, make_inputs(algorithm, output, experience)

    def mean(x):
        return reductions.batch_mean(x, mask)

    ratio, log_ratio, log_rho = inputs['ratio'], inputs['log_ratio'], inputs['log_rho']
    by_mean = pieces.property_of(algorithm.ratio, 'row_mean')
    most = 0.9999 * np.exp(ratios.MAX_MEAN_LOG_RATIO if by_mean else reductions.MAX_LOG_RATIO)
    gap, rho = jnp.abs(log_rho), ratios.token(log_rho)
    better, worse = mask & (experience.advantages > 0), mask & (experience.advantages < 0)
    clipped = _mark_clipped(algorithm, output, experience)
    diagnostics = {
        'entropy': mean(output.entropy),
        'ratio_mean': mean(ratio),
        'ratio_max': jnp.max(jnp.where(mask, ratio, 0.0)),
        'ratio_clamped_share': mean((ratio >= most) | (ratio <= 1 / most)),
        'kl_old': mean(kl.k3(inputs['base_logprobs'], inputs['logprobs'])),
        'clip_low_share': mean(clipped & (experience.advantages < 0)),
        'clip_high_share': mean(clipped & (experience.advantages > 0)),
        'logprob_change_better': reductions.batch_mean(log_ratio, better),
        'logprob_change_worse': reductions.batch_mean(log_ratio, worse),
        'sampler_gap_mean': mean(gap),
        'sampler_gap_p99': reductions.quantiles(gap, mask, [0.99])[0],
        'sampler_gap_max': jnp.max(gap),
        'sampler_ess': jnp.square(mean(rho)) / jnp.maximum(mean(jnp.square(rho)), 1e-30),
        'correction_mean': mean(pieces.call(algorithm.correction, inputs)),
    }
    if algorithm.needs_reference:
        ref_logprobs: Any = experience.ref_logprobs
        reference = jnp.where(mask, ref_logprobs, logprobs)
        diagnostics['kl_ref'] = mean(kl.k3(logprobs, reference))
        bound = pieces.property_of(algorithm.kl, 'clamped_at')
        diagnostics['kl_clamped_share'] = mean(is_kl_clamped(logprobs, reference, bound))
    if algorithm.needs_teacher:
        teacher_logprobs: Any = experience.teacher_logprobs
        diagnostics['kl_teacher'] = mean(kl.k3(logprobs, jnp.where(mask, teacher_logprobs, logprobs)))
    return diagnostics


def _mark_clipped(algorithm, output, experience):
    """bool[B, C]: tokens at which the gradient of the surrogate is 0, found by differentiating it."""

    def surrogate(logprobs):
        inputs = make_inputs(algorithm, output._replace(logprobs=logprobs), experience)
        return jnp.sum(pieces.call(algorithm.surrogate, inputs))

    return (jax.grad(surrogate)(output.logprobs) == 0) & experience.loss_mask


def is_kl_clamped(logprobs: Float[Array, '...'], reference: Float[Array, '...'], most: float) -> Bool[Array, '...']:
    """Whether each token's KL term is clamped, by the bound of the log ratio or by the bound `most` of k3."""
    d = reference - logprobs
    return (jnp.abs(d) > reductions.MAX_LOG_RATIO) | (reductions.clamped_exp(d) - d - 1 > most)


def make_inputs(algorithm: Algorithm, output: HeadOutput, experience: Experience) -> pieces.Inputs:
    """The pieces.Inputs that pieces on the device may read, except for what `prepare` returns; 0 where masked.

    Arrays are masked before any exp is taken, since an overflow in a masked token would make the gradient NaN.
    """
    rollout, mask = experience.rollout, experience.loss_mask

    def masked(x) -> Any:
        return None if x is None else jnp.where(mask, x, 0.0)

    def fixed(x) -> Any:
        return None if x is None else jax.lax.stop_gradient(masked(x))

    from_head = {name: masked(getattr(output, name)) for name in HEAD_BY_TOKEN}
    live, sampler = from_head['logprobs'], fixed(rollout.logprobs)
    old = fixed(output.logprobs if experience.old_logprobs is None else experience.old_logprobs)
    base = sampler if algorithm.ratio_base == 'sampler' else old
    inputs = pieces.Inputs(
        {
            **from_head,
            'base_logprobs': base,
            'log_ratio': live - base,
            'sampler_logprobs': sampler,
            'ref_logprobs': fixed(experience.ref_logprobs),
            'log_rho': old - sampler,
            'drift': sampler - fixed(output.logprobs),
            'mask': mask,
            'rewards': experience.rewards,
            'correct': correct_of(experience),
            'advantages': jax.lax.stop_gradient(experience.advantages),
            'group_ids': experience.group_ids,
            'token_ratio': lambda: ratios.token(inputs['log_ratio']),
            'ratio': lambda: pieces.call(algorithm.ratio, inputs),
            'teacher_kl': lambda: _teacher_kl(live, inputs['token_ratio'], experience, output.top_logprobs),
        }
    )
    return inputs


def correct_of(experience):
    """f32[B]: what the verifier says, 1 right, 0 wrong or unknown; the rewards where there is no verifier."""
    return experience.rewards if experience.correct is None else jnp.nan_to_num(experience.correct)


def _teacher_kl(logprobs, ratio, experience, top_logprobs):
    """Estimates KL(policy, teacher) at each token, f32[B, C]; value and gradient are unbiased.

    The sum over the teacher's likeliest tokens is exact. All other tokens are estimated from the sampled one; so are
    all tokens where top_logprobs is None.
    """
    rollout, mask = experience.rollout, experience.loss_mask
    by_sample = ratio * (logprobs - jnp.where(mask, experience.teacher_logprobs, 0.0))
    if top_logprobs is None:
        return jnp.where(mask, by_sample, 0.0)
    sampled = rollout.tokens[:, rollout.prompt_mask.shape[1] :]
    in_top = jnp.any(experience.teacher_ids == sampled[..., None], -1)
    terms = jnp.where(mask[..., None], jnp.exp(top_logprobs) * (top_logprobs - experience.teacher_top), 0.0)
    return jnp.where(mask, jnp.sum(terms, -1) + jnp.where(in_top, 0.0, by_sample), 0.0)
