"""From an Algorithm and arrays to advantages, losses, gradient coefficients and diagnostics."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.algorithms import covariance, groups, kl, pieces, ratios, reductions, validation

FILL = {'step_rewards': np.nan}  # what stands for a completion that is not there, where 0 would be a value


def compute_advantages(algorithm, rewards, *, kl_coef=None, group_ids=None, **data):
    """Advantages f32[P * G, 1] or f32[P * G, C] of rewards [P, G], on the host.

    data holds what else the estimator reads (see algorithms.advantages), with leading axes [P, G], and kl
    f64[P, G, C] where the KL is in the reward, times kl_coef (None: the algorithm's). With rewards [B] and
    group_ids i32[B], groups may differ in size, and leading axes are [B]. Exactly 0 for unscorable (not
    finite) rewards and, where groups are compared, in dead groups. BadInput for rewards that it cannot use.
    """
    rewards = np.asarray(rewards, np.float64)
    if group_ids is not None:
        return _of_unequal_groups(algorithm, rewards, np.asarray(group_ids), kl_coef, data)
    rewards = np.where(np.isfinite(rewards), rewards, np.nan)  # an infinite reward would spoil its whole group
    validation.check_rewards(algorithm, rewards)
    finite = np.isfinite(rewards)[..., None]
    kl_coef = algorithm.kl_coef if kl_coef is None else kl_coef
    if 'mask' in data:  # unscorable completions count in no statistic of tokens either
        given = {'mask': data['mask']}
        data['mask'] = lambda: pieces.call(lambda mask: mask, given) & finite
    data |= {'rewards': rewards, 'token_rewards': lambda: token_rewards(algorithm, rewards, kl_coef, data)}
    if algorithm.kl_placement == 'reward_sequence':
        data['rewards'] = rewards - kl_coef * pieces.call(lambda mask, kl: np.sum(np.where(mask, kl, 0.0), -1), data)
    values = pieces.call(algorithm.advantage, data).reshape(*rewards.shape, -1)
    if algorithm.dead_groups == 'reweight':
        dead = groups.dead_groups(rewards)
        values = values * len(dead) / max(np.sum(~dead), 1)
    if algorithm.advantage_clip:
        values = np.clip(values, -algorithm.advantage_clip, algorithm.advantage_clip)
    values = np.where(finite, values, 0.0) + 0.0  # + 0.0: no -0.0
    return values.reshape(rewards.size, -1).astype(np.float32)


def critic_targets(algorithm, rewards, *, kl_coef, **data):
    """f32[P * G, C]: generalized advantages by the algorithm's critic_lambda, plus the values: what a critic learns."""

    def targets(mask, values):
        given = token_rewards(algorithm, rewards, kl_coef, data)
        discount = algorithm.advantage.keywords['discount']
        found = groups.generalized(given, mask, values, discount, algorithm.critic_lambda) + values
        return found.reshape(-1, found.shape[-1]).astype(np.float32)

    return pieces.call(targets, data)


def token_rewards(algorithm, rewards, kl_coef, data):
    """f64[P, G, C]: the reward at a completion's last token, less the KL of each token where it is in the reward."""

    def spread(mask):
        last = mask & (np.cumsum(mask, -1) == mask.sum(-1, keepdims=True))
        return np.where(last & np.isfinite(rewards)[..., None], rewards[..., None], 0.0)

    def penalty(mask, kl):
        return kl_coef * np.where(mask, kl, 0.0)

    given = pieces.call(spread, data)
    return given - pieces.call(penalty, data) if algorithm.kl_placement == 'reward_token' else given


def _of_unequal_groups(algorithm, rewards, group_ids, kl_coef, data):
    """compute_advantages of rows [B] in any order: groups are padded with unscorable completions."""
    _, owner = np.unique(group_ids, return_inverse=True)
    counts = np.bincount(owner)
    place = np.zeros(len(owner), int)
    for group in range(len(counts)):
        place[owner == group] = np.arange(counts[group])

    def padded(x, fill=0):
        full = np.full((len(counts), counts.max(), *x.shape[1:]), fill, x.dtype)
        full[owner, place] = x
        return full

    known = {
        name: x if name in ('part_weights', 'initial_entropy') else padded(np.asarray(x), FILL.get(name, 0))
        for name, x in data.items()
        if name != 'parts'
    }
    if 'parts' in data:
        known['parts'] = np.stack([padded(part, np.nan) for part in np.asarray(data['parts'], np.float64)])
    found = compute_advantages(algorithm, padded(rewards, np.nan), kl_coef=kl_coef, **known)
    return found.reshape(len(counts), counts.max(), -1)[owner, place]


def by_token(algorithm):
    """Whether the algorithm's advantages differ by token; found by trying it on a small example."""
    rewards, mask = np.array([[0.0, 1.0], [1.0, 0.0]]), np.ones((2, 2, 3), bool)
    floats = dict.fromkeys(('kl', 'sampler_logprobs', 'old_entropy', 'values', 'step_rewards'), mask - 1.0)
    example = dict(mask=mask, tokens=mask.astype(int), parts=rewards[None], part_weights=np.ones(1))
    return compute_advantages(algorithm, rewards, initial_entropy=0.0, **example, **floats).shape[1] > 1


def prepare(algorithm, experience):
    """What the loss of a minibatch needs of the whole of it, as a dict of f32[B, C], so that it may be cut."""
    mask, rollout = experience.rollout.loss_mask, experience.rollout
    data = {
        'mask': mask,
        'advantages': experience.advantages,
        'group_ids': experience.group_ids,
        'old_logprobs': experience.old_logprobs,
        'old_entropy': experience.old_entropy,
        'log_rho': lambda: jnp.where(mask, experience.old_logprobs - rollout.logprobs, 0.0),
        'covariance': lambda: covariance.by_token(experience.advantages, experience.old_logprobs, mask),
    }
    prepared = {'selected': pieces.call(algorithm.selection, data)}
    counted = mask
    if algorithm.denominator == 'selected':
        counted = mask & (prepared['selected'] > 0) & (pieces.call(algorithm.correction, data) > 0)
    prepared['weights'] = pieces.call(algorithm.weights, data | {'mask': counted})
    if 'top_covariance' in algorithm.reads:
        prepared['top_covariance'] = covariance.highest(
            data['covariance'](), mask, algorithm.covariance_share * jnp.sum(mask)
        )
    return prepared


def token_losses(algorithm, logprobs, entropy, experience, prepared, coefficients):
    """f32[B, C] losses before weighting, 0 where masked; differentiable in logprobs and entropy.

    Without old_logprobs the log ratio is logprobs - stop_gradient(logprobs): the ratio is exactly 1
    and its gradient is the policy gradient. prepared is of `prepare`, coefficients of Algorithm.coefficients.
    """
    acts = coefficients.get('entropy_acts', 1.0)
    data = _row_data(algorithm, logprobs, entropy, experience) | prepared
    data |= coefficients | {'entropy_coef': coefficients['entropy_coef'] * acts}
    correction = jax.lax.stop_gradient(pieces.call(algorithm.correction, data))
    loss = pieces.call(algorithm.surrogate, data) * correction * prepared['selected']
    if algorithm.kl_coef and algorithm.kl_placement == 'loss':
        factor = correction if algorithm.kl_corrected else 1.0
        loss = loss + coefficients['kl_coef'] * factor * pieces.call(algorithm.kl, data)
    for regularizer in algorithm.regularizers:
        loss = loss + pieces.call(regularizer, data)
    return jnp.where(data['mask'], loss, 0.0)


def policy_loss(algorithm, logprobs, experience, entropy=None):
    """(loss f32[], metrics) of logprobs f32[B, C]; differentiable in logprobs alone, no model in sight.

    entropy f32[B, C] is for algorithms with an entropy bonus.
    """
    entropy = jnp.zeros_like(logprobs) if entropy is None else entropy
    prepared = prepare(algorithm, experience)
    coefficients = algorithm.coefficients
    if algorithm.entropy_target:
        mask = experience.rollout.loss_mask
        coefficients['entropy_acts'] = jnp.mean(entropy, where=mask) <= algorithm.entropy_target
    losses = token_losses(algorithm, logprobs, entropy, experience, prepared, coefficients)
    return (
        jnp.sum(prepared['weights'] * losses),
        metrics(algorithm, jax.lax.stop_gradient(logprobs), entropy, experience),
    )


def gradient_coefficients(algorithm, logprobs, experience, entropy=None):
    """f32[B, C] minus the derivative of policy_loss in each logprob: how hard a token is pushed up, or down.

    Weights included; an entropy bonus, which acts through the whole distribution, is not (DeepSeekMath, arXiv
    2402.03300, appendix A.1, writes every method this way).
    """
    return -jax.grad(lambda x: policy_loss(algorithm, x, experience, entropy)[0])(logprobs)


def metrics(algorithm, logprobs, entropy, experience):
    """Diagnostics of one minibatch as f32[] scalars: token means over the completion mask unless named otherwise."""
    mask = experience.rollout.loss_mask
    data = _row_data(algorithm, logprobs, entropy, experience)

    def mean(x, where=mask):
        return jnp.sum(jnp.where(where, x, 0.0)) / jnp.maximum(jnp.sum(where), 1)

    ratio, log_ratio, log_rho = data['ratio'](), data['log_ratio'], data['log_rho']
    by_mean = 'geometric' in pieces.name_of(algorithm.ratio)
    most = 0.9999 * np.exp(ratios.MAX_MEAN_LOG_RATIO if by_mean else reductions.MAX_LOG_RATIO)
    gap, rho = jnp.abs(log_rho), ratios.token(log_rho)
    better, worse = mask & (experience.advantages > 0), mask & (experience.advantages < 0)
    clipped = _clipped(algorithm, logprobs, entropy, experience)
    found = {
        'entropy': mean(entropy),
        'ratio_mean': mean(ratio),
        'ratio_max': jnp.max(jnp.where(mask, ratio, 0.0)),
        'ratio_clamped_share': mean((ratio >= most) | (ratio <= 1 / most)),
        'kl_old': mean(kl.k3(data['base_logprobs'], data['logprobs'])),
        'clip_low_share': mean(clipped & (experience.advantages < 0)),
        'clip_high_share': mean(clipped & (experience.advantages > 0)),
        'logprob_change_better': mean(log_ratio, better),
        'logprob_change_worse': mean(log_ratio, worse),
        'sampler_gap_mean': mean(gap),
        'sampler_gap_p99': reductions.quantile(gap, mask, 0.99),
        'sampler_gap_max': jnp.max(gap),
        'sampler_ess': jnp.square(mean(rho)) / jnp.maximum(mean(jnp.square(rho)), 1e-30),
        'correction_mean': mean(pieces.call(algorithm.correction, data)),
    }
    if algorithm.needs_reference:
        reference = jnp.where(mask, experience.ref_logprobs, logprobs)
        found['kl_ref'] = mean(kl.k3(logprobs, reference))
        bound = kl.MAX_K3 if algorithm.kl is kl.k3 else np.inf
        found['kl_clamped_share'] = mean(kl_clamped(logprobs, reference, bound))
    return found


def _row_data(algorithm, logprobs, entropy, experience):
    """What a row's pieces may read, 0 where masked: masked before any exp, or masked tokens' gradients were NaN."""
    rollout, mask = experience.rollout, experience.rollout.loss_mask

    def masked(x):
        return None if x is None else jnp.where(mask, x, 0.0)

    def fixed(x):
        return None if x is None else jax.lax.stop_gradient(masked(x))

    live, sampler = masked(logprobs), fixed(rollout.logprobs)
    old = fixed(logprobs if experience.old_logprobs is None else experience.old_logprobs)
    base = sampler if algorithm.ratio_base == 'sampler' else old
    data = {
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
        'advantages': jax.lax.stop_gradient(experience.advantages),
        'group_ids': experience.group_ids,
    }
    data['token_ratio'] = lambda: ratios.token(data['log_ratio'])
    data['ratio'] = lambda: pieces.call(algorithm.ratio, data)
    return data


def _clipped(algorithm, logprobs, entropy, experience):
    """bool[B, C]: tokens whose surrogate has lost its gradient, whichever surrogate it is."""

    def surrogate(logprobs):
        return jnp.sum(pieces.call(algorithm.surrogate, _row_data(algorithm, logprobs, entropy, experience)))

    return (jax.grad(surrogate)(logprobs) == 0) & experience.rollout.loss_mask


def kl_clamped(logprobs, reference, most):
    """bool[B, C]: where a clamp, of the difference or of k3 at `most`, has cut the gradient of a KL term."""
    d = reference - logprobs
    return (jnp.abs(d) > kl.MAX_DIFFERENCE) | (jnp.exp(jnp.clip(d, -20, 20)) - d - 1 > most)
