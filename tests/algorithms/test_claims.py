"""What is often said about GRPO and its relatives, held against the code; docs/algorithms.md names these tests."""

import fixture
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import advantages, checks, group_math, ratios
from grpo_jax.configs import default
from grpo_jax.configs.recipes import r1, r1_zero

NORM = dict(std_ddof=0, std_eps=1e-12)


def test_a_product_of_4000_ratios_overflows_and_their_geometric_mean_does_not():
    # 4000 tokens whose log ratio is .03: e^120 is infinite in float32, e^.03 is 1.030
    log_ratio, mask = jnp.full((1, 4000), 0.03, jnp.float32), jnp.ones((1, 4000), bool)
    with np.errstate(over='ignore'):
        assert np.isinf(np.prod(np.exp(np.asarray(log_ratio))))
    assert float(ratios.sequence_geometric(log_ratio, mask)[0, 0]) == pytest.approx(1.030455, abs=1e-5)

    def product(x):
        return ratios.sequence_product(x, mask)[0, 0]

    # here the product is held at e^20, where it has no gradient left
    value, gradient = jax.value_and_grad(product)(log_ratio)
    assert float(value) == pytest.approx(np.exp(20), rel=1e-5) and np.all(np.asarray(gradient) == 0)


def by_length(weights, **numbers):
    """How many times as hard a token of a row of 1 is pushed as one of a row of 4, with the same advantage."""
    method = fixture.algorithm_with('dr_grpo', fixture.SMALL, weights=weights, surrogate='policy_gradient', **numbers)
    experience = fixture.experience(np.ones((8, 1), np.float32))
    pushed = algorithms.gradient_coefficients(method, jnp.asarray(fixture.LOGPROBS, jnp.float32), experience)
    return float(pushed[3, 0] / pushed[1, 0])


@pytest.mark.parametrize('advantage', ['group_norm', 'group_mean'])
def test_the_length_bias_goes_with_the_weights_and_not_with_the_std(advantage):
    assert by_length('sequence_mean', advantage=advantage) == pytest.approx(4)
    assert by_length('fixed_length', advantage=advantage) == pytest.approx(1)


def pull(hits, estimator, **numbers):
    """Sum of |A| of a group of 8 with so many right answers."""
    rewards = np.array([[1.0] * hits + [0.0] * (8 - hits)])
    return np.abs(estimator(rewards, **numbers)).sum()


def test_dividing_by_the_std_favours_easy_and_hard_prompts_alike():
    # against r - mean, one right answer of 8 gains as much as seven, and both gain on four of 8
    gain = {hits: pull(hits, advantages.group_norm, **NORM) / pull(hits, advantages.group_mean) for hits in range(1, 8)}
    assert gain[1] == pytest.approx(gain[7]) and gain[1] == pytest.approx(1 / np.sqrt(1 / 8 * 7 / 8))
    assert min(gain, key=gain.get) == 4


def test_the_std_of_right_and_wrong_peaks_at_one_half():
    stds = [np.std([1.0] * hits + [0.0] * (8 - hits)) for hits in range(9)]
    np.testing.assert_allclose(stds, [np.sqrt(p * (1 - p)) for p in np.arange(9) / 8], atol=1e-12)
    assert np.argmax(stds) == 4 and stds[0] == stds[8] == 0


@pytest.mark.parametrize('size, factor', [(4, 0.866025), (8, 0.935414), (16, 0.968246)])
def test_ddof_scales_advantages_by_a_constant_of_the_group_size(size, factor):
    rewards = (np.arange(size) % 3 == 0).astype(float)[None]
    ones, zeros = (advantages.group_norm(rewards, std_ddof=ddof, std_eps=1e-12) for ddof in (1, 0))
    np.testing.assert_allclose(ones, factor * zeros, atol=1e-6)


def test_eps_does_not_protect_a_group_of_equal_rewards():
    # the float32 mean of 64 times .7 is not .7: without the test of max == min, rounding would become an advantage
    rewards = np.full(64, 0.7, np.float32)
    mean = np.add.accumulate(rewards)[-1] / np.float32(64)
    std = np.sqrt(np.mean((rewards - mean) ** 2))
    assert abs((rewards - mean) / (std + np.float32(1e-9)))[0] > 0.9
    assert np.all(advantages.group_norm(rewards[None].astype(float), std_ddof=0, std_eps=1e-9) == 0)


