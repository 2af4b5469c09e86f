"""What is right is what the verifier says; dead groups; unscorable completions; each by hand."""

import fixture
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import advantages, group_math, pieces, reductions, regularizers, selections, weights
from grpo_jax.errors import BadInput
from grpo_jax.learner import critic

NAN = np.nan
LAST = np.array([[[1, 0], [1, 1], [1, 1], [1, 0]]], bool)  # lengths 1, 2, 2, 1


def advantages_of(preset, rewards, collection=(), **data):
    method = fixture.algorithm(preset, **dict(collection))
    data = {name: np.asarray(x) if name != 'initial_entropy' else x for name, x in data.items()}
    return algorithms.compute_advantages(method, np.asarray(rewards, float), **data)


# 1. correct, where wrong completions are paid for their format


PAID_FOR_FORMAT = [[1.1, 0.1, 0.1, 0.0]]
RIGHT = [[1.0, 0, 0, 0]]


@pytest.mark.parametrize('preset', ['rft', 'online_rft'])
def test_only_what_the_verifier_takes_is_imitated(preset):
    assert advantages_of(preset, PAID_FOR_FORMAT, correct=RIGHT)[:, 0].tolist() == [1, 0, 0, 0]
    # and of a reward model, whose values are all above 0
    assert advantages_of(preset, [[0.9, 0.2, 0.7, 0.1]], correct=[[1.0, 0, NAN, 0]])[:, 0].tolist() == [1, 0, 0, 0]


def test_maxrl_and_pkpo_count_the_right_completions():
    found = advantages_of('maxrl', PAID_FOR_FORMAT, correct=RIGHT)[:, 0]
    np.testing.assert_allclose(found, [3, -1, -1, -1], rtol=1e-5)
    # k = 2, n = 4, c = 1: 1/2 for the right one, 1/2 * 1/3 for the others, less their mean 1/4
    found = algorithms.compute_advantages(
        fixture.algorithm('pkpo', pass_k=2), np.array(PAID_FOR_FORMAT), correct=np.array(RIGHT)
    )
    np.testing.assert_allclose(found[:, 0], [0.25, -1 / 12, -1 / 12, -1 / 12], rtol=1e-6)


def test_maxrl_and_pkpo_give_0_to_what_the_verifier_cannot_judge():
    rewards, correct = [[0.0, 0, 0, 0], [1, 0, 0, 0]], [[0.0, 0, 0, NAN], [1, 0, 0, NAN]]
    # of three judged ones, one is right: (1 - 1/3) / (1/3) = 2, and -1
    found = advantages_of('maxrl', rewards, correct=correct)[:, 0]
    np.testing.assert_allclose(found, [0, 0, 0, 0, 2, -1, -1, 0], rtol=1e-5)
    # k = 2, n = 3: 2/3 for the right one, 2/3 * 1/2 for the others, less their mean 4/9
    found = algorithms.compute_advantages(
        fixture.algorithm('pkpo', pass_k=2), np.array(rewards), correct=np.array(correct)
    )
    np.testing.assert_allclose(found[:, 0], [0, 0, 0, 0, 2 / 9, -1 / 9, -1 / 9, 0], rtol=1e-6)


def test_demonstrations_are_imitated_also_where_nobody_can_score_them():
    assert advantages_of('sft', [[NAN, 1.0]])[:, 0].tolist() == [1, 1]


def test_xrpo_sharpens_only_right_completions():
    # the second is paid more than the mean, and unlikely, but wrong
    data = dict(
        mask=np.ones((1, 4, 1), bool), sampler_logprobs=np.array([[[-2.0], [-2.0], [-0.1], [-0.1]]]), correct=RIGHT
    )
    rewards = [[1.0, 0.9, 0, 0]]
    plain = advantages_of('xrpo', rewards, **data | dict(correct=[[0.0, 0, 0, 1]]))[:, 0]
    sharp = advantages_of('xrpo', rewards, **data)[:, 0]
    assert sharp[0] == pytest.approx(1.5 * plain[0], rel=1e-5) and sharp[1] == plain[1]


