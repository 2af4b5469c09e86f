"""Every refusal with the words that say why, every warning where it is true, and neither of them anywhere else."""

import fixture
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import advantages, checks, pieces
from grpo_jax.errors import BadInput

SIZES = dict(group_size=8, prompts=16, updates=4)
IN_REWARD = dict(kl='k1', kl_coef=0.1)


def refused(words, function, *arguments, **named):
    """Asserts that the function raises BadInput with all words."""
    with pytest.raises(BadInput) as error:
        function(*arguments, **named)
    missing = [word for word in words.split(', ') if word not in str(error.value)]
    assert not missing, str(error.value)


def warnings(preset, changes=None, **sizes):
    return checks.check_run(fixture.algorithm(preset, **(changes or {})), **SIZES | sizes)


# what cannot work, whatever the run


@pytest.mark.parametrize(
    'preset, changes, words',
    [
        ('grpo', dict(kl_placement='nowhere'), "algorithm.kl_placement = 'nowhere', reward_token or reward_sequence"),
        ('grpo', dict(ratio_base='new'), "algorithm.ratio_base = 'new', old or sampler"),
        ('grpo', dict(denominator='some'), "algorithm.denominator = 'some', all or selected"),
        ('grpo', dict(dead_groups='revive'), "collection.dead_groups = 'revive', keep, resample or replay"),
        ('grpo', dict(source='oracle'), "collection.source = 'oracle', policy, pairs"),
        ('grpo', dict(kl='k1'), "algorithm.kl = 'k1', gradient is zero, k2"),
        ('grpo', dict(kl='k2', kl_placement='reward_sequence'), "algorithm.kl = 'k2', only k1 is unbiased"),
        ('ppo', dict(kl='k3'), "algorithm.kl = 'k3', only k1 is unbiased, reward_token"),
        ('grpo', dict(kl_coef=0.0), "algorithm.kl_coef = 0.0, kl='k3', above 0"),
        ('dapo', dict(kl_coef=0.1), "algorithm.kl_coef = 0.1, kl='none'"),
        (
            'dapo',
            dict(kl_placement='reward_sequence'),
            "algorithm.kl_placement = 'reward_sequence', needs a KL estimator",
        ),
        ('ppo', dict(kl_placement='reward_sequence'), 'gae reads rewards by token, use reward_token'),
        ('reinforce_pp', dict(kl_placement='reward_sequence'), 'reinforce_pp reads rewards by token'),
        ('dppo', dict(correction='truncated'), "algorithm.correction = 'truncated', drift would count twice"),
        ('m2po', dict(correction='icepop'), "algorithm.correction = 'icepop', drift would count twice"),
        ('dppo', dict(correction='veto'), "algorithm.correction = 'veto', ratio_base"),
        ('deepseek_v32', dict(denominator='selected'), "algorithm.denominator = 'selected', opsm, use all"),
        ('dapo', dict(kl_target=0.1), 'algorithm.kl_target = 0.1, needs a KL term'),
        ('grpo', dict(kl_target=0.1, kl_horizon=0.0), 'algorithm.kl_horizon = 0.0, at least 1'),
        ('grpo', dict(entropy_target=0.5), "algorithm.entropy_target = 0.5, set regularizers=('entropy_bonus',) too"),
        ('reinforce_moving', dict(baseline_decay=1.1), 'algorithm.baseline_decay = 1.1, at most 1'),
        ('reinforce', dict(baseline_decay=0.5), 'algorithm.baseline_decay = 0.5, an advantage that reads run_baseline'),
        (
            'reinforce_moving',
            dict(dead_groups='replay'),
            "collection.dead_groups = 'replay', in the baseline, resample",
        ),
        ('grpo', dict(std_ddof=2), 'algorithm.std_ddof = 2, 0 or 1'),
        ('lite_ppo', dict(std_ddof=-1), 'algorithm.std_ddof = -1, 0 or 1'),
    ],
)
def test_what_cannot_work_is_refused(preset, changes, words):
    refused(words, fixture.algorithm, preset, **changes)


