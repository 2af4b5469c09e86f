"""A step's loss, gradient and metrics for every preset in plain numpy, in float64, from the papers' formulas.

Nothing of grpo_jax takes part. Losses are f64[..., B, C], the tokens' shares, of logprobs [..., B, C]; what the papers
do not differentiate is computed at the batch's own logprobs, so that differences of the loss are its gradient.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from tests.learner import plain_advantages as estimators
from tests.learner.plain_advantages import Batch

# D. ratios x [..., B, C] of log ratios d, and corrections [B, C]; nothing overflows float32


def bounded_exp(x, most=20):
    return np.exp(np.clip(x, -most, most))


def row_mean(x, mask):
    return np.where(mask, x, 0).sum(-1, keepdims=True) / np.maximum(mask.sum(-1, keepdims=True), 1)


def row_sum(x, mask):
    return np.where(mask, x, 0).sum(-1, keepdims=True)


def token(d, now, mask, a):
    return bounded_exp(d)


def sequence_geometric(d, now, mask, a):
    return bounded_exp(row_mean(d, mask), 10) + 0 * d


def sequence_geometric_token(d, now, mask, a):
    """exp(l - sg(l) + sg(log s)); beyond the bound there is no gradient."""
    middle = row_mean(now, mask)
    return bounded_exp(middle, 10) * np.exp(np.where(np.abs(middle) < 10, d - now, 0))


def sequence_product(d, now, mask, a):
    return bounded_exp(row_sum(d, mask)) + 0 * d


def clipped_geometric(d, now, mask, a, bound=0.4):
    one_sided = np.where(a > 0, np.minimum(d, bound), np.maximum(d, -bound))
    return bounded_exp(row_mean(one_sided, mask), 10) + 0 * d


def none(x):
    return 1.0


def truncated(x):
    return np.minimum(bounded_exp(x.log_rho), 2)


def opsm(x, delta=0.05):
    drift = row_mean(x.batch.sampler - x.batch.new, x.mask)
    return ~((x.a < 0) & (drift > delta))


def icepop(x):
    rho = bounded_exp(x.log_rho)
    return rho * (rho >= 0.5) * (rho <= 5)


def truncated_product(x):
    return np.minimum(bounded_exp(row_sum(x.log_rho, x.mask)), 2)


def masked_product(x):
    product = bounded_exp(row_sum(x.log_rho, x.mask))
    return product * (product <= 3)


def masked_geometric(x, low=0.8, high=1.25):
    middle = np.exp(row_mean(x.log_rho, x.mask))
    return bounded_exp(x.log_rho) * (middle >= low) * (middle <= high)


def veto(x, below=0.5):
    return ~np.any(x.mask & (x.log_rho < np.log(below)), -1, keepdims=True)


# G. selections [B, C]


def highest(values, among, count):
    """[B, C], the tokens among with the highest values."""
    chosen = np.zeros(among.shape, bool)
    places = np.flatnonzero(among)
    chosen.flat[places[np.argsort(-values.reshape(-1)[places], kind='stable')[:count]]] = True
    return chosen


def covariance(x):
    """[B, C], (A - mean A)(l - mean l) over the minibatch's tokens."""
    a = x.a + np.zeros(x.mask.shape)
    return (a - estimators.mean(a, x.mask)) * (x.batch.old - estimators.mean(x.batch.old, x.mask))


def share_of(share, mask):
    return max(int(share * mask.sum()), 1)


def clip_cov(x, low=0.05, high=5.0, share=0.2):
    value = covariance(x)
    return ~highest(value, x.mask & (value >= low) & (value <= high), share_of(share, x.mask))


def high_entropy(x, share=0.2):
    entropy = x.batch.entropy
    return entropy >= np.quantile(entropy[x.mask], 1 - share) if x.mask.any() else x.mask


def m2po(x, bound=0.04):
    """The largest squared log ratios go until the mean of the others is within the bound, equals together."""
    squares = np.where(x.mask, x.log_rho**2, np.inf)
    kept = x.mask.copy()
    while kept.any() and squares[kept].mean() > bound:
        kept &= squares < squares[kept].max()
    return kept