def test_a_completion_without_a_token_is_in_no_mean_of_likelihoods():
    # two completions have tokens, with likelihoods -1 and -3, so the mean is -2; the novelty of the right one is
    # exp(-3 + 2), and its bonus is 1 - exp(-1), which is below the cap
    mask = np.array([[[True], [True], [False], [False]]])
    data = dict(mask=mask, sampler_logprobs=np.array([[[-1.0], [-3.0], [0.0], [0.0]]]), correct=[[0.0, 1, 0, 0]])
    found = advantages_of('xrpo', [[0.0, 1, 0, 0]], **data, collection={'sharpen_cap': 1.0})[:, 0]
    np.testing.assert_allclose(found, [-0.5, 1.5 + 1 - np.exp(-1), -0.5, -0.5], rtol=1e-5)


def test_grpo_lambda_ranks_and_pays_by_verdicts_alone():
    # the second group has 1 of 2 judged right, and the first 1 of 3; what cannot be judged counts in neither
    rewards, correct = np.array([[1.0, 0, 0, 0.5], [1, 0, 0.5, 0.5]]), np.array([[1.0, 0, 0, NAN], [1, 0, NAN, NAN]])
    method = fixture.algorithm('grpo_lambda', efficient_share=0.5, **fixture.NO_KL)
    mask = np.ones((2, 4, 2), bool)
    found = algorithms.compute_advantages(method, rewards, mask=mask, correct=correct)[:, 0]
    np.testing.assert_allclose(found[4:], [0.707106, -0.707106, 0, 0], atol=1e-5)  # 0.9 and 0
    unchanged = algorithms.compute_advantages(method._replace(advantage=advantages.group_norm), rewards, mask=mask)
    np.testing.assert_allclose(found[:4], unchanged[:4, 0], rtol=1e-6)


def test_grpo_lambda_shortens_right_completions_alone():
    # in the best group: lengths 1 and 2 are right, std .5: 1 - .2 sigmoid(-+1); the paid format of wrong ones is not
    method = fixture.algorithm('grpo_lambda', efficient_share=1.0, std_eps=1e-12, **fixture.NO_KL)
    found = algorithms.compute_advantages(
        method, np.array([[1.0, 1.0, 0.1, 0.1]]), mask=LAST, correct=np.array([[1.0, 1, 0, 0]])
    )[:, 0]
    shaped = np.array([1 - 0.2 / (1 + np.e), 1 - 0.2 / (1 + 1 / np.e), 0, 0])
    np.testing.assert_allclose(found, (shaped - shaped.mean()) / shaped.std(ddof=1), rtol=1e-5)


def test_without_a_verifier_rewards_are_the_outcomes():
    assert advantages_of('rft', [[1.0, 0.5, -1, 2]])[:, 0].tolist() == [1, 0, 0, 1]


# 2. dead groups


SHAPED = np.array([[-0.001, -0.002, -0.001, -0.003], [0.9, 0.0, 0.8, 0.0], [1.0, 0.9, 0.8, 0.7]])
OUTCOMES = np.array([[0.0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]])
COMPARING = sorted(
    name
    for name, piece in pieces.list_pieces(algorithms.algorithm.advantages).items()
    if pieces.compares_outcomes(piece) and name != 'gdpo'
)


@pytest.mark.parametrize('advantage', COMPARING)
def test_a_group_of_one_outcome_teaches_nothing(advantage):
    method = fixture.algorithm_with('dapo', dict(pass_k=2), advantage=advantage, dead_groups='keep')
    data = dict(
        mask=np.repeat(LAST, 3, 0),
        tokens=np.arange(24).reshape(3, 4, 2) % 3,
        sampler_logprobs=-np.arange(24.0).reshape(3, 4, 2),
        old_entropy=np.full((3, 4, 2), 0.1),
        initial_entropy=0.1,
        correct=OUTCOMES,
    )
    found = algorithms.compute_advantages(method, SHAPED, **data).reshape(3, 4, -1)
    assert not np.any(found[[0, 2]]) and np.any(found[1])
    # by what else is paid they differ
    if advantage not in ('maxrl', 'pkpo'):  # which read nothing else
        free = algorithms.compute_advantages(method._replace(gate='none'), SHAPED, **data).reshape(3, 4, -1)
        assert np.any(free[0]) and np.any(free[2])