@pytest.mark.parametrize(
    'preset, changes',
    [
        ('grpo', dict(kl='k2')),
        ('grpo', dict(kl='absolute')),
        ('grpo', dict(kl='k3_straight_through')),
        ('grpo', dict(IN_REWARD, kl_placement='reward_sequence')),
        ('grpo', dict(IN_REWARD, kl_placement='reward_token')),
        ('ppo', fixture.NO_KL),
        ('ppo', dict(kl='k3', kl_placement='loss')),
        ('dppo', dict(correction='opsm')),  # reads how far the policy is from the sampler, not the sampler's mismatch
        ('dapo', dict(correction='icepop', denominator='selected')),
        ('entropy_8020', dict(denominator='selected')),
        ('grpo', dict(kl_target=0.1)),
        ('ppo', dict(kl_target=0.1)),
        ('grpo', dict(regularizers=('entropy_bonus',), entropy_target=0.5)),
        ('grpo', dict(std_ddof=0)),
        ('grpo', dict(std_ddof=1)),
    ],
)
def test_what_works_is_not_refused(preset, changes):
    assert isinstance(fixture.algorithm(preset, **changes), algorithms.Algorithm)


NUMBERS = [
    ('dr_grpo', {}, 'fixed_length', 1),
    ('dr_grpo', dict(weights='constant'), 'loss_denominator', 1),
    ('gmpo', {}, 'log_clip', 0.01),
    ('sapo', {}, 'sapo_positive', 0.01),
    ('sapo', {}, 'sapo_negative', 0.01),
    ('dppo', {}, 'dppo_low', 0.01),
    ('dppo', dict(surrogate='dppo_kl'), 'dppo_high', 0.01),
    ('olmo3_like', {}, 'rho_max', 0.01),
    ('dapo', dict(correction='masked_product'), 'product_max', 0.01),
    ('dapo', dict(correction='icepop', icepop_low=0.0), 'icepop_high', 0.01),
    ('dapo', dict(correction='masked_geometric', geometric_low=0.0), 'geometric_high', 0.01),
    ('dpo', {}, 'dpo_beta', 0.01),
    ('vapo', {}, 'length_alpha', 0.01),
    ('m2po', {}, 'second_moment', 0.01),
    ('entropy_8020', {}, 'entropy_share', 0.01),
    ('pkpo', {}, 'pass_k', 1),
]


@pytest.mark.parametrize('preset, changes, name, least', NUMBERS)
@pytest.mark.parametrize('bad', [0, -1])
def test_number_of_a_piece_that_must_be_above_zero(preset, changes, name, least, bad):
    refused(f'algorithm.{name} = {bad!r}, must be', fixture.algorithm, preset, **changes | {name: bad})
    fixture.algorithm(preset, **changes | {name: least})


def test_number_that_is_nan_is_refused():
    refused('algorithm.dpo_beta = nan, above 0', fixture.algorithm, 'dpo', dpo_beta=np.nan)


@pytest.mark.parametrize(
    'preset, name', [('cispo', 'cispo_cap'), ('scalerl', 'cispo_cap'), ('default_rlvr', 'dual_clip')]
)
@pytest.mark.parametrize('bad', [0.99, 0.2, 0, -1, np.nan])
def test_cap_below_one_is_refused(preset, name, bad):
    # .2 is the epsilon of other code, whose cap is 1.2
    refused(f'algorithm.{name} = {bad!r}, at least 1', fixture.algorithm, preset, **{name: bad})
    fixture.algorithm(preset, **{name: 1.0})
    fixture.algorithm(preset, **{name: 1})


@pytest.mark.parametrize('preset', fixture.PRESETS)
@pytest.mark.parametrize('placement', ['loss', 'reward_sequence', 'reward_token'])
def test_a_kl_anywhere_keeps_a_reference_and_no_kl_keeps_none_for_it(preset, placement):
    method = fixture.algorithm(preset, **fixture.NO_KL)
    assert method.needs_reference == (preset == 'dpo')
    by_token = 'token_rewards' in pieces.reads(method.advantage)
    if placement != 'reward_sequence' or not by_token:
        kl = 'k3' if placement == 'loss' else 'k1'
        method = fixture.algorithm(preset, kl=kl, kl_coef=0.1, kl_placement=placement)
        assert method.needs_reference and method.keeps_reference and 'ref_logprobs' in method.needed_logprobs(1)


@pytest.mark.parametrize('preset', fixture.PRESETS)
def test_a_preset_passes_without_a_warning(preset):
    assert checks.check(fixture.algorithm(preset)) is None
    assert warnings(preset) == []


# what cannot work in a run

BATCH = ['hybrid', 'batch_centred_std', 'group_mean_batch_std', 'gdpo']
COMPARING = [
    'group_norm',
    'group_mean',
    'leave_one_out',
    'leave_one_out_norm',
    'hybrid',
    'batch_centred_std',
    'group_mean_batch_std',
    'maxrl',
    'opo',
    'pkpo',
    'gdpo',
    'xrpo_sharpen',
    'grpo_lambda',
    'gtpo',
    'best_and_worst',
    'process',
]
LONE = [
    'ones',
    'zeros',
    'correct',
    'reward',
    'moving_mean',
    'prompt_moving_mean',
    'reinforce_pp',
    'gae',
    'gae_by_length',
]


