"""A step from rewards to the gradient in logprobs, against plain loops in float64; some completions are unscorable.

Gradients of the reference are differences of its loss; nothing of it is shared with the package.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.configs import default
from grpo_jax.learner import critic
from grpo_jax.learner.experience import drop_truncated, make_experience
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import Rollout, TrainState

P, G, C = 3, 4, 5
ROWS = [(p, g) for p in range(P) for g in range(G)]
RNG = np.random.default_rng(5)
LENGTHS = RNG.integers(1, C + 1, P * G)
NEW, OLD, REF, VALUES, NEW_VALUES = (RNG.normal(0, 0.3, (P * G, C)).round(3) for _ in range(5))
NEW, OLD, REF = NEW - 1.5, OLD - 1.5, REF - 1.5
ENTROPY = RNG.uniform(0.1, 0.9, (P * G, C)).round(3)
TOKENS = RNG.integers(0, 2, (P * G, C))
FORCED = RNG.uniform(size=(P * G, C)) < 0.2
NAN = math.nan
# a mixed group, one that is all wrong with a length term, one of which a completion alone can be scored
REWARDS = np.array([[1.0, NAN, 0.1, 0.0], [0.0, -0.01, 0.02, NAN], [NAN, NAN, 1.0, NAN]])
CORRECT = np.array([[1.0, NAN, 0.0, 0.0], [0.0, 0.0, 0.0, NAN], [NAN, NAN, 1.0, NAN]])
STEPS = np.where(RNG.uniform(size=(P * G, C)) < 0.5, RNG.uniform(0, 1, (P * G, C)).round(2), NAN)


def sampled(forced):
    """The positions of each row that carry loss."""
    return [[t for t in range(LENGTHS[b]) if not (forced and FORCED[b, t])] for b in range(P * G)]


def scorable(b):
    return not math.isnan(REWARDS[ROWS[b]])


def mean(x):
    return sum(x) / len(x)


def std(x):
    return math.sqrt(sum((y - mean(x)) ** 2 for y in x) / (len(x) - 1))


def returns_of(lambda_, kl_coef):
    """{(row, token): generalized advantage} of scorable rows, lambda_ a function of the row's length."""
    sums = {}
    for b in filter(scorable, range(P * G)):
        total, following = 0.0, 0.0
        for t in reversed(range(LENGTHS[b])):
            earned = -kl_coef * (OLD[b, t] - REF[b, t]) + (REWARDS[ROWS[b]] if t == LENGTHS[b] - 1 else 0.0)
            total = earned + following - VALUES[b, t] + lambda_(LENGTHS[b]) * total
            following, sums[b, t] = VALUES[b, t], total
    return sums


def whitened(sums):
    values = list(sums.values())
    variance = sum((x - mean(values)) ** 2 for x in values) / (len(values) - 1)
    return {key: (x - mean(values)) / math.sqrt(variance + 1e-8) for key, x in sums.items()}


def clipped(a, ratio, low=0.2, high=0.2):
    return max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))


def ppo(new):
    a, tokens = whitened(returns_of(lambda n: 0.95, 0.05)), sampled(False)
    count = sum(map(len, tokens))
    return sum(
        clipped(a.get((b, t), 0.0), math.exp(new[b, t] - OLD[b, t])) / count for b in range(P * G) for t in tokens[b]
    )


def vapo(new):
    a, tokens = whitened(returns_of(lambda n: max(1 - 1 / (0.05 * n), 0.0), 0.0)), sampled(False)
    count, right = sum(map(len, tokens)), [b for b in range(P * G) if CORRECT[ROWS[b]] == 1]
    policy = sum(
        clipped(a.get((b, t), 0.0), math.exp(new[b, t] - OLD[b, t]), 0.2, 0.28) / count
        for b in range(P * G)
        for t in tokens[b]
    )
    return policy - 0.1 * mean([new[b, t] for b in right for t in tokens[b]])