def test_gdpo_is_gated_as_well():
    method = fixture.algorithm('grpo', advantage='gdpo', gate='outcome', **fixture.NO_KL)
    parts = np.stack([OUTCOMES, np.tile([0.0, 1, 1, 0], (3, 1))])
    data = dict(parts=parts, part_weights=np.ones(2), correct=OUTCOMES)
    found = algorithms.compute_advantages(method, parts.sum(0), **data).reshape(3, 4)
    assert not np.any(found[[0, 2]]) and np.any(found[1])


@pytest.mark.parametrize('preset', ['ppo', 'reinforce', 'reinforce_pp'])
def test_what_compares_no_outcomes_is_not_gated(preset):
    mask = np.ones((1, 2, 2), bool)
    data = dict(mask=mask, values=np.zeros((1, 2, 2)), kl=np.zeros((1, 2, 2)), correct=np.zeros((1, 2)))
    assert np.any(algorithms.compute_advantages(fixture.algorithm(preset), np.array([[0.0, -1]]), **data))


def test_steps_of_a_group_of_one_outcome_teach_all_the_same():
    steps = np.array([[[1.0, NAN], [0.0, NAN]]])
    found = advantages_of(
        'grpo_process', [[0.0, 0]], mask=np.ones((1, 2, 2), bool), step_rewards=steps, correct=[[0, 0]]
    )
    np.testing.assert_allclose(found, [[0.707106, 0], [-0.707106, 0]], atol=1e-5)


def test_the_kl_in_the_reward_acts_on_dead_groups():
    # rewards count as equal, so that .3 - .1 nats remain
    method = fixture.algorithm('dr_grpo', kl='k1', kl_placement='reward_sequence', kl_coef=1.0, gate='outcome')
    found = algorithms.compute_advantages(
        method,
        np.array([[0.0, 0.01]]),
        mask=np.ones((1, 2, 1), bool),
        kl=np.array([[[0.1], [0.3]]]),
        correct=np.zeros((1, 2)),
    )
    np.testing.assert_allclose(found, [[0.1], [-0.1]], rtol=1e-6)


@pytest.mark.parametrize(
    'gate, rewards, correct, expected',
    [
        ('outcome', [[1, 0.9], [0.1, 0], [1, 0]], [[1, 1], [0, 0], [1, 0]], [True, True, False]),
        ('reward', [[1, 0.9], [0.1, 0], [1, 1]], [[1, 1], [0, 0], [1, 0]], [False, False, True]),
        ('none', [[1, 1], [0, 0]], [[1, 1], [0, 0]], [False, False]),
        # what the verifier knows nothing of is judged by its rewards, and so is all without one
        ('outcome', [[1, 0.9], [1, 1]], [[NAN, NAN], [NAN, NAN]], [False, True]),
        ('outcome', [[1, 0.9], [1, 1]], None, [False, True]),
        ('outcome', [[1, 0.9], [1, 0]], [[1, NAN], [NAN, 0]], [True, True]),
        # what has no reward does not count, whatever the verifier says of it
        ('outcome', [[1.3, NAN, 1, NAN], [1.3, NAN, 0, 1]], [[1, 0, 1, 0], [1, 0, 0, NAN]], [True, False]),
        # a verdict of no consequence
        ('outcome', [[0.5, 0.5]], [[1, 0]], [True]),
    ],
)
def test_groups_are_judged_by_the_gate(gate, rewards, correct, expected):
    correct = None if correct is None else np.array(correct, float)
    assert group_math.judge_groups(gate, np.array(rewards, float), correct).tolist() == expected


def test_a_gate_that_leaves_no_dead_group_is_refused_where_they_are_dropped():
    with pytest.raises(BadInput, match=r"collection.gate = 'none'.*dead_groups='drop'"):
        fixture.algorithm('dapo', gate='none', dead_groups='drop')


# 17 to 20: unscorable completions, and tokens that were forced


