"""Loss, gradient and metrics of policy_loss against hand numbers; then the traps of masks and extremes."""

import fixture
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import pieces
from grpo_jax.sharding import mesh as meshes
from grpo_jax.sharding import specs
from grpo_jax.types import HeadOutput

POLICY_GRADIENT = dict(surrogate='policy_gradient', weights='token_mean')
PROMPT_MEAN = dict(weights='prompt_mean', advantage='group_mean')


# preset, changes, loss, gradient of row 0, gradient of row 5, sum of |gradient|
def weights_of(method, mask):
    """f32[B, C] of the example's two prompts."""
    return pieces.call(method.weights, {'mask': jnp.asarray(mask), 'group_ids': jnp.arange(8) // 4})


@pytest.fixture(params=fixture.PRESETS)
def method(request):
    """The algorithm of each preset, with the example's row length."""
    return fixture.algorithm_with(request.param, fixture.SMALL)


def test_prompt_mean_counts_each_prompt_once():
    # the groups have 10 and 14 tokens: 1 / (2 * 10) and 1 / (2 * 14)
    method = fixture.algorithm('dapo', **PROMPT_MEAN)
    weights = np.asarray(weights_of(method, fixture.MASK))
    np.testing.assert_allclose(weights[:4], fixture.MASK[:4] / 20, rtol=1e-6)
    np.testing.assert_allclose(weights[4:], fixture.MASK[4:] / 28, rtol=1e-6)


def test_prompt_mean_with_reinforce_gives_the_hand_gradient():
    # gradient -A w: row 0 -.5 / 20, row 5 -.25 / 28
    method = fixture.algorithm('gpg', **PROMPT_MEAN)
    gradient = fixture.loss_and_gradient(method, fixture.worked(method))[1]
    np.testing.assert_allclose(gradient[0, :2], -0.025, rtol=1e-6)
    np.testing.assert_allclose(gradient[5, :3], -0.25 / 28, rtol=1e-6)


def test_prompt_mean_does_not_count_prompts_without_tokens():
    method = fixture.algorithm('dapo', **PROMPT_MEAN)
    mask = fixture.MASK & (np.arange(8) < 4)[:, None]
    np.testing.assert_allclose(weights_of(method, mask), mask / 10, rtol=1e-6)


@pytest.mark.parametrize('weights', ['sequence_mean', 'token_mean', 'prompt_mean'])
def test_means_have_weights_that_sum_to_one_without_the_empty_rows(weights):
    method = fixture.algorithm('grpo', weights=weights)
    mask = fixture.MASK & (np.arange(8) != 3)[:, None]
    assert float(jnp.sum(weights_of(method, mask))) == pytest.approx(1, abs=1e-6)


def test_fixed_length_divides_by_rows_with_tokens():
    # 7 rows have tokens: 1 / (5 * 7)
    method = fixture.algorithm('dr_grpo', fixed_length=5)
    mask = fixture.MASK & (np.arange(8) != 3)[:, None]
    np.testing.assert_allclose(weights_of(method, mask), mask / 35, rtol=1e-6)


# on-policy: old == now


@pytest.mark.parametrize('preset, expected', [('grpo', 0), ('dapo', 0.214779), ('dr_grpo', 0.0625), ('rloo', 0)])
def test_on_policy_loss_is_the_mean_of_minus_advantage(preset, expected):
    # sequence means of -A vanish since A sums to 0 in a group. dr_grpo: -1+2+1.5-.5-2.5+3 = 2.5, over 5 tokens * 8 rows
    method = fixture.algorithm_with(preset, fixture.SMALL | dict(std_ddof=0), **fixture.NO_KL)
    loss, _, metrics = fixture.loss_and_gradient(method, fixture.worked(method, old=None))
    assert loss == pytest.approx(expected, abs=1.5e-6)
    assert (metrics['clip_low_share'], metrics['clip_high_share'], metrics['kl_old']) == (0, 0, 0)
    assert (metrics['ratio_mean'], metrics['ratio_max']) == (1, 1)


@pytest.mark.parametrize(
    'preset', [name for name in fixture.PRESETS if 'old_logprobs' not in fixture.algorithm(name).needed_logprobs(1)]
)
def test_without_old_logprobs_everything_is_as_with_old_equal_to_now(preset):
    method = fixture.algorithm(preset)
    implicit = fixture.loss_and_gradient(method, fixture.worked(method, old=None))
    explicit = fixture.loss_and_gradient(method, fixture.worked(method, old=fixture.LOGPROBS))
    assert implicit[0] == explicit[0] and implicit[2] == explicit[2]
    np.testing.assert_array_equal(implicit[1], explicit[1])


@pytest.mark.parametrize('ratio', ['token', 'sequence_product'])
@pytest.mark.parametrize('surrogate', ['clip', 'dual_clip', 'policy_gradient'])
def test_on_policy_gradient_is_the_policy_gradient(ratio, surrogate):
    # -A * weight, whatever the ratio and the surrogate. The product's gradient reaches every token of its row, and
    # with sequence_mean the row's weights sum to 1 / 8, not to 1 / 8 / length each
    method = fixture.algorithm('grpo', ratio=ratio, surrogate=surrogate, **fixture.NO_KL)
    experience = fixture.worked(method, old=None)
    gradient = fixture.loss_and_gradient(method, experience)[1]
    weight = 1 / 8 / (fixture.LENGTHS[:, None] if ratio == 'token' or surrogate == 'policy_gradient' else 1)
    expected = -np.asarray(experience.advantages) * weight * fixture.MASK
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_kl_is_zero_against_an_equal_reference():
    method = fixture.algorithm('grpo')
    loss, gradient, metrics = fixture.loss_and_gradient(method, fixture.worked(method, ref=fixture.LOGPROBS))
    without = fixture.algorithm('grpo', **fixture.NO_KL)
    plain = fixture.loss_and_gradient(without, fixture.worked(without))
    assert metrics['kl_ref'] == 0 and loss == plain[0]
    np.testing.assert_array_equal(gradient, plain[1])


# what is held is not pushed: the derivative of |x| at 0 is 0


def test_one_update_a_rollout_leaves_what_kl_cov_holds():
    method = fixture.algorithm('kl_cov', covariance_share=0.5)
    held = fixture.loss_and_gradient(method, fixture.worked(method, old=fixture.LOGPROBS))[1]
    free = fixture.loss_and_gradient(method._replace(regularizers=()), fixture.worked(method, old=fixture.LOGPROBS))[1]
    np.testing.assert_array_equal(held, free)


def test_an_absolute_kl_to_an_equal_reference_pushes_nothing():
    method = fixture.algorithm('grpo', kl='absolute')
    pulled = fixture.loss_and_gradient(method, fixture.worked(method, ref=fixture.LOGPROBS))[1]
    free = fixture.algorithm('grpo', **fixture.NO_KL)
    np.testing.assert_array_equal(pulled, fixture.loss_and_gradient(free, fixture.worked(free))[1])


# metrics


def test_metrics_are_the_hand_counts():
    # of the 24 tokens: 12 with A > 0 in rows 0 3 4 5 6, 12 with A < 0 in rows 1 2 7. Read off the table of ratios:
    # A > 0 and ratio 1.349859 > 1.2: (4, 0), (5, 2); A < 0 and ratio .740818 < .8: (1, 2)
    method = fixture.algorithm('grpo')
    metrics = fixture.loss_and_gradient(method, fixture.worked(method))[2]
    ratios = np.exp((fixture.LOGPROBS - fixture.OLD)[fixture.MASK])
    assert metrics['clip_high_share'] == pytest.approx(2 / 24)
    assert metrics['clip_low_share'] == pytest.approx(1 / 24)
    assert metrics['ratio_mean'] == pytest.approx(ratios.mean(), rel=1e-5)
    assert metrics['ratio_max'] == pytest.approx(1.349859, abs=1e-6)
    assert metrics['kl_old'] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)), abs=1e-6)
    assert metrics['sampler_gap_max'] == pytest.approx(1.8, abs=1e-6)
    gaps = np.abs(fixture.SAMPLER - fixture.OLD)[fixture.MASK]
    assert metrics['sampler_gap_mean'] == pytest.approx(gaps.mean(), rel=1e-5)
    assert metrics['sampler_gap_p99'] == pytest.approx(np.quantile(gaps, 0.99), rel=1e-5)
    differences = (fixture.REF - fixture.LOGPROBS)[fixture.MASK]
    assert metrics['kl_ref'] == pytest.approx(np.mean(np.exp(differences) - differences - 1), abs=1e-6)
    assert metrics['kl_clamped_share'] == 0