# E. surrogates [..., B, C] of ratios r, which are r_now at the batch's logprobs


def clip(x, r, r_now, new, low=0.2, high=0.2):
    return np.maximum(-x.a * r, -x.a * np.clip(r, 1 - low, 1 + high))


def dual_clip(x, r, r_now, new, low=0.2, high=0.28, most=1.5):
    whole = clip(x, r, r_now, new, low, high)
    return np.where(x.a < 0, np.minimum(whole, -most * x.a), whole)


def importance(x, r, r_now, new):
    return -x.a * r


def policy_gradient(x, r, r_now, new):
    return -x.a * new


def cispo(x, r, r_now, new, cap=2.0):
    return -np.minimum(r_now, cap) * x.a * new


def sapo(x, r, r_now, new):
    tau = np.where(x.a > 0, 1.0, 1.05)
    return -4 / tau / (1 + np.exp(-np.minimum(tau * (r - 1), 700))) * x.a


def dppo_tv(x, r, r_now, new, low=0.1, high=0.1):
    moved = np.exp(x.batch.new) - np.exp(x.base)
    return np.where((x.a > 0) & (moved > high) | (x.a < 0) & (moved < -low), 0, -x.a * r)


def dppo_kl(x, r, r_now, new, low=0.01, high=0.01):
    now, base = (np.clip(np.exp(logprobs), 1e-6, 1 - 1e-6) for logprobs in (x.batch.new, x.base))
    apart = base * np.log(base / now) + (1 - base) * np.log((1 - base) / (1 - now))
    dropped = (x.a > 0) & (now > base) & (apart > high) | (x.a < 0) & (now < base) & (apart > low)
    return np.where(dropped, 0, -x.a * r)


def vespo(x, r, r_now, new):
    power, rate = np.where(x.a > 0, 2, 3), np.where(x.a > 0, 3, 2)
    total = np.clip(row_sum(x.d_now, x.mask), -20, 20)
    return -np.exp(power * total + rate * (1 - np.exp(total))) * x.a * new


# F. KL [..., B, C] of policy and reference


def k2(x, new):
    return np.clip(x.batch.ref - new, -20, 20) ** 2 / 2


def bounded_k3(d):
    d = np.clip(d, -20, 20)
    return np.minimum(np.exp(d) - d - 1, 10)


def k3(x, new):
    return bounded_k3(x.batch.ref - new)


def k3_importance(x, new):
    return bounded_exp(np.where(x.mask, new - x.base, 0)) * k3(x, new)


def k3_straight_through(x, new):
    return k3(x, x.batch.new) + k2(x, new) - k2(x, x.batch.new)


def absolute(x, new):
    return np.abs(np.clip(x.batch.ref - new, -20, 20))


# I. regularizers: (terms [..., B, C], the tokens whose mean is taken)


def llds(x, new):
    """Lost likelihood of rows with A >= 0, in spans of sampled tokens whose sum was lost."""
    gate = np.zeros(x.mask.shape, bool)
    for b, row in enumerate(x.mask):
        starts = np.flatnonzero(row & ~np.append(False, row[:-1]))
        ends = np.flatnonzero(row & ~np.append(row[1:], False)) + 1
        for start, end in zip(starts, ends, strict=True):
            gate[b, start:end] = (x.batch.old - x.batch.new)[b, start:end].sum() > 0
    return 0.2 * gate * (x.a >= 0) * np.maximum(x.batch.old - new, 0), x.mask


def positive_nll(x, new):
    right = x.mask & x.batch.right.reshape(-1, 1)
    return -0.1 * new, right


def behaviour_k2(x, new):
    return 1e-3 * np.clip(new - x.batch.sampler, -20, 20) ** 2, x.mask


def kl_cov(x, new, share=0.2):
    chosen = highest(covariance(x), x.mask, share_of(share, x.mask))
    return chosen * np.abs(new - x.base), x.mask


def distill(x, new):
    return bounded_exp(np.where(x.mask, new - x.base, 0)) * (new - x.batch.teacher), x.mask