def scalerl(new):
    # only the first group is alive: the second is all wrong, and of the third one completion is known
    groups = [[REWARDS[p, g] for g in range(G) if not math.isnan(REWARDS[p, g])] for p in range(P)]
    centred = [x - mean(group) for group in groups for x in group]
    spread, tokens = std(centred) + 1e-6, sampled(False)
    alive = range(G)
    count = sum(len(tokens[b]) for b in alive)
    loss = 0.0
    for b in filter(scorable, alive):
        a = (REWARDS[ROWS[b]] - mean(groups[0])) / spread
        for t in tokens[b]:
            loss -= min(math.exp(NEW[b, t] - OLD[b, t]), 5.0) * a * new[b, t] / count  # the weight is a constant
    return loss


def grpo_process(new):
    tokens, loss = sampled(False), 0.0
    for p in range(P):
        rows = [p * G + g for g in range(G)]
        ends = {
            (b, t): STEPS[b, t] for b in rows if scorable(b) for t in range(LENGTHS[b]) if STEPS[b, t] == STEPS[b, t]
        }
        values = list(ends.values())
        spread = (std(values) if len(values) > 1 else 0.0) + 1e-6
        for b in rows:
            for t in tokens[b]:
                a = sum((x - mean(values)) / spread for (row, end), x in ends.items() if row == b and end >= t)
                d = REF[b, t] - new[b, t]
                loss += (
                    (clipped(a, math.exp(new[b, t] - OLD[b, t])) + 0.04 * (math.exp(d) - d - 1))
                    / len(tokens[b])
                    / P
                    / G
                )
    return loss


def gtpo(new):
    tokens, loss = sampled(True), 0.0
    whole = [b for b in range(P * G) if tokens[b]]
    first = mean([ENTROPY[b, t] for b in range(P * G) for t in tokens[b]])
    known = [REWARDS[0, g] for g in range(G) if scorable(g)]
    signs = {b: (REWARDS[ROWS[b]] - mean(known)) / (std(known) + 1e-6) for b in range(G) if scorable(b)}
    for b, a in signs.items():  # the other groups are dead
        if not tokens[b]:
            continue
        entropy = mean([ENTROPY[b, t] for t in tokens[b]])
        shaped = (a - 0.1 * entropy) * (entropy <= 0.6931 or first > 0.6931)
        shared = set()
        for at in (lambda row, k: k, lambda row, k: LENGTHS[row] - 1 - k):
            for k in range(LENGTHS[b]):
                others = [o for o in signs if signs[o] * a < 0 and k < LENGTHS[o]]
                pairs = [((b, at(b, k)), (o, at(o, k))) for o in others]
                free = [FORCED[x] or FORCED[y] for x, y in pairs]
                same = [TOKENS[x] == TOKENS[y] for x, y in pairs]
                if any(s and not f for s, f in zip(same, free, strict=True)):
                    shared.add(at(b, k))
                elif not any(free):
                    break
        for t in tokens[b]:
            weight = 1.0 if t not in shared else 2.0 if a > 0 else 0.0
            loss -= weight * shaped * new[b, t] / len(tokens[b]) / len(whole)
    return loss


def dpo(new):
    gains = [sum(new[b, t] - REF[b, t] for t in range(LENGTHS[b])) for b in range(G)]
    return math.log(1 + math.exp(-0.1 * (gains[0] - gains[3])))  # the one pair there is: rewards 1 and 0


def dr_grpo(new):
    known = [REWARDS[0, g] for g in range(G) if scorable(g)]
    loss = 0.0
    for b in filter(scorable, range(P * G)):
        a = REWARDS[ROWS[b]] - mean(known) if b < G else 0.0  # the other groups are dead, and keep their KL
        for t in sampled(False)[b]:
            kl = OLD[b, t] - REF[b, t]
            loss += clipped(a - 0.3 * kl, math.exp(new[b, t] - OLD[b, t])) / 16 / P / G
    return loss


REFERENCES = {f.__name__: f for f in (ppo, vapo, scalerl, grpo_process, gtpo, dpo, dr_grpo)}
CHANGES = {'dr_grpo': {'kl': 'k1', 'kl_coef': 0.3, 'kl_placement': 'reward_token', 'fixed_length': 16}}