def test_clip_higher_keeps_ratios_that_clip_cuts():
    # with clip_high .4 the two tokens at 1.349859 keep their gradient
    method = fixture.algorithm('grpo', clip_high=0.4)
    assert fixture.loss_and_gradient(method, fixture.worked(method))[2]['clip_high_share'] == 0


def test_entropy_bonus_pays_for_entropy():
    # loss falls by coef * mean entropy under token_mean weights; gradient -coef / 24 at each of the 24 tokens
    method = fixture.algorithm('dapo', regularizers=('entropy_bonus',), entropy_coef=0.1)
    plain = fixture.algorithm('dapo')
    experience = fixture.worked(plain)
    entropy = jnp.asarray(np.where(fixture.MASK, 1.5 + fixture.LOGPROBS, 1e30), jnp.float32)

    def loss(entropy):
        return algorithms.policy_loss(method, jnp.asarray(fixture.LOGPROBS, jnp.float32), experience, entropy)[0]

    without = fixture.loss_and_gradient(plain, experience)[0]
    mean = np.mean((1.5 + fixture.LOGPROBS)[fixture.MASK])
    assert float(loss(entropy)) == pytest.approx(without - 0.1 * mean, abs=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(entropy), -0.1 / 24 * fixture.MASK, rtol=1e-5)


