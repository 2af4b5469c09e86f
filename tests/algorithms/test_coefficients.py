"""The gradient coefficients of every preset against derivatives written out by hand in numpy, in float64.

Nothing of grpo_jax takes part in what is expected; the advantages, constants here, are the method's own.
"""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import fixture
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import corrections, kl, pieces, ratios, regularizers, selections, surrogates, weights


class Case(NamedTuple):
    """What a method's loss is made of; its derivative in each logprob follows."""

    preset: str
    policy: Any  # (x, weights) -> derivative of sum(weights * surrogate) in each logprob
    weights: Any  # x -> [8, 5]
    terms: tuple = ()  # x -> derivative of what is added to each token's loss
    factors: tuple = ()  # x -> [8, 5] or [8, 1], constants on the surrogate
    changes: dict = {}  # of the preset's config, for pieces to act on so small an example


# ratios: value, and what a derivative in the value becomes in each logprob. Beyond a clamp nothing comes back


def clamped_exp(log, most):
    return np.exp(np.clip(log, -most, most)), np.abs(log) < most


def row_sum(values):
    return values.sum(-1, keepdims=True)


def token(x):
    value, alive = clamped_exp(x.log_ratio, 20)
    return value, lambda slope: slope * value * alive


def product(x):
    value, alive = clamped_exp(row_sum(x.log_ratio), 20)
    return value, lambda slope: row_sum(slope * value * alive * x.mask)


def geometric(x):
    value, alive = clamped_exp(row_sum(x.log_ratio) / x.lengths, 10)
    return value, lambda slope: row_sum(slope * value * alive * x.mask) / x.lengths


def geometric_token(x):
    value, alive = clamped_exp(row_sum(x.log_ratio) / x.lengths, 10)
    return value, lambda slope: slope * value * alive


def clipped_geometric(x, bound=0.4):
    inside = np.where(x.advantages > 0, x.log_ratio < bound, x.log_ratio > -bound)
    clipped = np.where(inside, x.log_ratio, np.where(x.advantages > 0, bound, -bound))
    value, alive = clamped_exp(row_sum(clipped) / x.lengths, 10)
    return value, lambda slope: inside * row_sum(slope * value * alive * x.mask) / x.lengths


# surrogates: those of the ratio by their slope in it, the others by logprob


def of_ratio(slope, ratio=token):
    def policy(x, w):
        value, back = ratio(x)
        return back(w * slope(x, value))

    return policy


def clip(low=0.2, high=0.2, dual=np.inf):
    def slope(x, r):
        cut = np.where(x.advantages > 0, r > 1 + high, (r < 1 - low) | (r > dual))
        return np.where(cut, 0, -x.advantages)

    return slope


def importance(x, r):
    return -x.advantages


def sapo(x, r):
    tau = np.where(x.advantages > 0, 1.0, 1.05)
    gate = 1 / (1 + np.exp(-np.minimum(tau * (r - 1), 700)))
    return -4 * gate * (1 - gate) * x.advantages


def dppo_tv(x, r, bound=0.2):
    moved = np.exp(x.logprobs) - np.exp(x.base)
    return np.where(np.where(x.advantages > 0, moved > bound, moved < -bound), 0, -x.advantages)


def dppo_kl(x, r, bound=0.004):
    now, base = (np.clip(np.exp(logprobs), 1e-6, 1 - 1e-6) for logprobs in (x.logprobs, x.base))
    distance = base * np.log(base / now) + (1 - base) * np.log((1 - base) / (1 - now))
    return np.where((distance > bound) & np.where(x.advantages > 0, now > base, now < base), 0, -x.advantages)


def policy_gradient(x, w):
    return -w * x.advantages


def cispo(x, w):
    return -w * np.minimum(token(x)[0], 5) * x.advantages


def vespo(x, w):
    power, rate = np.where(x.advantages > 0, 2, 3), np.where(x.advantages > 0, 3, 2)
    total = np.clip(row_sum(x.log_ratio), -20, 20)
    return -w * np.exp(power * total + rate * (1 - np.exp(total))) * x.advantages


def dpo(x, w):
    # rows 0 and 1 are the best and the worst of the first prompt, 4 and 7 of the second
    gain, found = row_sum((x.logprobs - x.ref) * x.mask), np.zeros((8, 5))
    for rows, best, worst in [(slice(0, 4), 0, 1), (slice(4, 8), 4, 7)]:
        pull = np.sum(w[rows]) * 0.1 / (1 + np.exp(0.1 * (gain[best] - gain[worst])))
        found[best], found[worst] = -pull, pull
    return found


# terms that are added


def k2(coef):
    return lambda x: coef * (x.logprobs - x.ref) * (np.abs(x.ref - x.logprobs) < 20)


