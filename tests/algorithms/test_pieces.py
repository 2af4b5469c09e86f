"""What is known of a piece besides its formula: its numbers, its properties, and the data that it reads."""

import inspect

import fixture
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import advantages, checks, kl, pieces, ratios, regularizers, surrogates
from grpo_jax.algorithms.algorithm import MODULES
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.learner import critic

SECTION = default.get_config('sft').algorithm  # whose pieces have no numbers
NUMBERS = sorted(set(SECTION.keys()) - {*MODULES, *checks.CHOICES})
GROUPED = fixture.MASK.reshape(2, 4, 5)


def every_piece():
    return [piece for module in MODULES.values() for piece in pieces.list_pieces(module).values()]


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return tuple(2 * x for x in value) if isinstance(value, tuple) else 2 * value + 1


# numbers


@pytest.mark.parametrize('piece', every_piece(), ids=pieces.name_of)
def test_a_number_has_one_default_in_all_signatures_and_the_config(piece):
    numbers = pieces.numbers(piece)
    assert inspect.Parameter.empty not in numbers.values()
    assert numbers == {name: SECTION[name] for name in numbers}


@pytest.mark.parametrize('number', sorted({*NUMBERS} - {'advantage_clip', 'teacher_coef'}))
def test_a_number_that_nothing_reads_is_refused(number):
    with pytest.raises(BadInput, match=f'algorithm.{number} = '):
        fixture.algorithm('sft', **{number: changed(SECTION[number])})
    assert fixture.algorithm('sft', **{number: SECTION[number]})


def test_the_refusal_names_the_pieces_that_read_the_number():
    words = r'clip_high = 0\.28: nothing reads it; .* choose surrogate clip or surrogate dual_clip$'
    with pytest.raises(BadInput, match=words):
        fixture.algorithm('cispo', clip_high=0.28)
    with pytest.raises(BadInput, match=r'choose selection clip_cov or a regularizer that reads top_covariance'):
        fixture.algorithm('grpo', covariance_share=0.1)
    with pytest.raises(BadInput, match=r'choose an advantage that reads values'):
        fixture.algorithm('grpo', value_clip=0.5)
    with pytest.raises(BadInput, match=r'nothing reads it; .* choose a kl_target above 0'):
        fixture.algorithm('grpo', kl_horizon=5.0)


def test_a_misspelt_number_is_refused():
    section = dict(SECTION.items(), clip_hihg=0.3)
    with pytest.raises(BadInput, match=r'clip_hihg = 0\.3: no piece has a number of this name'):
        algorithms.make(section)