# H. weights [B, C] of the tokens


def token_mean(mask, shape):
    return mask / max(mask.sum(), 1)


def sequence_sum(mask, shape):
    return mask / max(mask.any(-1).sum(), 1)


def sequence_mean(mask, shape):
    return sequence_sum(mask, shape) / np.maximum(mask.sum(-1, keepdims=True), 1)


def prompt_mean(mask, shape):
    tokens = np.repeat(mask.sum(-1).reshape(shape).sum(-1), shape[1])[:, None]
    prompts = mask.reshape(shape[0], -1).any(-1).sum()
    return mask / np.maximum(tokens, 1) / max(prompts, 1)


def fixed_length(mask, shape, length=5):
    return sequence_sum(mask, shape) / length


def constant(mask, shape, denominator=100):
    return mask / denominator


class Method(NamedTuple):
    """What a preset is made of, from its paper; changes: keys of config.algorithm that fit so small an example."""

    advantage: str
    surrogate: Any
    weights: Any
    ratio: Any = token
    base: str = 'old'
    kl: Any = None
    kl_coef: float = 0.0
    correction: Any = none
    selection: Any = none
    regularizers: tuple = ()
    dead_groups: str = 'keep'
    gate: str = 'reward'
    taught: bool = False  # a teacher's gain is added to the advantages
    sequence_kl: float = 0.0  # of a KL in the reward of a completion
    token_kl: float = 0.0  # of a KL that is taken off the advantage of each token
    kl_corrected: bool = False
    changes: dict = {}


class Known(NamedTuple):
    """What is constant in a loss: masks, advantages, and logs of ratios at the batch's own logprobs."""

    batch: Batch
    mask: np.ndarray
    a: np.ndarray
    base: np.ndarray
    d_now: np.ndarray
    log_rho: np.ndarray


def advantages(method, batch):
    """f64[P, G, 1 or C]."""
    rewards = batch.rewards
    dead = estimators.dead_groups(batch, method.gate)
    if method.sequence_kl:
        drift = np.where(batch.mask, batch.old - batch.ref, 0).sum(-1).reshape(rewards.shape)
        rewards = np.where(dead[:, None] & batch.known, 0, rewards) - method.sequence_kl * drift
        dead = np.zeros_like(dead)
    found = getattr(estimators, method.advantage)(batch._replace(rewards=rewards)).reshape(*rewards.shape, -1)
    if method.advantage in COMPARING:
        found = np.where(dead[:, None, None], 0, found)
    if method.dead_groups == 'reweight' and not dead.all():
        found = found * len(dead) / (~dead).sum()
    if method.token_kl:
        found = found - method.token_kl * batch.by_group(np.where(batch.whole, batch.old - batch.ref, 0))
    if method.taught:
        found = found + batch.by_group(np.where(batch.mask, batch.teacher - batch.old, 0))
    return found


# estimators that compare the outcomes of a group, and so give 0 to a dead one
COMPARING = {
    *('best_and_worst', 'group_mean', 'group_norm', 'leave_one_out', 'leave_one_out_norm', 'maxrl', 'opo', 'pkpo'),
    *('batch_centred_std', 'group_mean_batch_std', 'hybrid', 'grpo_lambda', 'gtpo', 'xrpo_sharpen'),
}


def constants(method, batch):
    """The Known of a batch; dropped groups leave the mask."""
    a = advantages(method, batch)
    mask = batch.mask
    if method.dead_groups == 'drop':
        mask = mask & ~np.repeat(estimators.dead_groups(batch, method.gate), batch.rewards.shape[1])[:, None]
    base = getattr(batch, method.base)
    return Known(
        batch,
        mask,
        a.reshape(len(mask), -1),
        base,
        np.where(mask, batch.new - base, 0),
        np.where(mask, batch.old - batch.sampler, 0),
    )


