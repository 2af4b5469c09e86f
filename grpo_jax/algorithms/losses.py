"""From an Algorithm and arrays to advantages, losses, gradient coefficients and diagnostics."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32
import numpy as np
from numpy.typing import ArrayLike

from grpo_jax.algorithms import groups, kl, pieces, ratios, reductions, validation, weights
from grpo_jax.algorithms.algorithm import Algorithm
from grpo_jax.errors import BadInput
from grpo_jax.grouping import Grouping
from grpo_jax.types import Array, Experience

PADDING = {
    'step_rewards': np.nan,
    'correct': np.nan,
}  # what stands for a completion that is missing, where 0 would be a value

NOT_BY_ROW = ('part_weights', 'initial_entropy', 'run_baseline', 'dead')


def compute_advantages(
    algorithm: Algorithm,
    rewards: ArrayLike,
    *,
    kl_coef: float | None = None,
    group_ids: ArrayLike | None = None,
    **data: Any,
) -> Float32[np.ndarray, 'B columns']:
    """Advantages f32[P * G, 1] or f32[P * G, C] of rewards [P, G], on the host.

    data holds what else the estimator reads (see algorithms.advantages), with leading axes [P, G], kl f64[P, G, C]
    where the KL is in the reward, times kl_coef (None: the algorithm's), and teacher_logprobs and old_logprobs where
    there is a teacher_coef. A function without arguments may stand for an array. Without correct, the rewards are what
    the verifier says. dead bool[P] are the dead groups; without it, those that groups.judge_groups finds by the
    algorithm's gate. With rewards [B] and group_ids i32[B], groups may differ in size, and leading axes are [B].
    Exactly 0 for unscorable (not finite) rewards and, where the outcomes of a group are compared, in dead groups, of
    which a KL that is taken off and what a teacher adds remain.
    BadInput for rewards that the algorithm cannot use, and for an estimator that is not by token and gives columns.
    """
    rewards = np.asarray(rewards, np.float64)
    if group_ids is not None:
        return _compute_for_unequal_groups(algorithm, rewards, np.asarray(group_ids), kl_coef, data)
    rewards = np.where(np.isfinite(rewards), rewards, np.nan)  # an infinite reward would spoil its whole group
    kl_coef = algorithm.kl_coef if kl_coef is None else kl_coef
    inputs = _host_inputs(algorithm, rewards, kl_coef, data)
    validation.check_outcomes(algorithm, inputs['correct'])
    advantages = _in_columns(algorithm.advantage, pieces.call(algorithm.advantage, inputs), inputs)
    dead = inputs['dead']
    if pieces.compares_outcomes(algorithm.advantage) and algorithm.kl_placement != 'reward_sequence':
        advantages = np.where(dead[:, None, None], 0.0, advantages)
    if algorithm.dead_groups == 'reweight':
        sizes = inputs['sizes']
        advantages = advantages * sizes.sum() / max(sizes[~dead].sum(), 1)
    if algorithm.takes_kl_off:
        advantages = advantages - kl_coef * pieces.call(_token_kl, inputs)
    if algorithm.teacher_coef:
        advantages = advantages + algorithm.teacher_coef * pieces.call(_teacher_gain, inputs)
    if algorithm.advantage_clip:
        advantages = np.clip(advantages, -algorithm.advantage_clip, algorithm.advantage_clip)
    advantages = np.where(np.isfinite(rewards)[..., None], advantages, 0.0) + 0.0  # + 0.0: no -0.0
    return advantages.reshape(rewards.size, -1).astype(np.float32)


def critic_targets(
    algorithm: Algorithm, rewards: Float[np.ndarray, 'P G'], *, kl_coef: float, **data: Any
) -> Float32[np.ndarray, 'B C']:
    """f32[P * G, C]: generalized advantages by the algorithm's critic_lambda, plus the values: what a critic learns.

    NaN for unscorable completions, which teach it nothing.
    """
    inputs = pieces.Inputs(data)
    values = inputs['values']
    earned = _token_rewards(algorithm, rewards, kl_coef, inputs)
    advantages = groups.generalized_advantages(
        earned, inputs['mask'], values, algorithm.discount, algorithm.critic_lambda
    )
    targets = np.where(np.isfinite(rewards)[..., None], advantages + values, np.nan)
    return targets.reshape(-1, targets.shape[-1]).astype(np.float32)


def _host_inputs(algorithm, rewards, kl_coef, data):
    """What an advantage reads, of rewards f64[P, G] and the other data."""
    given = pieces.Inputs(data)
    inputs = given | {
        'discount': algorithm.discount,
        'rewards': lambda: with_kl() if by_row else rewards,
        'token_rewards': lambda: _token_rewards(algorithm, rewards, kl_coef, inputs),
        'correct': lambda: np.where(known, given['correct'], np.nan) if 'correct' in given else rewards,
        'sizes': lambda: given['sizes'] if 'sizes' in given else np.full(*rewards.shape),
        'dead': lambda: given['dead'] if 'dead' in given else judge_groups(inputs),
    }
    by_row, known = algorithm.kl_placement == 'reward_sequence', np.isfinite(rewards)
    compares = pieces.compares_outcomes(algorithm.advantage)

    def with_kl():  # a dead group has equal rewards, from which the KL is taken all the same
        equal = np.where(known, groups.group_means(rewards), np.nan)
        even = np.where(inputs['dead'][:, None], equal, rewards) if compares else rewards
        return even - kl_coef * pieces.call(_summed_kl, inputs)

    def judge_groups(inputs):
        return groups.judge_groups(algorithm.gate, rewards, inputs['correct'] if 'correct' in given else None)

    # unscorable completions count in no statistic of tokens or steps either
    if 'mask' in given:
        inputs |= {'mask': lambda: given['mask'] & known[..., None]}
        inputs |= {'completion_mask': lambda: _completion_mask(given) & known[..., None]}
    if 'step_rewards' in given:
        inputs |= {'step_rewards': lambda: np.where(inputs['completion_mask'], given['step_rewards'], np.nan)}
    return inputs


def _completion_mask(given):
    """bool[P, G, C]: the completions' tokens; without completion_mask, up to the last one that was sampled."""
    if 'completion_mask' in given:
        return given['completion_mask']
    return np.flip(np.logical_or.accumulate(np.flip(given['mask'], -1), -1), -1)


def _token_rewards(algorithm, rewards, kl_coef, inputs):
    """f64[P, G, C]: the reward at a completion's last token, less the KL of each token where it is in the reward."""

    def spread(mask):
        last = mask & (np.cumsum(mask, -1) == mask.sum(-1, keepdims=True))
        return np.where(last & np.isfinite(rewards)[..., None], rewards[..., None], 0.0)

    earned = pieces.call(spread, inputs)
    return earned - kl_coef * pieces.call(_token_kl, inputs) if algorithm.kl_placement == 'reward_token' else earned


def _token_kl(mask, kl):
    return np.where(mask, kl, 0.0)


def _teacher_gain(mask, teacher_logprobs, old_logprobs):
    return np.where(mask, np.asarray(teacher_logprobs, np.float64) - old_logprobs, 0.0)


def _summed_kl(mask, kl):
    return np.sum(_token_kl(mask, kl), -1)


def _in_columns(piece, advantages, inputs):
    """Advantages [P, G, 1], or [P, G, C] where the piece is by token; BadInput where it says that it is not."""
    advantages = advantages.reshape(*inputs['rewards'].shape, -1)
    if pieces.is_by_token(piece):
        shapes = (inputs[name].shape for name in pieces.reads(piece) if name in pieces.BY_TOKEN)
        return np.broadcast_to(advantages, next(shapes, advantages.shape))
    if advantages.shape[-1] > 1:
        raise BadInput(
            'algorithm.advantage', pieces.name_of(piece), 'differs by token; write @pieces.properties(by_token=True)'
        )
    return advantages


def _compute_for_unequal_groups(algorithm, rewards, group_ids, kl_coef, data):
    """compute_advantages of rows [B] in any order: groups are padded with unscorable completions."""
    grouping = Grouping.by_ids(group_ids)
    grouped: dict[str, Any] = {'sizes': grouping.sizes}
    grouped |= {
        name: x if name in NOT_BY_ROW else grouping.spread(np.asarray(x), PADDING.get(name, 0))
        for name, x in data.items()
        if name != 'parts'
    }
    if 'parts' in data:
        grouped['parts'] = np.stack([grouping.spread(part, np.nan) for part in np.asarray(data['parts'], np.float64)])
    spread = grouping.spread(rewards, np.nan)
    advantages = compute_advantages(algorithm, spread, kl_coef=kl_coef, **grouped)
    return grouping.gather(advantages.reshape(*spread.shape, -1))


def by_token(algorithm: Algorithm) -> bool:
    """Whether the algorithm's advantages have a column for each token."""
    return pieces.is_by_token(algorithm.advantage) or algorithm.takes_kl_off or algorithm.teacher_coef > 0


def prepare(algorithm: Algorithm, experience: Experience) -> dict[str, Float[Array, 'B C']]:
    """What the loss of a minibatch needs of the whole of it, as a dict of f32[B, C], so that it may be cut."""
    mask, rollout = experience.rollout.loss_mask, experience.rollout
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
        prepared[_weights_of(regularizer)] = weights.token_mean(pieces.call(acts_on, inputs) if acts_on else mask)
    if 'top_covariance' in algorithm.reads:
        prepared['top_covariance'] = reductions.mark_highest(
            inputs['covariance'], mask, jnp.maximum(algorithm.covariance_share * jnp.sum(mask), 1)
        )
    return prepared


def token_losses(
    algorithm: Algorithm,
    logprobs: Float[Array, 'B C'],
    entropy: Float[Array, 'B C'],
    experience: Experience,
    prepared: Mapping[str, Float[Array, 'B C']],
    coefficients: Mapping[str, Any],
    top_logprobs: Float[Array, 'B C k'] | None = None,
) -> Float[Array, 'B C']:
    """f32[B, C] terms whose sum is the loss, 0 where masked; differentiable in logprobs and entropy.

    The policy loss and its KL term have the algorithm's weights; each regularizer is a mean over the tokens that it
    acts on, so that its coefficient means the same under all weights. Without old_logprobs the log ratio is
    logprobs - stop_gradient(logprobs): the ratio is exactly 1 and its gradient is the policy gradient. prepared is of
    `prepare`, coefficients of Algorithm.coefficients. top_logprobs are the policy's of experience.teacher_ids.
    """
    inputs = _loss_inputs(algorithm, logprobs, entropy, experience, prepared, coefficients, top_logprobs)
    terms = _terms(algorithm, inputs, coefficients)
    loss = terms.pop('surrogate')
    loss = prepared['weights'] * (loss + terms.pop('kl') if 'kl' in terms else loss)
    for regularizer in algorithm.regularizers:
        loss = loss + prepared[_weights_of(regularizer)] * terms[pieces.name_of(regularizer)]
    return jnp.where(inputs['mask'], loss, 0.0)


def loss_terms(
    algorithm: Algorithm,
    logprobs: Float[Array, 'B C'],
    entropy: Float[Array, 'B C'],
    experience: Experience,
    prepared: Mapping[str, Float[Array, 'B C']],
    coefficients: Mapping[str, Any],
    top_logprobs: Float[Array, 'B C k'] | None = None,
) -> dict[str, Float[Array, 'B C']]:
    """The terms of token_losses by name, surrogate, kl and the regularizers, before their weights."""
    inputs = _loss_inputs(algorithm, logprobs, entropy, experience, prepared, coefficients, top_logprobs)
    terms = _terms(algorithm, inputs, coefficients)
    return {name: jnp.broadcast_to(term, logprobs.shape) for name, term in terms.items()}


def _loss_inputs(algorithm, logprobs, entropy, experience, prepared, coefficients, top_logprobs=None):
    acts = coefficients.get('entropy_acts', 1.0)
    inputs = make_inputs(algorithm, logprobs, entropy, experience, top_logprobs) | prepared
    return inputs | {**coefficients, 'entropy_coef': coefficients['entropy_coef'] * acts}


def _terms(algorithm, inputs, coefficients):
    # a piece is called with the inputs that its parameters name, see pieces.call
    correction = jax.lax.stop_gradient(pieces.call(algorithm.correction, inputs))
    terms = {'surrogate': pieces.call(algorithm.surrogate, inputs) * correction * inputs['selected']}
    if algorithm.kl_coef and algorithm.kl_placement == 'loss':
        factor = correction if algorithm.kl_corrected else 1.0
        terms['kl'] = coefficients['kl_coef'] * factor * pieces.call(algorithm.kl, inputs)
    return terms | {pieces.name_of(piece): pieces.call(piece, inputs) for piece in algorithm.regularizers}


def _weights_of(regularizer):
    """The name of a regularizer's weights in what `prepare` gives."""
    return f'weights of {pieces.name_of(regularizer)}'


def policy_loss(
    algorithm: Algorithm,
    logprobs: Float[Array, 'B C'],
    experience: Experience,
    entropy: Float[Array, 'B C'] | None = None,
    top_logprobs: Float[Array, 'B C k'] | None = None,
) -> tuple[Float[Array, ''], dict[str, Float[Array, '']]]:
    """(loss f32[], metrics) of logprobs f32[B, C]; differentiable in logprobs alone, no model in sight.

    For notebooks and loops of one's own; a run's learner calls token_losses for microbatches (learner/update.py).

    entropy f32[B, C] is for algorithms with an entropy bonus, top_logprobs f32[B, C, k] for those with teacher_top_k.
    """
    entropy = jnp.zeros_like(logprobs) if entropy is None else entropy
    prepared = prepare(algorithm, experience)
    coefficients: dict[str, Any] = dict(algorithm.coefficients)
    if algorithm.entropy_target:
        mask = experience.rollout.loss_mask
        coefficients['entropy_acts'] = jnp.mean(entropy, where=mask) <= algorithm.entropy_target
    losses = token_losses(algorithm, logprobs, entropy, experience, prepared, coefficients, top_logprobs)
    return (jnp.sum(losses), metrics(algorithm, jax.lax.stop_gradient(logprobs), entropy, experience))


def gradient_coefficients(
    algorithm: Algorithm,
    logprobs: Float[Array, 'B C'],
    experience: Experience,
    entropy: Float[Array, 'B C'] | None = None,
) -> Float[Array, 'B C']:
    """f32[B, C] minus the derivative of policy_loss in each logprob: how hard a token is pushed up, or down.

    Weights included; an entropy bonus, which acts through the whole distribution, is not (DeepSeekMath, arXiv
    2402.03300, appendix A.1, writes every method this way).
    """
    return -jax.grad(lambda x: policy_loss(algorithm, x, experience, entropy)[0])(logprobs)


def metrics(
    algorithm: Algorithm, logprobs: Float[Array, 'B C'], entropy: Float[Array, 'B C'], experience: Experience
) -> dict[str, Float[Array, '']]:
    """Diagnostics of one minibatch as f32[] scalars: token means over the completion mask unless named otherwise."""
    mask = experience.rollout.loss_mask
    inputs = make_inputs(algorithm, logprobs, entropy, experience)

    def mean(x):
        return reductions.batch_mean(x, mask)

    ratio, log_ratio, log_rho = inputs['ratio'], inputs['log_ratio'], inputs['log_rho']
    by_mean = pieces.property_of(algorithm.ratio, 'row_mean')
    most = 0.9999 * np.exp(ratios.MAX_MEAN_LOG_RATIO if by_mean else reductions.MAX_LOG_RATIO)
    gap, rho = jnp.abs(log_rho), ratios.token(log_rho)
    better, worse = mask & (experience.advantages > 0), mask & (experience.advantages < 0)
    clipped = _clipped(algorithm, logprobs, entropy, experience)
    diagnostics = {
        'entropy': mean(entropy),
        'ratio_mean': mean(ratio),
        'ratio_max': jnp.max(jnp.where(mask, ratio, 0.0)),
        'ratio_clamped_share': mean((ratio >= most) | (ratio <= 1 / most)),
        'kl_old': mean(kl.k3(inputs['base_logprobs'], inputs['logprobs'])),
        'clip_low_share': mean(clipped & (experience.advantages < 0)),
        'clip_high_share': mean(clipped & (experience.advantages > 0)),
        'logprob_change_better': reductions.batch_mean(log_ratio, better),
        'logprob_change_worse': reductions.batch_mean(log_ratio, worse),
        'sampler_gap_mean': mean(gap),
        'sampler_gap_p99': reductions.quantile(gap, mask, 0.99),
        'sampler_gap_max': jnp.max(gap),
        'sampler_ess': jnp.square(mean(rho)) / jnp.maximum(mean(jnp.square(rho)), 1e-30),
        'correction_mean': mean(pieces.call(algorithm.correction, inputs)),
    }
    if algorithm.needs_reference:
        ref_logprobs: Any = experience.ref_logprobs
        reference = jnp.where(mask, ref_logprobs, logprobs)
        diagnostics['kl_ref'] = mean(kl.k3(logprobs, reference))
        bound = pieces.property_of(algorithm.kl, 'clamped_at')
        diagnostics['kl_clamped_share'] = mean(kl_clamped(logprobs, reference, bound))
    if algorithm.needs_teacher:
        teacher_logprobs: Any = experience.teacher_logprobs
        diagnostics['kl_teacher'] = mean(kl.k3(logprobs, jnp.where(mask, teacher_logprobs, logprobs)))
    return diagnostics


def _clipped(algorithm, logprobs, entropy, experience):
    """bool[B, C]: tokens whose surrogate has lost its gradient, whichever surrogate it is."""

    def surrogate(logprobs):
        return jnp.sum(pieces.call(algorithm.surrogate, make_inputs(algorithm, logprobs, entropy, experience)))

    return (jax.grad(surrogate)(logprobs) == 0) & experience.rollout.loss_mask


def kl_clamped(logprobs: Float[Array, '...'], reference: Float[Array, '...'], most: float) -> Bool[Array, '...']:
    """Where a clamp acts on a KL term: that of the difference, or that of k3 at `most`."""
    d = reference - logprobs
    return (jnp.abs(d) > reductions.MAX_LOG_RATIO) | (reductions.clamped_exp(d) - d - 1 > most)


def make_inputs(algorithm, logprobs, entropy, experience, top_logprobs=None) -> pieces.Inputs:
    """What a row's pieces may read, 0 where masked: masked before any exp, or masked tokens' gradients were NaN.

    top_logprobs are the policy's of experience.teacher_ids.
    """
    rollout, mask = experience.rollout, experience.rollout.loss_mask

    def masked(x) -> Any:
        return None if x is None else jnp.where(mask, x, 0.0)

    def fixed(x) -> Any:
        return None if x is None else jax.lax.stop_gradient(masked(x))

    live, sampler = masked(logprobs), fixed(rollout.logprobs)
    old = fixed(logprobs if experience.old_logprobs is None else experience.old_logprobs)
    base = sampler if algorithm.ratio_base == 'sampler' else old
    inputs = pieces.Inputs(
        {
            'logprobs': live,
            'entropy': masked(entropy),
            'base_logprobs': base,
            'log_ratio': live - base,
            'sampler_logprobs': sampler,
            'ref_logprobs': fixed(experience.ref_logprobs),
            'log_rho': old - sampler,
            'drift': sampler - fixed(logprobs),
            'mask': mask,
            'rewards': experience.rewards,
            'correct': correct_of(experience),
            'advantages': jax.lax.stop_gradient(experience.advantages),
            'group_ids': experience.group_ids,
            'token_ratio': lambda: ratios.token(inputs['log_ratio']),
            'ratio': lambda: pieces.call(algorithm.ratio, inputs),
            'teacher_kl': lambda: _teacher_kl(live, inputs['token_ratio'], experience, top_logprobs),
        }
    )
    return inputs


def correct_of(experience):
    """f32[B]: 1 for right completions by the verifier, else by their reward."""
    return experience.rewards if experience.correct is None else jnp.nan_to_num(experience.correct)


def _teacher_kl(logprobs, ratio, experience, top_logprobs):
    """Estimates KL(policy, teacher) of each token, f32[B, C]; value and gradient are unbiased.

    The sum over the teacher's likeliest tokens is exact. The sampled token stands for all others.
    """
    rollout, mask = experience.rollout, experience.loss_mask
    beyond = ratio * (logprobs - jnp.where(mask, experience.teacher_logprobs, 0.0))
    if top_logprobs is None:
        return jnp.where(mask, beyond, 0.0)
    sampled = rollout.tokens[:, rollout.prompt_mask.shape[1] :]
    among = jnp.any(experience.teacher_ids == sampled[..., None], -1)
    terms = jnp.where(mask[..., None], jnp.exp(top_logprobs) * (top_logprobs - experience.teacher_top), 0.0)
    return jnp.where(mask, jnp.sum(terms, -1) + jnp.where(among, 0.0, beyond), 0.0)