# masks and extremes


@pytest.mark.parametrize('garbage', [1e30, -1e30, np.inf, np.nan])
def test_values_at_masked_tokens_change_nothing(method, garbage):
    clean = fixture.loss_and_gradient(method, fixture.worked(method))
    spoilt = {
        name: np.where(fixture.MASK, x, garbage * sign)
        for name, x, sign in [('old', fixture.OLD, -1), ('ref', fixture.REF, 1), ('sampler', fixture.SAMPLER, 1)]
    }
    dirty = fixture.loss_and_gradient(
        method, fixture.worked(method, **spoilt), np.where(fixture.MASK, fixture.LOGPROBS, garbage)
    )
    assert dirty[0] == clean[0]
    np.testing.assert_array_equal(dirty[1], clean[1])
    assert dirty[2] == clean[2]


def test_masked_tokens_have_no_gradient(method):
    gradient = fixture.loss_and_gradient(method, fixture.worked(method))[1]
    assert np.all(gradient[~fixture.MASK] == 0)
    assert np.any(gradient[fixture.MASK] != 0)


@pytest.mark.parametrize('rows', [[3], [0, 1, 2, 3], range(8)])
def test_rows_without_tokens_leave_loss_and_gradient_finite(method, rows):
    mask = fixture.MASK.copy()
    mask[list(rows)] = False
    loss, gradient, metrics = fixture.loss_and_gradient(method, fixture.worked(method, mask=mask))
    assert np.isfinite(loss) and np.all(np.isfinite(gradient))
    assert all(np.isfinite(x) for x in metrics.values())
    if not mask.any():
        assert loss == 0 and np.all(gradient == 0)


def test_row_without_tokens_is_as_if_it_were_not_there(method):
    mask = fixture.MASK.copy()
    mask[3] = False
    keep = np.arange(8) != 3
    experience = fixture.worked(method, mask=mask)
    shorter = jax.tree.map(lambda x: x[keep], experience)
    full = fixture.loss_and_gradient(method, experience)
    less = fixture.loss_and_gradient(method, shorter, fixture.LOGPROBS[keep])
    assert full[0] == pytest.approx(less[0], abs=1e-6)
    np.testing.assert_allclose(full[1][keep], less[1], atol=1e-7)


@pytest.mark.parametrize('shift', [50.0, -50.0, 'mixed'])
def test_far_off_log_ratios_stay_finite(method, shift):
    # exp(50) squared overflows float32, and so does a product over a row of 5 tokens
    shift = np.where(np.arange(8)[:, None] % 2, 50.0, -50.0) if shift == 'mixed' else shift
    experience = fixture.worked(method, old=fixture.LOGPROBS - shift, ref=fixture.LOGPROBS + shift)
    loss, gradient, metrics = fixture.loss_and_gradient(method, experience)
    assert np.isfinite(loss) and np.all(np.isfinite(gradient))
    assert np.all(np.isfinite(list(metrics.values())))


def test_clip_has_no_gradient_beyond_its_bound_and_full_gradient_on_the_other_side():
    # A > 0: ratio e^3 cut, e^-3 not; A < 0: the other way round. Rows of one token, G = 4
    method = fixture.algorithm('grpo', **fixture.NO_KL)
    old = np.array([[-3.0], [3.0], [-3.0], [3.0]])
    gradient = fixture.loss_and_gradient(
        method,
        fixture.experience(
            np.array([[1.0], [1.0], [-1.0], [-1.0]]), mask=np.ones((4, 1), bool), old=old, ref=old, sampler=old
        ),
        np.zeros((4, 1)),
    )[1]
    np.testing.assert_allclose(gradient[:, 0], [0, -np.exp(-3) / 4, np.exp(3) / 4, 0], rtol=1e-5)