def token_terms(method, x, new):
    """[f64[..., B, C]]: each token's share of the loss's terms."""
    if method.surrogate is dpo:
        return [dpo(x, new)]
    weights = method.weights(x.mask, x.batch.rewards.shape)
    d = np.where(x.mask, new - x.base, 0)
    r, r_now = method.ratio(d, x.d_now, x.mask, x.a), method.ratio(x.d_now, x.d_now, x.mask, x.a)
    correction = method.correction(x)
    terms = [np.where(x.mask, weights * correction * method.selection(x) * method.surrogate(x, r, r_now, new), 0)]
    if method.kl:
        corrected = correction if method.kl_corrected else 1.0
        terms.append(np.where(x.mask, weights * method.kl_coef * corrected * method.kl(x, new), 0))
    for regularizer in method.regularizers:
        term, among = regularizer(x, new)
        terms.append(np.where(among, term, 0) / max(among.sum(), 1))
    return terms


def dpo(x, new, beta=0.1):
    """-log sigmoid of a pair's margin, a mean over pairs that have tokens, at the first place of the chosen row."""
    total, shape = np.zeros(new.shape), x.batch.rewards.shape
    gain = np.where(x.mask, new - x.batch.ref, 0).sum(-1)
    pairs = []
    for p, a in enumerate(x.a.reshape(shape)):
        if a.any():
            best, worst = (p * shape[1] + np.argmax(s * a) for s in (1, -1))
            if x.mask[best].any() or x.mask[worst].any():
                pairs.append((best, worst))
    for best, worst in pairs:
        margin = beta * (gain[..., best] - gain[..., worst])
        total[..., best, 0] = np.logaddexp(0, -margin) / len(pairs)
    return total


def loss_and_gradient(method, x, step=1e-5):
    """(loss, gradient [B, C], scale), the gradient by differences, the scale the sum of the terms without their signs.

    A token moves the loss of its group alone, so that all groups move together. Terms are compared one by one, since
    the largest would swallow the others.
    """
    now, (groups, size), columns = x.batch.new, x.batch.rewards.shape, x.mask.shape[1]
    moves = np.zeros((size, columns, groups, size, columns))
    for g, t in np.ndindex(size, columns):
        moves[g, t, :, g, t] = step
    moves = moves.reshape(size, columns, *now.shape)
    gradient = np.zeros((size, columns, groups))
    for more, less in zip(token_terms(method, x, now + moves), token_terms(method, x, now - moves), strict=True):
        gradient += (more - less).reshape(size, columns, groups, -1).sum(-1) / (2 * step)
    terms = np.stack(token_terms(method, x, now))
    return terms.sum(), gradient.transpose(2, 0, 1).reshape(now.shape), np.abs(terms).sum()


def value_loss(batch, kl_coef, lambdas):
    """Half the clipped squared error of the critic, a mean over the tokens of completions with a reward."""
    targets = estimators.generalized(batch, kl_coef, lambdas) + batch.values
    near = np.clip(batch.new_values, batch.values - 0.2, batch.values + 0.2)
    error = np.maximum((batch.new_values - targets) ** 2, (near - targets) ** 2) / 2
    return estimators.mean(error, batch.whole).item()


def metrics(method, x):
    """The metrics that the specification names, by the names of docs/metrics.md."""
    batch, mask = x.batch, x.mask
    a, gaps = x.a + np.zeros(mask.shape), np.abs(batch.old - batch.sampler)
    ratio = method.ratio(x.d_now, x.d_now, mask, x.a)
    rho = np.where(mask, bounded_exp(x.log_rho), 0)
    correct = batch.correct.reshape(-1, 1)
    found = {
        'ratio_mean': over(mask, ratio),
        'ratio_max': ratio.max(where=mask, initial=0),
        'kl_old': over(mask, bounded_k3(x.d_now)),
        'logprob_change_better': over(mask & (a > 0), x.d_now),
        'logprob_change_worse': over(mask & (a < 0), x.d_now),
        'entropy': over(mask, batch.entropy),
        'sampler_gap_mean': over(mask, gaps),
        'sampler_gap_max': gaps.max(where=mask, initial=0),
        'sampler_ess': rho.sum() ** 2 / max(mask.sum() * (rho**2).sum(), 1e-300),
        'correction_mean': over(mask, method.correction(x) + np.zeros(mask.shape)),
        'logprob': over(mask, batch.new, np.nan),
        'logprob_right': over(mask & (correct == 1), batch.new, np.nan),
        'logprob_wrong': over(mask & (correct == 0), batch.new, np.nan),
    }
    return found | ({'kl_ref': over(mask, k3(x, batch.new))} if method.kl else {})