def k3_and_slope(x):
    d = x.ref - x.logprobs
    value = np.exp(np.clip(d, -20, 20)) - np.clip(d, -20, 20) - 1
    return np.minimum(value, 10), np.where((np.abs(d) < 20) & (value < 10), 1 - np.exp(np.minimum(d, 20)), 0)


def k3(coef):
    return lambda x: coef * k3_and_slope(x)[1]


def k3_importance(coef):
    def slope(x):
        value, own = k3_and_slope(x)
        ratio, alive = clamped_exp(x.log_ratio, 20)
        return coef * ratio * (own + alive * value)

    return slope


def absolute(coef):
    return lambda x: coef * np.sign(x.logprobs - x.ref) * (np.abs(x.ref - x.logprobs) < 20)


def llds(x):
    lost = -x.log_ratio
    return -0.2 * ((row_sum(lost) > 0) & (x.advantages >= 0) & (lost > 0))


def positive_nll(x):
    right = x.mask & (fixture.REWARDS.reshape(8, 1) == 1)
    return np.where(right, -0.1, 0) * x.mask.sum() / right.sum()  # a mean over these tokens, where w is one over all


def behaviour_k2(x):
    apart = x.logprobs - x.sampler
    return 2e-3 * apart * (np.abs(apart) < 20)


def distill(x):
    ratio, alive = clamped_exp(x.log_ratio, 20)
    return ratio * (alive * (x.logprobs - fixture.TEACHER) + 1)  # of ratio * (logprob - the teacher's)


def kl_cov(x):
    return highest(covariance(x), x.mask, 4) * np.sign(x.log_ratio)


# factors


def covariance(x):
    advantages = np.broadcast_to(x.advantages, (8, 5))
    return (advantages - advantages[x.mask].mean()) * (x.old - x.old[x.mask].mean())


def highest(values, among, count):
    return among & (values >= np.sort(values[among])[::-1][:count].min(initial=np.inf))


def clip_cov(x):
    among = x.mask & (covariance(x) >= 0.05) & (covariance(x) <= 5)
    return ~highest(covariance(x), among, 4)


def high_entropy(x):
    return fixture.ENTROPY >= np.quantile(fixture.ENTROPY[x.mask], 0.8)


def m2po(x):
    squares = np.sort(x.log_rho[x.mask] ** 2)
    kept = squares[np.cumsum(squares) / np.arange(1, 25) <= 0.04]
    return x.log_rho**2 <= kept.max(initial=-1)


def rho(x):
    return clamped_exp(x.log_rho, 20)[0]


def truncated(x):
    return np.minimum(rho(x), 2)


def rho_product(x):
    return clamped_exp(row_sum(x.log_rho), 20)[0]


def opsm(x, delta=0.05):
    drift = row_sum((x.sampler - x.logprobs) * x.mask) / x.lengths
    return ~((x.advantages < 0) & (drift > delta))


def within(low, value, high):
    return (value >= low) & (value <= high)


# weights: rows of the two prompts have 10 and 14 tokens, 24 in all


def sequence_mean(x):
    return 1 / x.lengths / 8


def token_mean(x):
    return np.full((8, 1), 1 / 24)


def prompt_mean(x):
    return np.repeat([1 / 20, 1 / 28], 4)[:, None]


def every(value):
    return lambda x: np.full((8, 1), value)