def test_a_number_without_a_key_has_the_default_of_the_signature():
    section = dict(default.get_config('dr_grpo').algorithm.items())
    del section['clip_high']
    assert pieces.numbers(algorithms.make(section).surrogate) == dict(clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize('number, preset', [('value_clip', 'ppo'), ('critic_warmup', 'vapo'), ('discount', 'gae')])
def test_numbers_of_a_critic_are_read_with_one(number, preset):
    changes = dict(advantage=preset) if preset == 'gae' else {}
    assert fixture.algorithm('ppo' if changes else preset, **changes, **{number: 1})


# data


def test_data_is_computed_once_and_only_when_it_is_read():
    calls = []
    inputs = pieces.Inputs({'ratio': lambda: calls.append('ratio') or 3, 'mask': lambda: calls.append('mask')})
    assert calls == [] and 'ratio' in inputs and len(inputs) == 2
    assert inputs['ratio'] + inputs['ratio'] + (inputs | {'mask': 1})['mask'] == 7
    assert calls == ['ratio']


def test_an_advantage_that_does_not_say_so_has_a_column_for_each_token_if_it_reads_data_by_token():
    def by_length(rewards, mask):  # one number a completion
        return rewards / mask.sum(-1)

    method = fixture.algorithm('dapo')._replace(advantage=by_length)
    values = algorithms.compute_advantages(method, fixture.REWARDS, mask=GROUPED)
    assert algorithms.is_by_token(method) and values.shape == (8, 5)
    np.testing.assert_allclose(values[0], 0.5)  # reward 1, 2 tokens
    narrow = method._replace(advantage=pieces.properties(by_token=False)(by_length))
    values = algorithms.compute_advantages(narrow, fixture.REWARDS, mask=GROUPED)
    assert not algorithms.is_by_token(narrow) and values.shape == (8, 1)


def test_an_advantage_by_token_that_says_it_is_not_is_refused():
    @pieces.properties(by_token=False)
    def mine(rewards, mask):
        return rewards[..., None] * mask

    method = fixture.algorithm('dapo')._replace(advantage=mine)
    with pytest.raises(BadInput, match=r"'mine': has a number for each token; say so by @pieces.properties"):
        algorithms.compute_advantages(method, fixture.REWARDS, mask=GROUPED)


@pytest.mark.parametrize('name', sorted(pieces.list_pieces(advantages)))
def test_what_an_advantage_says_of_its_columns_is_so(name):
    method = fixture.algorithm_with('dapo', dict(pass_k=2), advantage=name)._replace(surrogate=surrogates.importance)
    if name != 'gdpo':  # reads parts, which the example lacks
        assert (fixture.worked(method).advantages.shape == (8, 5)) == algorithms.is_by_token(method)


def test_an_unknown_property_is_refused():
    with pytest.raises(TypeError, match='boundless is no property of pieces; they are by_token, '):
        pieces.properties(boundless=True)


@pytest.mark.parametrize('discount, expected', [(1.0, [1, 1, 1]), (0.5, [0.25, 0.5, 1])])
def test_a_critics_advantage_written_as_a_plain_function_has_targets(discount, expected):
    # one completion of 3 tokens, reward 1, all values 0, lambda 1: the discounted reward to come
    def mine(rewards, values):
        return rewards[..., None] - values

    method = fixture.algorithm('grpo')._replace(advantage=mine, discount=discount, critic_lambda=1.0)
    data = dict(mask=np.ones((1, 1, 3), bool), values=np.zeros((1, 1, 3)))
    targets = critic.critic_targets(method, np.ones((1, 1)), kl_coef=0.0, **data)
    assert method.needs_values and algorithms.is_by_token(method)
    np.testing.assert_allclose(targets, [expected])


# what pieces may read


@pytest.mark.parametrize('key', MODULES)
def test_pieces_may_read_what_checks_say_and_no_more(key):
    names = checks.READABLE[key]
    assert all({*pieces.reads(piece)} <= {*names} for piece in pieces.list_pieces(MODULES[key]).values())
    # one that reads all of it at once is called with all of it
    everything = eval(f'lambda {", ".join(names)}: {"rewards" if key == "advantage" else "0.0 * mask + 1"}')
    method = fixture.algorithm('grpo', advantage='group_norm')
    method = method._replace(**{key: (everything,) if key == 'regularizers' else everything})
    checks.check_run(method, group_size=4, prompts=2, updates=1)
    if key == 'advantage':
        given = dict.fromkeys(names, 1.0) | {'mask': GROUPED, 'correct': fixture.REWARDS, 'tokens': GROUPED}
        given |= {'completion_mask': GROUPED, 'step_rewards': 1.0 * GROUPED, 'dead': np.zeros(2, bool)}
        algorithms.compute_advantages(method, fixture.REWARDS, **{k: x for k, x in given.items() if k != 'rewards'})
    else:
        fixture.loss_and_gradient(method, fixture.experience(np.ones((8, 1), np.float32)))


@pytest.mark.parametrize('key', MODULES)
def test_a_piece_that_reads_what_is_not_there_is_refused_before_a_run(key):
    def mine(mask, advantagse):
        return mask

    method = fixture.algorithm('grpo')._replace(**{key: (mine,) if key == 'regularizers' else mine})
    with pytest.raises(BadInput, match=rf"algorithm\.{key} = 'mine': reads advantagse, and may read .*mask"):
        checks.check_run(method, group_size=4, prompts=2, updates=1)


def test_a_number_without_its_star_is_refused_with_the_remedy():
    def mine(ratio, advantages, width=0.3):
        return -advantages * ratio * width

    with pytest.raises(BadInput, match=r'reads width, and may read .*; a number of the piece stands after a \*'):
        checks.check_run(fixture.algorithm('grpo')._replace(surrogate=mine), group_size=4, prompts=2, updates=1)


def test_a_correction_of_the_policy_of_the_moment_has_no_denominators():
    def mine(ratio):
        return ratio

    with pytest.raises(BadInput, match='correction mine reads ratio, which comes after denominators are computed'):
        checks.check(fixture.algorithm('gpg')._replace(correction=mine, denominator='selected'))


# numbers of the learner


@pytest.mark.parametrize(
    'estimator, share', [('k3', 0.75), ('k3_importance', 0.75), ('k3_straight_through', 0.75), ('k2', 0.25)]
)
def test_share_of_clamped_kl_knows_the_clamp_of_every_form_of_k3(estimator, share):
    # differences 1, 3, 5 and 25: k3 is 10 from 2.6 on, and all differences are clamped at 20
    mask = np.ones((1, 4), bool)
    logprobs = np.zeros((1, 4))
    experience = fixture.experience(
        np.ones((1, 1), np.float32), mask=mask, old=logprobs, ref=[[1.0, 3, 5, 25]], sampler=logprobs, entropy=logprobs
    )
    metrics = fixture.loss_and_gradient(fixture.algorithm('grpo', kl=estimator), experience, logprobs)[2]
    assert metrics['kl_clamped_share'] == share


STOPPED = {'cispo', 'vespo', 'k3_straight_through', 'sequence_geometric_token'}  # gradients that no difference has
SMOOTH = [
    piece
    for module in (ratios, surrogates, kl, regularizers)
    for piece in pieces.list_pieces(module).values()
    if not STOPPED & {piece.__name__}
]


@pytest.mark.parametrize('piece', SMOOTH, ids=pieces.name_of)
def test_gradient_of_a_piece_is_that_of_differences(piece):
    # at points beside every kink: no log ratio is 0, and none lies at a bound
    log_ratio = jnp.array([[0.11, -0.31], [-0.12, 0.33], [0.13, -0.05]], jnp.float32)
    data = dict(
        log_ratio=log_ratio,
        ratio=jnp.exp(log_ratio),
        token_ratio=jnp.exp(log_ratio),
        logprobs=log_ratio - 1,
        base_logprobs=jnp.full((3, 2), -1.0),
        ref_logprobs=jnp.full((3, 2), -1.2),
        sampler_logprobs=jnp.full((3, 2), -0.9),
        entropy=jnp.full((3, 2), 0.4),
        teacher_kl=jnp.full((3, 2), 0.3),
    )
    fixed = dict(
        advantages=jnp.array([[1.0], [-1.0], [0.5]]),
        mask=jnp.ones((3, 2), bool),
        group_ids=jnp.zeros(3, jnp.int32),
        rewards=jnp.array([1.0, 0, 1]),
        correct=jnp.array([1.0, 0, 1]),
        top_covariance=jnp.ones((3, 2)),
        entropy_coef=0.1,
    )
    live = {name: data[name] for name in pieces.reads(piece) if name in data}

    def term(live):
        return pieces.call(piece, fixed | {name: jnp.asarray(x) for name, x in live.items()})

    check_grads(term, (live,), order=1, modes=['rev'], eps=1e-3, atol=2e-2)