def over(among, x, nothing=0.0):
    return x[among].mean() if among.any() else nothing


CLIP_HIGHER = functools.partial(clip, high=0.28)
METHODS = {
    'cispo': Method('group_norm', cispo, token_mean, changes=dict(cispo_cap=2.0)),
    'clip_cov': Method(
        'group_norm', clip, token_mean, selection=clip_cov, changes=dict(covariance_low=0.05, covariance_share=0.2)
    ),
    'dapo': Method('group_norm', CLIP_HIGHER, token_mean, dead_groups='drop', gate='outcome'),
    'deepseek_r1': Method('group_norm', functools.partial(clip, low=10, high=10), sequence_mean, kl=k3, kl_coef=1e-3),
    'deepseek_v32': Method(
        'group_norm',
        clip,
        sequence_mean,
        kl=k3_importance,
        kl_coef=1e-3,
        correction=opsm,
        changes=dict(opsm_delta=0.05),
    ),
    'default_rlvr': Method(
        'group_mean', dual_clip, token_mean, correction=truncated, dead_groups='drop', changes=dict(dual_clip=1.5)
    ),
    'dpo': Method('best_and_worst', dpo, None),
    'dppo': Method(
        'group_mean',
        dppo_tv,
        token_mean,
        base='sampler',
        regularizers=(behaviour_k2,),
        changes=dict(dppo_low=0.1, dppo_high=0.1),
    ),
    'dr_grpo': Method('group_mean', clip, fixed_length, changes=dict(fixed_length=5)),
    'entropy_8020': Method(
        'group_norm', CLIP_HIGHER, token_mean, selection=high_entropy, dead_groups='drop', gate='outcome'
    ),
    'gmpo': Method('group_norm', importance, sequence_mean, ratio=clipped_geometric),
    'gpg': Method('group_mean', policy_gradient, sequence_mean, dead_groups='reweight'),
    'grpo': Method('group_norm', clip, sequence_mean, kl=k3, kl_coef=0.04),
    'grpo_iterative': Method('group_norm', clip, sequence_mean, kl=k3, kl_coef=0.04),
    'grpo_lambda': Method('grpo_lambda', clip, sequence_mean, kl=k3, kl_coef=0.04, gate='none'),
    'grpo_process': Method('process', clip, sequence_mean, kl=k3, kl_coef=0.04),
    'gspo': Method('group_norm', functools.partial(clip, low=3e-4, high=4e-4), sequence_mean, ratio=sequence_geometric),
    'gspo_token': Method(
        'group_norm', functools.partial(clip, low=3e-4, high=4e-4), sequence_mean, ratio=sequence_geometric_token
    ),
    'gtpo': Method('gtpo', policy_gradient, sequence_mean),
    'kl_cov': Method('group_norm', importance, token_mean, regularizers=(kl_cov,), changes=dict(covariance_share=0.2)),
    'lite_ppo': Method('hybrid', clip, token_mean),
    'llds_grpo': Method('group_norm', clip, token_mean, kl=k3, kl_coef=1e-3, regularizers=(llds,)),
    'm2po': Method('group_norm', importance, token_mean, base='sampler', selection=m2po),
    'maxrl': Method('maxrl', clip, token_mean),
    'olmo3_like': Method(
        'group_mean',
        functools.partial(clip, high=0.272),
        token_mean,
        kl=k3,
        kl_coef=0.05,
        correction=truncated,
        dead_groups='drop',
    ),
    'online_rft': Method('correct', policy_gradient, sequence_mean),
    'opd': Method('zeros', importance, token_mean, taught=True),
    'opd_reward': Method('group_mean', clip, token_mean, taught=True),
    'opo': Method('opo', policy_gradient, token_mean),
    'pkpo': Method('pkpo', clip, token_mean, changes=dict(pass_k=2)),
    'ppo': Method('gae', clip, token_mean),
    'reinforce': Method('reward', policy_gradient, sequence_sum),
    'reinforce_moving': Method('moving_mean', policy_gradient, sequence_sum),
    'reinforce_pp': Method('reinforce_pp', clip, token_mean),
    'reinforce_pp_baseline': Method('group_mean_batch_std', clip, token_mean, kl=k2, kl_coef=1e-3),
    'rft': Method('correct', policy_gradient, sequence_mean),
    'rloo': Method('leave_one_out', clip, sequence_mean, ratio=sequence_product, sequence_kl=0.05),
    'sapo': Method('group_norm', sapo, sequence_mean),
    'scalerl': Method('batch_centred_std', cispo, prompt_mean, dead_groups='drop', changes=dict(cispo_cap=2.0)),
    'sft': Method('ones', policy_gradient, token_mean),
    'vapo': Method('gae_by_length', CLIP_HIGHER, token_mean, regularizers=(positive_nll,)),
    'xrpo': Method('xrpo_sharpen', clip, sequence_mean),
}