def test_a_small_shaping_term_is_blown_up_by_the_std_alone():
    # all right, one a little longer: a nudge of .001
    rewards = np.array([[1, 1, 1, 0.999]])
    np.testing.assert_allclose(
        advantages.group_norm(rewards, std_ddof=1, std_eps=1e-4), [[0.416667, 0.416667, 0.416667, -1.25]], atol=1e-5
    )
    assert np.abs(advantages.group_mean(rewards)).max() < 1e-3


def test_four_normalizations_over_the_batch_are_four_estimators():
    mask = fixture.MASK.reshape(2, 4, 5)
    parts, part_weights = np.stack([fixture.REWARDS, 0.1 * np.arange(8).reshape(2, 4)]), np.array([1.0, 0.5])
    rewards = np.tensordot(part_weights, parts, 1)
    found = [
        advantages.hybrid(rewards, **NORM),
        advantages.batch_centred_std(rewards, **NORM),
        advantages.group_mean_batch_std(rewards, mask, std_ddof=0),
        advantages.gdpo(parts, part_weights, **NORM),
    ]
    for i, one in enumerate(found):
        for other in found[:i]:
            # beyond a factor, which the learning rate would take up
            direction = [x / np.linalg.norm(x) for x in (one, other)]
            same = np.allclose(*direction, atol=1e-3)
            assert same == (i == 1), 'only hybrid and batch_centred_std differ by no more than a factor'
    assert np.abs(found[0] / found[1] - 1).max() > 0.1


def test_whitening_over_tokens_takes_groups_off_their_centre():
    # where long completions are the wrong ones, the mean over tokens is below 0
    mask = np.arange(5) < np.array([1, 1, 5, 5])[:, None]
    found = advantages.group_mean_batch_std(np.array([[1.0, 1, 0, 0]]), mask[None], std_ddof=0)[0]
    assert found[0] > 2 * -found[2] > 0
    np.testing.assert_allclose(np.sum(found * mask.sum(-1)), 0, atol=1e-9)


@pytest.mark.parametrize('preset, source', [('rft', 'reference'), ('online_rft', 'policy')])
def test_rft_ignores_wrong_answers_and_does_not_punish_them(preset, source):
    method = fixture.algorithm(preset)
    pushed = np.asarray(
        algorithms.gradient_coefficients(method, jnp.asarray(fixture.LOGPROBS, jnp.float32), fixture.worked(method))
    )
    right = fixture.REWARDS.reshape(-1) == 1
    assert method.source == source
    assert np.all(pushed[~right] == 0) and np.all(pushed[right][fixture.MASK[right]] > 0)


@pytest.mark.parametrize('preset', ['grpo', 'ppo', 'rloo', 'reinforce_pp'])
def test_a_kl_in_the_reward_needs_the_reference_as_much_as_one_in_the_loss(preset):
    method = fixture.algorithm(preset)
    assert (method.kl_placement == 'loss') == (preset == 'grpo')
    assert 'ref_logprobs' in method.needed_logprobs(1) and method.keeps_reference


def test_k3_of_a_summed_log_ratio_would_overflow():
    # 2000 tokens that each differ by .05 nats: 2000 k3(.05) = 2.5 nats, and k3(100) is infinite in float32
    difference = np.float32(0.05)
    assert 2000 * (np.expm1(difference) - difference) == pytest.approx(2.54, abs=0.01)
    with np.errstate(over='ignore'):
        assert np.isinf(np.expm1(np.float32(2000) * difference))


def test_weighing_sampled_tokens_by_their_probability_counts_it_twice():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    true = np.sum(p * np.log(p / q))
    sampled = np.sum(p * (p * np.log(p / q)))  # the expectation over tokens drawn from p
    assert true == pytest.approx(0.025267, abs=1e-6) and sampled == pytest.approx(0.029895, abs=1e-6)