CASES = {
    case.preset: case
    for case in [
        Case('cispo', cispo, token_mean),
        Case(
            'clip_cov',
            of_ratio(clip()),
            token_mean,
            factors=(clip_cov,),
            changes=dict(covariance_low=0.05, covariance_share=0.2),
        ),
        Case('dapo', of_ratio(clip(0.2, 0.28)), token_mean),
        Case('deepseek_r1', of_ratio(clip(10, 10)), sequence_mean, (k3(1e-3),)),
        Case('deepseek_v32', of_ratio(clip()), sequence_mean, (k3_importance(1e-3),), (opsm,), dict(opsm_delta=0.05)),
        Case(
            'default_rlvr',
            of_ratio(clip(0.2, 0.28, dual=1.1)),
            token_mean,
            factors=(truncated,),
            changes=dict(dual_clip=1.1),
        ),
        Case('dpo', dpo, sequence_mean),
        Case('dppo', of_ratio(dppo_tv), token_mean, (behaviour_k2,)),
        Case('dr_grpo', of_ratio(clip()), every(1 / 40), changes=dict(fixed_length=5)),
        Case('entropy_8020', of_ratio(clip(0.2, 0.28)), token_mean, factors=(high_entropy,)),
        Case('gmpo', of_ratio(importance, clipped_geometric), sequence_mean),
        Case('gpg', policy_gradient, sequence_mean),
        Case('grpo', of_ratio(clip()), sequence_mean, (k3(0.04),)),
        Case('grpo_iterative', of_ratio(clip()), sequence_mean, (k3(0.04),)),
        Case('grpo_lambda', of_ratio(clip()), sequence_mean, (k3(0.04),)),
        Case('grpo_process', of_ratio(clip()), sequence_mean, (k3(0.04),)),
        Case('gspo', of_ratio(clip(3e-4, 4e-4), geometric), sequence_mean),
        Case('gspo_token', of_ratio(clip(3e-4, 4e-4), geometric_token), sequence_mean),
        Case('gtpo', policy_gradient, sequence_mean),
        Case('kl_cov', of_ratio(importance), token_mean, (kl_cov,), changes=dict(covariance_share=0.2)),
        Case('lite_ppo', of_ratio(clip()), token_mean),
        Case('llds_grpo', of_ratio(clip()), token_mean, (k3(1e-3), llds)),
        Case('m2po', of_ratio(importance), token_mean, factors=(m2po,)),
        Case('maxrl', of_ratio(clip()), token_mean),
        Case('olmo3_like', of_ratio(clip(0.2, 0.272)), token_mean, (k3(0.05),), (truncated,)),
        Case('online_rft', policy_gradient, sequence_mean),
        Case('opd', of_ratio(importance), token_mean),
        Case('opd_reward', of_ratio(clip()), token_mean),
        Case('opo', policy_gradient, token_mean),
        Case('pkpo', of_ratio(clip()), token_mean, changes=dict(pass_k=2)),
        Case('ppo', of_ratio(clip()), token_mean),
        Case('reinforce', policy_gradient, every(1 / 8)),
        Case('reinforce_moving', policy_gradient, every(1 / 8)),
        Case('reinforce_pp', of_ratio(clip()), token_mean),
        Case('reinforce_pp_baseline', of_ratio(clip()), token_mean, (k2(1e-3),)),
        Case('rft', policy_gradient, sequence_mean),
        Case('rloo', of_ratio(clip(), product), sequence_mean),
        Case('sapo', of_ratio(sapo), sequence_mean),
        Case('scalerl', cispo, prompt_mean),
        Case('sft', policy_gradient, token_mean),
        Case('vapo', of_ratio(clip(0.2, 0.28)), token_mean, (positive_nll,)),
        Case('xrpo', of_ratio(clip()), sequence_mean),
    ]
}
OTHERS = {
    'dppo by KL': Case(
        'dppo',
        of_ratio(dppo_kl),
        token_mean,
        (behaviour_k2,),
        changes=dict(surrogate='dppo_kl', dppo_low=0.004, dppo_high=0.004),
    ),
    'vespo': Case('sapo', vespo, sequence_mean, changes=dict(surrogate='vespo')),
    'k3 with the gradient of k2': Case(
        'grpo', of_ratio(clip()), sequence_mean, (k2(0.04),), changes=dict(kl='k3_straight_through')
    ),
    'absolute KL': Case('grpo', of_ratio(clip()), sequence_mean, (absolute(0.04),), changes=dict(kl='absolute')),
    'a constant denominator': Case(
        'dr_grpo', of_ratio(clip()), every(0.01), changes=dict(weights='constant', loss_denominator=100.0)
    ),
    'icepop': Case(
        'dapo',
        of_ratio(clip(0.2, 0.28)),
        token_mean,
        factors=(lambda x: rho(x) * within(0.5, rho(x), 5),),
        changes=dict(correction='icepop'),
    ),
    'truncated_product': Case(
        'dapo',
        of_ratio(clip(0.2, 0.28)),
        token_mean,
        factors=(lambda x: np.minimum(rho_product(x), 2),),
        changes=dict(correction='truncated_product'),
    ),
    'masked_product': Case(
        'dapo',
        of_ratio(clip(0.2, 0.28)),
        token_mean,
        factors=(lambda x: rho_product(x) * (rho_product(x) <= 3),),
        changes=dict(correction='masked_product'),
    ),
    'masked_geometric': Case(
        'dapo',
        of_ratio(clip(0.2, 0.28)),
        token_mean,
        factors=(lambda x: rho(x) * within(-0.34, row_sum(x.log_rho) / x.lengths, 0.27),),
        changes=dict(correction='masked_geometric', geometric_low=np.exp(-0.34), geometric_high=np.exp(0.27)),
    ),
    'veto': Case(
        'dapo',
        of_ratio(clip(0.2, 0.28)),
        token_mean,
        factors=(lambda x: np.min(x.log_rho, -1, keepdims=True) >= np.log(0.41),),
        changes=dict(correction='veto', veto_below=0.41),
    ),
    'distillation as a loss': Case(
        'dapo', of_ratio(clip(0.2, 0.28)), token_mean, (distill,), changes=dict(regularizers=('distill',))
    ),
    'a corrected KL': Case(
        'olmo3_like',
        of_ratio(clip(0.2, 0.272)),
        token_mean,
        (lambda x: k3(0.05)(x) * truncated(x),),
        (truncated,),
        dict(kl_corrected=True),
    ),
}
EVERY = CASES | OTHERS
# the worked example has log ratios of exactly 0, which lie on the kinks of |x| and of max(x, 0): a little beside them
OLD, REF = fixture.OLD + 0.003 * np.arange(1, 6), fixture.REF + 0.002 * np.arange(1, 6)
ALTERNATING = np.where(np.add.outer(np.arange(8), np.arange(5)) % 2, 50.0, -35.0)
EXTREMES = {
    f'{name} {size}': {name: shift}
    for name in ('policy', 'sampler')
    for size, shift in [(50, 50.0), (-50, -50.0), ('mixed', ALTERNATING)]
}