def test_the_critic_learns_nothing_from_what_nobody_could_score():
    method = fixture.algorithm('ppo', critic_lambda=1.0, **fixture.NO_KL)
    values = np.full((1, 2, 3), 0.5)
    found = critic.critic_targets(
        method, np.array([[1, NAN]]), kl_coef=0.0, mask=np.ones((1, 2, 3), bool), values=values
    )
    np.testing.assert_array_equal(found, [[1, 1, 1], [NAN] * 3])


def test_an_unscorable_group_is_not_in_the_std_of_the_batch():
    found = advantages_of('scalerl', [[1, 0], [NAN, NAN]])
    np.testing.assert_allclose(found[:, 0], [0.707106, -0.707106, 0, 0], atol=1e-5)


def test_steps_of_unscorable_completions_are_in_no_statistic():
    steps = np.array([[[1.0, NAN], [0.0, NAN], [9.0, NAN]]])
    found = advantages_of('grpo_process', [[1, 0, NAN]], mask=np.ones((1, 3, 2), bool), step_rewards=steps)
    np.testing.assert_allclose(found, [[0.707106, 0], [-0.707106, 0], [0, 0]], atol=1e-5)


@pytest.mark.parametrize('given', [True, False])
def test_forced_tokens_conflict_with_nothing_and_break_no_run(given):
    tokens = np.array([[[1, 2, 3, 9], [4, 2, 3, 9]]])
    completion = np.ones((1, 2, 4), bool)
    mask = completion & (tokens != 2)
    data = dict(tokens=tokens, mask=mask, old_entropy=np.zeros((1, 2, 4)), initial_entropy=0.0)
    method = fixture.algorithm('gtpo', std_ddof=0, std_eps=1e-12)
    known = dict(completion_mask=completion) if given else {}
    found = algorithms.compute_advantages(method, np.array([[1.0, 0]]), **data, **known)
    np.testing.assert_allclose(np.where(mask[0], found, 0), [[1, 0, 2, 2], [-1, 0, 0, 0]], rtol=1e-9)


def test_a_forced_end_counts_in_the_places_from_the_end():
    # 7 is forced on the first alone: the others end with 3 in its place, which is no conflict and no break
    tokens, completion = np.array([[1, 3, 7], [2, 3, 3]]), np.ones((2, 3), bool)
    forced = np.array([[0, 0, 1], [0, 0, 0]], bool)
    found = group_math.conflict_weights(tokens, completion, np.array([1.0, -1]), forced)
    np.testing.assert_array_equal(found, [[1, 2, 1], [1, 0, 1]])


def test_a_dead_group_of_gtpo_has_its_entropy_term_only_without_a_gate():
    data = dict(
        tokens=np.zeros((1, 2, 1), int),
        mask=np.ones((1, 2, 1), bool),
        old_entropy=np.array([[[0.5], [0.1]]]),
        initial_entropy=0.0,
    )
    method = fixture.algorithm('gtpo')
    assert not np.any(algorithms.compute_advantages(method, np.ones((1, 2)), **data))
    free = algorithms.compute_advantages(method._replace(gate='none'), np.ones((1, 2)), **data)
    np.testing.assert_allclose(free, [[-0.05], [-0.01]], rtol=1e-6)


# 21 to 23: aggregations


ROWS = jnp.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]], bool)


@pytest.mark.parametrize('weighting', ['sequence_mean', 'sequence_sum', 'token_mean', 'fixed_length', 'prompt_mean'])
def test_a_regularizer_is_a_mean_of_its_own_under_all_weights(weighting):
    # 8 tokens: -c H / 8 each; NLL on the 4 tokens of the right rows 0 and 1
    def loss(method, entropy, logprobs):
        with_outcomes = experience.replace(correct=jnp.array([1.0, 1, 0, 0]))
        return algorithms.policy_loss(method, logprobs, with_outcomes, entropy)[0]

    experience = fixture.experience(
        np.zeros((4, 1)), mask=np.array(ROWS), old=None, ref=None, sampler=np.zeros((4, 3)), entropy=None
    )
    bonus = fixture.algorithm('dr_grpo', weights=weighting, regularizers=('entropy_bonus',), entropy_coef=0.8)
    gradient = jax.grad(loss, 1)(bonus, jnp.ones((4, 3)), jnp.zeros((4, 3)))
    np.testing.assert_allclose(gradient, np.where(ROWS, -0.1, 0), rtol=1e-6)
    nll = fixture.algorithm('dr_grpo', weights=weighting, regularizers=('positive_nll',), positive_nll_coef=0.4)
    gradient = jax.grad(loss, 2)(nll, jnp.ones((4, 3)), jnp.full((4, 3), -1.0))
    np.testing.assert_allclose(gradient, np.where(ROWS & (np.arange(4) < 2)[:, None], -0.1, 0), rtol=1e-6)