# what no preset chooses
OTHERS = {
    'dppo by KL': Method(
        'group_mean',
        dppo_kl,
        token_mean,
        base='sampler',
        regularizers=(behaviour_k2,),
        changes=dict(surrogate='dppo_kl', dppo_low=0.01, dppo_high=0.01),
    ),
    'vespo': Method('group_norm', vespo, sequence_mean, changes=dict(surrogate='vespo')),
    'k3 with the gradient of k2': Method(
        'group_norm', clip, sequence_mean, kl=k3_straight_through, kl_coef=0.04, changes=dict(kl='k3_straight_through')
    ),
    'absolute KL': Method('group_norm', clip, sequence_mean, kl=absolute, kl_coef=0.04, changes=dict(kl='absolute')),
    'a corrected KL': METHODS['olmo3_like']._replace(kl_corrected=True, changes=dict(kl_corrected=True)),
    'a constant denominator': Method(
        'hybrid', clip, constant, changes=dict(weights='constant', loss_denominator=100.0)
    ),
    'icepop': Method('hybrid', clip, token_mean, correction=icepop, changes=dict(correction='icepop')),
    'truncated_product': Method(
        'hybrid', clip, token_mean, correction=truncated_product, changes=dict(correction='truncated_product')
    ),
    'masked_product': Method(
        'hybrid', clip, token_mean, correction=masked_product, changes=dict(correction='masked_product')
    ),
    'masked_geometric': Method(
        'hybrid',
        clip,
        token_mean,
        correction=masked_geometric,
        changes=dict(correction='masked_geometric', geometric_low=0.8, geometric_high=1.25),
    ),
    'veto': Method('hybrid', clip, token_mean, correction=veto, changes=dict(correction='veto', veto_below=0.5)),
    'distillation as a loss': Method(
        'hybrid', clip, token_mean, regularizers=(distill,), changes=dict(regularizers=('distill',))
    ),
    'leave_one_out_norm': Method('leave_one_out_norm', clip, token_mean, changes=dict(advantage='leave_one_out_norm')),
    'a KL off each token': Method(
        'group_mean',
        clip,
        fixed_length,
        token_kl=0.3,
        changes=dict(kl='k1', kl_coef=0.3, kl_placement='reward_token', fixed_length=5),
    ),
    'prompt_moving_mean': Method('prompt_moving_mean', clip, token_mean, changes=dict(advantage='prompt_moving_mean')),
}
# the preset whose config is changed to each of these
ORIGINS = {
    **dict.fromkeys(OTHERS, 'lite_ppo'),
    'dppo by KL': 'dppo',
    'vespo': 'sapo',
    'k3 with the gradient of k2': 'grpo',
    'absolute KL': 'grpo',
    'a corrected KL': 'olmo3_like',
    'a KL off each token': 'dr_grpo',
}