@pytest.mark.parametrize('advantage', COMPARING)
def test_a_group_of_one_is_refused_where_completions_are_compared(advantage):
    # hybrid too: r less the mean of one is 0, whatever the std of the batch
    method = fixture.algorithm_with('dapo', dict(pass_k=1), advantage=advantage)
    refused(
        f'rollout.group_size = 1, advantage {advantage} compares, at least 2',
        checks.check_run,
        method,
        **SIZES | dict(group_size=1),
    )
    assert checks.check_run(method, **SIZES | dict(group_size=2)) == []


@pytest.mark.parametrize('advantage', LONE)
def test_a_group_of_one_is_enough_where_none_are_compared(advantage):
    method = fixture.algorithm('dapo', advantage=advantage)
    assert checks.check_run(method, **SIZES | dict(group_size=1)) == []


@pytest.mark.parametrize('advantage', COMPARING)
def test_one_group_is_refused_where_the_batch_normalizes(advantage):
    method = fixture.algorithm('dapo', advantage=advantage)
    if advantage in BATCH:
        refused(
            f'data.prompts_per_step = 1, advantage {advantage} normalizes over the batch, 2 or more',
            checks.check_run,
            method,
            **SIZES | dict(prompts=1),
        )
        assert checks.check_run(method, **SIZES | dict(prompts=2)) == []
    else:
        assert checks.check_run(method, **SIZES | dict(prompts=1)) == []


@pytest.mark.parametrize('pass_k, size', [(9, 8), (5, 4)])
def test_pass_at_more_than_the_group_is_refused(pass_k, size):
    method = fixture.algorithm('pkpo', pass_k=pass_k)
    refused(
        f'algorithm.pass_k = {pass_k}, rollout.group_size = {size}',
        checks.check_run,
        method,
        **SIZES | dict(group_size=size),
    )


def test_pass_at_the_whole_group_is_said_to_have_no_signal():
    method, groups = fixture.algorithm('pkpo', pass_k=4), np.array([[1.0, 0, 0, 0], [1, 1, 1, 0]])
    assert not np.any(algorithms.compute_advantages(method, groups))
    (said,) = checks.check_run(method, **SIZES | dict(group_size=4))
    assert 'no signal with algorithm.pass_k = 4 = rollout.group_size' in said
    assert checks.check_run(method, **SIZES | dict(group_size=5)) == []


@pytest.mark.parametrize('preset', ['maxrl', 'pkpo'])
def test_negative_rewards_are_refused_where_the_estimator_divides_by_them(preset):
    method = fixture.algorithm_with(preset, dict(pass_k=2))
    refused(
        f"algorithm.advantage = '{preset}', at least 0, -0.5, give `correct`",
        algorithms.compute_advantages,
        method,
        np.array([[1.0, -0.5, 0, 1]]),
    )
    for fine in ([[1.0, 0, 0, 1]], [[np.nan] * 4], [[np.nan, 0, 1, -np.inf]]):
        assert np.all(np.isfinite(algorithms.compute_advantages(method, np.array(fine))))


@pytest.mark.parametrize('preset', ['grpo', 'dr_grpo', 'rloo'])
def test_negative_rewards_are_fine_elsewhere(preset):
    method = fixture.algorithm(preset, **fixture.NO_KL)
    assert np.any(algorithms.compute_advantages(method, np.array([[1.0, -0.5, 0, 1]])))


# what has no effect


@pytest.mark.parametrize(
    'surrogate', ['clip', 'dual_clip', 'cispo', 'sapo', 'dppo_tv', 'dppo_kl', 'vespo', 'policy_gradient', 'importance']
)
@pytest.mark.parametrize('updates', [1, 2, 16])
@pytest.mark.parametrize('base', ['old', 'sampler'])
def test_a_bound_without_effect_is_said(surrogate, updates, base):
    found = warnings('lite_ppo', dict(surrogate=surrogate, ratio_base=base), updates=updates)
    # the clip of the default is not named, unless a number of it was chosen: see the next test
    inert = updates == 1 and base == 'old' and surrogate not in ('policy_gradient', 'importance', 'clip')
    assert [f'the bound of surrogate {surrogate} has no effect' in text for text in found] == [True] * inert