def test_nll_of_no_right_completion_is_nothing():
    experience = fixture.experience(
        np.zeros((4, 1)), mask=np.array(ROWS), old=None, ref=None, sampler=np.zeros((4, 3)), entropy=None
    )
    method = fixture.algorithm('vapo')
    loss, gradient, _ = fixture.loss_and_gradient(
        method, experience.replace(correct=jnp.zeros(4)), np.full((4, 3), -1.0)
    )
    assert loss == 0 and not np.any(gradient)


def test_preference_is_a_mean_over_the_pairs_that_exist():
    ids = jnp.array([0, 0, 1, 1])
    pair = weights.pair_mean(ROWS, ids, jnp.array([[1.0], [-1], [0], [0]]))
    np.testing.assert_allclose(pair.sum(-1), [0.5, 0.5, 0, 0])  # a dead group beside it changes nothing
    both = weights.pair_mean(ROWS, ids, jnp.array([[1.0], [-1], [-1], [1]]))
    np.testing.assert_allclose(both.sum(-1), [0.25] * 4)
    # a pair with an empty completion weighs as much as another
    empty = weights.pair_mean(ROWS.at[1].set(False), ids, jnp.array([[1.0], [-1], [-1], [1]]))
    np.testing.assert_allclose(empty.sum(-1), [0.5, 0, 0.25, 0.25])
    assert not np.any(weights.pair_mean(ROWS & False, ids, jnp.array([[1.0], [-1], [-1], [1]])))


def test_gpg_counts_completions_where_groups_differ_in_size():
    # 6 completions, 4 of them in a dead group: the others count 6 / 2 times
    found = algorithms.compute_advantages(
        fixture.algorithm('gpg'), np.array([1.0, 1, 1, 1, 1, 0]), group_ids=np.array([0, 0, 0, 0, 1, 1])
    )
    np.testing.assert_allclose(found[:, 0], [0, 0, 0, 0, 1.5, -1.5])


def test_m2po_drops_ties_until_its_bound_holds():
    log_rho, mask = jnp.array([[0.3, 0.3, 0.1, 0.3, 0.0]]), jnp.array([[1, 1, 1, 1, 0]], bool)
    kept = np.asarray(selections.m2po(log_rho, mask, second_moment=0.05))
    np.testing.assert_array_equal(kept, [[1, 0, 1, 0, 0]])  # (.01 + .09) / 2 = .05, and with another .0633
    assert np.mean(np.asarray(log_rho)[kept > 0] ** 2) <= 0.05 + 1e-7


def test_covariance_shares_take_a_token_at_least():
    covariance, mask = jnp.array([[1.0, 3, 2, 9]]), jnp.array([[1, 1, 1, 0]], bool)
    np.testing.assert_array_equal(selections.clip_cov(covariance, mask), [[1, 0, 1, 1]])  # .0002 of 3 tokens
    np.testing.assert_array_equal(
        selections.clip_cov(covariance / 100, mask), [[1, 1, 1, 1]]
    )  # none between the bounds
    experience = fixture.worked(fixture.algorithm('kl_cov'))
    prepared = algorithms.prepare(fixture.algorithm('kl_cov'), experience)
    assert np.sum(prepared['top_covariance']) == 1
    values = reductions.token_covariance(experience.advantages, experience.old_logprobs, experience.rollout.loss_mask)
    assert np.argmax(values) == np.argmax(prepared['top_covariance'])


def test_llds_reads_the_sign_of_the_advantage():
    assert not np.any(regularizers.llds(-jnp.ones((1, 2)), jnp.array([[-1.0]]), jnp.ones((1, 2), bool)))