def experience_of(preset):
    config = default.get_config(preset)
    config.collection.source = 'policy'
    config.algorithm.update(CHANGES.get(preset, {}))
    method = algorithms.make(config.algorithm, config.collection)
    mask = np.arange(C) < LENGTHS[:, None]
    forced = FORCED & mask if preset == 'gtpo' else np.zeros_like(mask)
    rollout = Rollout(
        tokens=jnp.asarray(np.concatenate([np.zeros((P * G, 1)), TOKENS], 1), jnp.int32),
        prompt_mask=jnp.ones((P * G, 1), bool),
        completion_mask=jnp.asarray(mask),
        forced=jnp.asarray(forced),
        logprobs=jnp.asarray(OLD, jnp.float32),
        truncated=jnp.zeros(P * G, bool),
        version=jnp.zeros((P * G, C), jnp.int32),
    )
    known = dict(old_logprobs=OLD, ref_logprobs=REF, old_entropy=ENTROPY)
    known |= dict(values=VALUES) if method.needs_values else {}
    state = TrainState(
        jnp.int32(0), {}, None, None, {'coefficients': method.coefficients, 'initial_entropy': jnp.float32(NAN)}
    )
    experience, _ = make_experience(
        method,
        state,
        rollout,
        {name: jnp.asarray(x, jnp.float32) for name, x in known.items()},
        REWARDS,
        dict(
            dead=algorithms.judge_groups('outcome', REWARDS, CORRECT),
            correct=CORRECT,
            step_rewards=STEPS.reshape(P, G, C),
        ),
        meshes.make({'data': 1, 'fsdp': 1, 'context': 1, 'tensor': 1}),
    )
    return method, experience


@pytest.mark.parametrize('preset', REFERENCES)
def test_loss_and_gradient_are_those_of_plain_loops(preset):
    reference = REFERENCES[preset]
    method, experience = experience_of(preset)
    loss, gradient = jax.value_and_grad(lambda x: algorithms.policy_loss(method, x, experience)[0])(
        jnp.asarray(NEW, jnp.float32)
    )
    assert float(loss) == pytest.approx(reference(NEW), abs=1e-6)
    expected = np.zeros_like(NEW)
    for place in np.ndindex(*NEW.shape):
        moved = [NEW.copy(), NEW.copy()]
        moved[0][place] += 1e-5
        moved[1][place] -= 1e-5
        expected[place] = (reference(moved[0]) - reference(moved[1])) / 2e-5
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-6)
    assert np.any(expected)


def test_truncated_completions_that_are_dropped_leave_the_mean_over_tokens_and_stay_in_their_groups():
    method, experience = experience_of('dapo')
    cut = jnp.arange(P * G) % 3 == 0
    whole = experience.replace(rollout=experience.rollout.replace(truncated=cut))
    dropped = drop_truncated(whole)
    np.testing.assert_array_equal(dropped.advantages, whole.advantages)
    gradient, expected = (
        jax.grad(lambda x, batch=batch: algorithms.policy_loss(method, x, batch)[0])(jnp.asarray(NEW, jnp.float32))
        for batch in (dropped, whole)
    )
    assert np.any(gradient[~cut]) and np.any(expected[cut])
    left = jnp.sum(whole.loss_mask) / jnp.sum(whole.loss_mask[~cut])
    np.testing.assert_allclose(gradient, jnp.where(cut[:, None], 0, expected * left), atol=1e-7)


@pytest.mark.parametrize('preset, lambda_, kl_coef', [('ppo', 0.95, 0.05), ('vapo', 1.0, 0.0)])
def test_the_critics_loss_is_that_of_plain_loops(preset, lambda_, kl_coef):
    _, experience = experience_of(preset)
    sums = returns_of(lambda n: lambda_, kl_coef)
    expected = mean(
        [
            max(
                (NEW_VALUES[place] - target) ** 2,
                (min(max(NEW_VALUES[place], VALUES[place] - 0.2), VALUES[place] + 0.2) - target) ** 2,
            )
            / 2
            for place, total in sums.items()
            for target in [total + VALUES[place]]
        ]
    )
    returns, mask = critic._targets(experience)
    error = critic.value_loss(jnp.asarray(NEW_VALUES, jnp.float32), experience.values, returns, 0.2)
    assert float(jnp.sum(jnp.where(mask, error, 0)) / jnp.sum(mask)) == pytest.approx(expected, abs=1e-6)