def test_advantages_and_old_logprobs_are_not_differentiated(method):
    def loss(advantages, old):
        experience = fixture.worked(method).replace(advantages=advantages, old_logprobs=old)
        return algorithms.policy_loss(method, jnp.asarray(fixture.LOGPROBS, jnp.float32), experience)[0]

    gradients = jax.grad(loss, (0, 1))(jnp.ones((8, 1)), jnp.asarray(fixture.OLD, jnp.float32))
    assert all(np.all(np.asarray(g) == 0) for g in gradients)


def test_order_of_rows_does_not_matter(method):
    order = np.array([5, 2, 7, 0, 3, 6, 1, 4])
    plain = fixture.worked(method)
    shuffled = jax.tree.map(lambda x: x[order], plain)
    before = fixture.loss_and_gradient(method, plain)
    after = fixture.loss_and_gradient(method, shuffled, fixture.LOGPROBS[order])
    assert before[0] == pytest.approx(after[0], abs=1e-6)
    np.testing.assert_allclose(before[1][order], after[1], atol=1e-7)
    assert before[2] == pytest.approx(after[2], abs=1e-6)


def test_microbatches_add_up_to_the_whole(method):
    experience, live = fixture.worked(method), jnp.asarray(fixture.LOGPROBS, jnp.float32)
    prepared = algorithms.prepare(method, experience)

    @jax.jit
    @jax.value_and_grad
    def loss(live, rows):
        part, known = jax.tree.map(lambda x: x[rows], (experience, prepared))
        output = HeadOutput(live[rows], jnp.zeros((4, 5)))
        return jnp.sum(algorithms.token_losses(method, output, part, known, method.coefficients))

    whole = fixture.loss_and_gradient(method, experience)
    # a loss of whole groups needs them whole
    order = np.arange(8) if 'group_ids' in method.reads else np.array([0, 5, 7, 2, 3, 4, 6, 1])
    parts = [loss(live, rows) for rows in (order[:4], order[4:])]
    assert sum(float(value) for value, _ in parts) == pytest.approx(whole[0], abs=1e-6)
    np.testing.assert_allclose(sum(gradient for _, gradient in parts), whole[1], atol=1e-7)


@pytest.mark.parametrize(
    'preset', ['grpo', 'scalerl', 'dpo', 'entropy_8020', 'm2po', 'clip_cov', 'kl_cov', 'llds_grpo', 'lite_ppo']
)
def test_rows_on_eight_devices_give_the_same(preset):
    # one preset for each way in which a row's loss hangs on others
    method = fixture.algorithm(preset)
    mesh = meshes.make({'data': 4, 'fsdp': 2, 'tensor': 1})
    experience = fixture.worked(method)
    cut = jax.device_put((experience, jnp.asarray(fixture.LOGPROBS, jnp.float32)), specs.over_rows(mesh))
    alone, spread = fixture.loss_and_gradient(method, experience), fixture.loss_and_gradient(method, *cut)
    assert alone[0] == pytest.approx(spread[0], abs=1e-6)
    np.testing.assert_allclose(alone[1], spread[1], atol=1e-7)
    assert alone[2] == pytest.approx(spread[2], abs=1e-6)


@pytest.mark.parametrize('left, right', [(2, 1)])
def test_padding_does_not_matter(method, left, right):
    def pad(x, value=-7.0):
        if np.ndim(x) < 2 or x.shape[1] == 1:
            return x
        return jnp.pad(x, ((0, 0), (left, right)), constant_values=False if x.dtype == bool else value)

    experience = fixture.worked(method)
    before = fixture.loss_and_gradient(method, experience)
    after = fixture.loss_and_gradient(method, jax.tree.map(pad, experience), pad(fixture.LOGPROBS))
    assert before[0] == pytest.approx(after[0], abs=1e-6)
    np.testing.assert_allclose(after[1], pad(before[1], 0), atol=1e-7)
    assert before[2] == pytest.approx(after[2], abs=1e-6)


def test_dead_group_gives_no_gradient_without_a_kl():
    method = fixture.algorithm('grpo', **fixture.NO_KL)
    advantages = algorithms.compute_advantages(method, np.array([[0.7] * 4, [1, 1, 1, 0]]))
    gradient = fixture.loss_and_gradient(method, fixture.experience(advantages))[1]
    assert np.all(gradient[:4] == 0) and np.any(gradient[4:] != 0)


def test_advantages_by_token_are_accepted(method):
    experience = fixture.worked(method)
    spread = experience.replace(advantages=jnp.broadcast_to(experience.advantages, (8, 5)))
    by_row, by_token = fixture.loss_and_gradient(method, experience), fixture.loss_and_gradient(method, spread)
    assert by_row[0] == by_token[0]
    np.testing.assert_array_equal(by_row[1], by_token[1])