def test_larger_groups_have_a_less_noisy_gradient():
    # a softmax over three answers of which the first is right; the gradient is averaged over the group
    p, draws = np.array([0.3, 0.5, 0.2]), np.random.default_rng(0)
    noise = {}
    for size in (4, 16, 64):
        answers = draws.choice(3, (4000, size), p=p)
        values = advantages.leave_one_out((answers == 0).astype(float))
        gradients = np.mean(values[..., None] * (np.eye(3)[answers] - p), 1)
        np.testing.assert_allclose(gradients.mean(0), p * (np.eye(3)[0] - p[0]), atol=0.02)
        noise[size] = gradients.var(0).sum()
    assert noise[4] > 3 * noise[16] > 9 * noise[64]


def test_one_update_a_rollout_makes_clip_gspo_and_llds_inert_and_says_so():
    def said(preset, updates):
        return ' '.join(checks.check_run(fixture.algorithm(preset), group_size=8, prompts=4, updates=updates))

    assert 'surrogate clip has no effect' in said('dapo', 1)
    assert 'gradient of ratio token' in said('gspo', 1)
    assert 'regularizer llds is 0' in said('llds_grpo', 1)
    assert [said(preset, 4) for preset in ('dapo', 'gspo', 'llds_grpo')] == [''] * 3


def test_a_clip_of_a_fifth_never_acts_on_geometric_means_and_says_so():
    method = fixture.algorithm('gspo', clip_low=0.2, clip_high=0.2)
    assert 'never acts' in ' '.join(checks.check_run(method, group_size=8, prompts=4, updates=4))


@pytest.mark.parametrize(
    'preset, low, high',
    [('grpo', 0.2, 0.2), ('dr_grpo', 0.2, 0.2), ('dapo', 0.2, 0.28), ('deepseek_r1', 10, 10), ('gspo', 3e-4, 4e-4)],
)
def test_clip_bounds_are_those_of_the_papers(preset, low, high):
    assert fixture.algorithm(preset).surrogate.keywords == dict(clip_low=low, clip_high=high)


@pytest.mark.parametrize(
    'preset, coefficient', [('grpo', 0.04), ('deepseek_r1', 1e-3), ('dapo', 0), ('dr_grpo', 0), ('default_rlvr', 0)]
)
def test_kl_coefficients_are_those_of_the_papers(preset, coefficient):
    assert fixture.algorithm(preset).kl_coef == coefficient


@pytest.mark.parametrize('config', [default.get_config('deepseek_r1'), r1_zero.get_config(), r1.get_config()])
def test_the_reference_is_renewed_as_in_the_r1_report(config):
    # every 400 updates of 32 prompts each, in steps of one update or of 16
    updates = config.learner.epochs * config.learner.minibatches
    assert config.collection.reference == 'hard' and config.collection.reference_every * updates == 400
    assert config.data.prompts_per_step / updates == 32


@pytest.mark.parametrize('preset', fixture.PRESETS)
def test_a_preset_changes_nothing_but_algorithm_and_collection(preset):
    # so group size, learning rate and updates a rollout are the experiment's to say
    plain, found = (default.get_config(name).to_dict() for name in ('grpo', preset))
    for section in ('algorithm', 'collection'):
        plain.pop(section), found.pop(section)
    assert plain == found


def test_reward_minus_value_is_the_case_lambda_1():
    rewards, critic = np.array([0, 0, 0, 1.0]), np.array([0.2, 0.4, 0.5, 0.8])
    found = group_math.generalized_advantages(rewards, np.ones(4, bool), critic, 1.0, 1.0)
    np.testing.assert_allclose(found, 1 - critic)


def test_reinforce_pp_carries_nothing_from_batch_to_batch():
    # no moving average: the same batch gives the same advantages after any other
    method = fixture.algorithm('reinforce_pp', **fixture.NO_KL)
    mask = fixture.MASK.reshape(2, 4, 5)
    first = algorithms.compute_advantages(method, fixture.REWARDS, mask=mask)
    algorithms.compute_advantages(method, 10 * fixture.REWARDS, mask=mask)
    np.testing.assert_array_equal(algorithms.compute_advantages(method, fixture.REWARDS, mask=mask), first)
    assert abs(first[fixture.MASK].mean()) < 1e-6 and first[fixture.MASK].std() == pytest.approx(1, abs=0.03)