@pytest.mark.parametrize(
    'preset, numbers, said', [('grpo', {}, False), ('grpo', {'clip_high': 0.28}, True), ('dapo', {}, True)]
)
def test_a_bound_that_nobody_has_chosen_is_not_warned_of(preset, numbers, said):
    # clip with 0.2 and 0.2 is the default; DAPO's preset has 0.28 above
    assert any('the bound of surrogate clip' in text for text in warnings(preset, numbers, updates=1)) == said


@pytest.mark.parametrize('ratio', ['token', 'sequence_geometric', 'sequence_geometric_token', 'clipped_geometric'])
@pytest.mark.parametrize('updates', [1, 2])
@pytest.mark.parametrize('surrogate', ['importance', 'policy_gradient'])
def test_a_ratio_without_effect_is_said(ratio, updates, surrogate):
    found = warnings('grpo', dict(ratio=ratio, surrogate=surrogate), updates=updates)
    inert = updates == 1 and ratio != 'token' and surrogate == 'importance'  # a policy gradient has no ratio
    assert [f'ratio {ratio} gives the gradient of ratio token' in text for text in found] == [True] * inert


@pytest.mark.parametrize(
    'ratio', ['sequence_product', 'sequence_geometric', 'sequence_geometric_token', 'clipped_geometric']
)
@pytest.mark.parametrize('weights', ['sequence_mean', 'token_mean'])
def test_a_ratio_said_to_give_the_gradient_of_token_gives_it(ratio, weights):
    changes = dict(surrogate='importance', weights=weights, **fixture.NO_KL)
    found = warnings('grpo', dict(changes, ratio=ratio), updates=1)
    methods = [fixture.algorithm('grpo', ratio=name, **changes) for name in (ratio, 'token')]
    experience = fixture.worked(methods[0], old=None)
    of_ratio, of_token = (fixture.loss_and_gradient(method, experience)[1] for method in methods)
    said = any(f'ratio {ratio} gives the gradient of ratio token' in text for text in found)
    assert said == np.allclose(of_ratio, of_token, atol=1e-7)


@pytest.mark.parametrize(
    'regularizer, inert',
    [('llds', True), ('kl_cov', True), ('positive_nll', False), ('behaviour_k2', False), ('entropy_bonus', False)],
)
@pytest.mark.parametrize('updates', [1, 2])
def test_a_regularizer_without_effect_is_said(regularizer, inert, updates):
    found = warnings('online_rft', dict(regularizers=(regularizer,)), updates=updates)
    assert [f'regularizer {regularizer} is 0' in text for text in found] == [True] * (inert and updates == 1)


@pytest.mark.parametrize(
    'low, high, wide',
    [(3e-4, 4e-4, False), (0.049, 0.049, False), (0.05, 4e-4, True), (3e-4, 0.05, True), (0.2, 0.28, True)],
)
@pytest.mark.parametrize('ratio', ['sequence_geometric', 'sequence_geometric_token'])
def test_a_clip_that_geometric_means_never_reach_is_said(ratio, low, high, wide):
    found = warnings('gspo', dict(ratio=ratio, clip_low=low, clip_high=high))
    assert ['a clip range of 0.05 or more never acts' in text for text in found] == [True] * wide


@pytest.mark.parametrize('ratio', ['token', 'sequence_product'])
def test_a_wide_clip_of_other_ratios_is_not_warned_of(ratio):
    assert warnings('gspo', dict(ratio=ratio, clip_low=0.2, clip_high=0.28)) == []


@pytest.mark.parametrize('weights', ['sequence_mean', 'token_mean', 'prompt_mean', 'fixed_length', 'sequence_sum'])
def test_long_rows_that_count_more_under_gspo_are_said(weights):
    found = warnings('gspo', dict(weights=weights))
    assert ['without weights sequence_mean long rows' in text for text in found] == [True] * (
        weights != 'sequence_mean'
    )
    assert warnings('gspo_token', dict(weights=weights)) == []  # its gradient is by token


@pytest.mark.parametrize('preset', fixture.PRESETS)
def test_warnings_of_one_update_are_those_of_the_pieces(preset):
    bounded = ('cispo', 'dapo', 'deepseek_r1', 'default_rlvr', 'entropy_8020', 'olmo3_like', 'sapo', 'scalerl', 'vapo')
    count = dict.fromkeys((*bounded, 'gmpo', 'kl_cov', 'llds_grpo'), 1) | {'gspo': 2, 'gspo_token': 2}
    assert len(warnings(preset, updates=1)) == count.get(preset, 0)


def test_every_estimator_is_in_one_of_the_lists_of_these_tests():
    assert {*COMPARING, *LONE} == set(pieces.list_pieces(advantages))