@pytest.fixture(params=EVERY)
def case(request):
    return EVERY[request.param]


def found(case, old=OLD, ref=REF, sampler=fixture.SAMPLER):
    """(loss, coefficients, method, experience) of the example with some of its logprobs replaced."""
    method = fixture.algorithm(case.preset, **case.changes)
    experience = fixture.worked(method, old=old, ref=ref, sampler=sampler)
    loss, coefficients = loss_and_coefficients(method, jnp.asarray(fixture.LOGPROBS, jnp.float32), experience)
    return float(loss), np.asarray(coefficients), method, experience


@functools.partial(jax.jit, static_argnums=0)
def loss_and_coefficients(method, logprobs, experience):
    return (
        algorithms.policy_loss(method, logprobs, experience)[0],
        algorithms.gradient_coefficients(method, logprobs, experience),
    )


def expected(case, method, experience, old=OLD, ref=REF, sampler=fixture.SAMPLER):
    """f64[8, 5] minus the derivative of the loss in each logprob."""
    mask, base = fixture.MASK, sampler if method.ratio_base == 'sampler' else old
    x = SimpleNamespace(
        logprobs=fixture.LOGPROBS,
        old=old,
        ref=ref,
        sampler=sampler,
        base=base,
        mask=mask,
        lengths=fixture.LENGTHS[:, None],
        advantages=np.asarray(experience.advantages, np.float64),
        log_ratio=np.where(mask, fixture.LOGPROBS - base, 0),
        log_rho=np.where(mask, old - sampler, 0),
    )
    w = case.weights(x) * mask
    factor = np.prod(np.broadcast_arrays(np.ones((8, 5)), *(f(x) for f in case.factors)), 0)
    return np.where(mask, -1.0, 0) * (case.policy(x, w * factor) + w * sum(term(x) for term in case.terms))


def test_every_preset_and_every_piece_of_the_device_is_in_the_tables():
    assert sorted(CASES) == fixture.PRESETS
    methods = [fixture.algorithm(case.preset, **case.changes) for case in EVERY.values()]
    used = {
        id(getattr(piece, 'func', piece))
        for method in methods
        for piece in (*method[1:5], method.correction, method.selection, *method.regularizers)
    }
    left = {
        name
        for module in (ratios, surrogates, weights, kl, corrections, selections, regularizers)
        for name, piece in pieces.list_pieces(module).items()
        if id(piece) not in used
    }
    assert left == {'entropy_bonus'}  # it acts on the entropy and not on logprobs


def test_coefficients_are_those_by_hand(case):
    loss, coefficients, method, experience = found(case)
    assert np.isfinite(loss)
    np.testing.assert_allclose(coefficients, expected(case, method, experience), rtol=0, atol=1e-6)
    assert np.any(coefficients)


def test_what_a_case_lists_acts_on_the_example(case):
    # a term or a factor without effect here would leave its derivative unseen
    _, coefficients, method, experience = found(case)
    for i in range(len(case.terms)):
        without = case._replace(terms=case.terms[:i] + case.terms[i + 1 :])
        assert np.abs(coefficients - expected(without, method, experience)).max() > 2e-6
    for i in range(len(case.factors)):
        without = case._replace(factors=case.factors[:i] + case.factors[i + 1 :])
        assert np.abs(coefficients - expected(without, method, experience)).max() > 2e-6


@pytest.mark.parametrize('extreme', EXTREMES)
def test_log_ratios_up_to_fifty_give_the_same_and_stay_finite(case, extreme):
    shift = EXTREMES[extreme]
    if 'policy' in shift:
        old = fixture.LOGPROBS - shift['policy']
        changes = dict(old=old, sampler=old, ref=fixture.LOGPROBS + shift['policy'])
    else:
        changes = dict(sampler=OLD - shift['sampler'])
    loss, coefficients, method, experience = found(case, **changes)
    assert np.isfinite(loss) and np.all(np.isfinite(coefficients))
    assert np.all(coefficients[~fixture.MASK] == 0)
    np.testing.assert_allclose(coefficients, expected(case, method, experience, **changes), rtol=1e-4, atol=1e-6)
