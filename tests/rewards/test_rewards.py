"""Rewards as tables of completions, and their weighted sum."""

from fractions import Fraction
import importlib
import inspect
from typing import NamedTuple

import numpy as np
import pytest

from grpo_jax import expressions, rewards
from grpo_jax.algorithms import Grouping
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.rewards import calculator, contains, length, numeric
from grpo_jax.types import Example


def example(answer):
    return Example('question', answer, 0, {})


@pytest.mark.parametrize(
    'completion, answer, expected',
    [
        ('42', '42', 1),
        ('so it is 42.', '42', 1),
        ('42', '43', 0),
        ('', '42', 0),
        ('no number', '42', 0),
        ('first 42, then 7', '7', 1),
        ('first 42, then 7', '42', 0),  # without a mark the last number counts
        ('12 apples\n#### 42', '42', 1),
        ('#### 42 of 50', '42', 1),  # after the mark the first
        ('#### 1\n#### 42', '42', 1),
        ('#### 42\n#### 1', '42', 0),  # after the last mark
        ('42 ####', '42', 0),
        ('42 #### none', '42', 0),  # a mark without a number is no answer
        ('####42', '42', 1),
        ('#### $42', '42', 1),
        ('#### **42**', '42', 1),
        ('42.0', '42', 1),
        ('042', '42', 1),
        ('42', '42.00', 1),
        ('.5', '0.5', 1),
        ('0.50', '.5', 1),
        ('42.', '42', 1),
        ('1,234', '1234', 1),
        ('1234', '1,234', 1),
        ('1,234,567.5', '1234567.5', 1),
        ('$1,000', '1000', 1),
        ('3, 4', '4', 1),
        ('1,2345', '2345', 1),  # not thousands
        ('-5', '-5', 1),
        ('-5', '5', 0),
        ('+5', '5', 1),
        ('x=-5', '-5', 1),
        ('-0', '0', 1),
        ('10-5', '5', 1),
        ('(10)-5', '5', 1),
        ('10 - 5', '5', 1),  # subtraction
        ('0.3333333333333333', '0.3333333333333334', 0),  # exact, where floats would be equal
        ('123456789012345678901', '123456789012345678902', 0),
        ('9' * 101, '9' * 100, 0),
        ('9' * 100000, '9', 0),  # noise of digits
    ],
)
def test_numeric(completion, answer, expected):
    assert numeric.reward(completion, example(answer)) == expected


@pytest.mark.parametrize('answer', ['', 'many', '9' * 101])
def test_numeric_without_a_gold_number_is_unscorable(answer):
    assert numeric.reward('42', example(answer)) is None


@pytest.mark.parametrize(
    'completion, expected',
    [('#### 1,000.50', '2001/2'), ('7.0', '7'), ('it is -3', '-3'), ('nothing', None), ('5 ####', None)],
)
def test_extracted_answers_have_one_spelling(completion, expected):
    # majority votes count spellings
    assert numeric.extract(completion) == expected


GOOD = '<think>a</think><answer>4</answer>'


@pytest.mark.parametrize(
    'completion, answer, expected',
    [
        ('a red cat sat', 'cat', 1),
        ('Cat!', 'cat', 1),
        ('the cat', 'CAT', 1),
        ('"cat"', 'cat', 1),
        ('cats', 'cat', 0),
        ('concatenate', 'cat', 0),
        ('', 'cat', 0),
        ('c.t', 'c.t', 1),
        ('cat', 'c.t', 0),
        ('red\ncat', 'cat', 1),
        ('I use C++.', 'C++', 1),
        ('C++11', 'C++', 0),
        ('anything', '', None),
    ],
)
def test_contains(completion, answer, expected):
    assert contains.reward(completion, example(answer)) == expected


def build(max_tokens=64, functions=None, **changes):
    section = default.get_config().reward
    section.options = changes.pop('options', section.options)
    section.update(changes)
    return rewards.build(rewards.RewardOptions.from_config(section), max_tokens, functions)


def compute(reward_functions, examples, texts, truncated):
    """(rewards, parts) of completions; their lengths play no role."""
    rewarded = rewards.compute_rewards(reward_functions, examples, texts, truncated, [0] * len(texts))
    return rewarded.rewards, rewarded.parts


def make(*parts, truncated=0.0, verifier=''):
    return build(parts=parts, truncated_reward=truncated, verifier=verifier)


def test_score_is_the_weighted_sum_over_groups_of_rows():
    # 2 examples of 2 rows each. numeric: 1 0 0 1, format: 1 1 0 0
    reward_functions = make(('numeric', 1.0), ('format', 0.25))
    completions = ['<think></think><answer>4</answer>', '<think></think><answer>5</answer>', '4', '5']
    total, parts = compute(reward_functions, [example('4'), example('5')], completions, np.zeros(4, bool))
    assert total.tolist() == [1.25, 0.25, 0, 1]
    assert parts['numeric'].tolist() == [1, 0, 0, 1] and parts['format'].tolist() == [1, 1, 0, 0]
    assert total.dtype == np.float64


def test_truncated_completions_get_the_extra_term():
    reward_functions = make(('numeric', 1.0), truncated=-0.5)
    total, parts = compute(reward_functions, [example('4')], ['4', '4', '5'], np.array([True, False, True]))
    assert total.tolist() == [0.5, 1, -0.5]
    assert parts['numeric'].tolist() == [1, 1, 0]


def test_completion_that_one_part_cannot_judge_is_unscorable_or_by_config_gets_the_others():
    parts, examples, cut = (('numeric', 1.0), ('format', 0.5)), [example('many'), example('4')], np.zeros(2, bool)
    total, by_part = compute(build(parts=parts), examples, [GOOD, GOOD], cut)
    assert np.isnan(total[0]) and total[1] == 1.5 and by_part['format'].tolist() == [1, 1]
    total, by_part = compute(build(parts=parts, missing='zero'), examples, [GOOD, GOOD], cut)
    assert total.tolist() == [0.5, 1.5] and by_part['numeric'].tolist() == [0, 1]


def test_part_of_weight_0_makes_no_completion_scorable_and_none_unscorable():
    examples, cut = [example('many'), example('4')], np.zeros(2, bool)
    total, _ = compute(make(('numeric', 1.0), ('format', 0.0)), examples, [GOOD, GOOD], cut)
    assert np.isnan(total[0]) and total[1] == 1
    total, parts = compute(make(('numeric', 0.0), ('format', 0.5)), examples, [GOOD, GOOD], cut)
    assert total.tolist() == [0.5, 0.5] and np.isnan(parts['numeric'][0])


def test_completion_that_no_part_can_score_is_nan_even_when_truncated():
    reward_functions = make(('numeric', 1.0), truncated=-0.5)
    total, _ = compute(reward_functions, [example('many'), example('4')], ['4', '4'], np.array([True, True]))
    assert np.isnan(total[0]) and total[1] == 0.5


def test_verifier_extracts_answers():
    assert make(('numeric', 1.0), verifier='numeric').extract('#### 4') == '4'
    assert make(('numeric', 1.0)).extract is None


@pytest.mark.parametrize(
    'parts, verifier, message',
    [
        ([('nonsense', 1.0)], '', r"^reward.parts = 'nonsense': no such file in grpo_jax/rewards"),
        ([], '', r'^reward.parts = .*: must be pairs of a reward and its weight'),
        (
            [('format', 1.0)],
            'numeric',
            r"^reward.verifier = 'numeric': is none of reward.parts; add it, or choose one of format",
        ),
    ],
)
def test_reward_section_that_cannot_work_is_refused(parts, verifier, message):
    with pytest.raises(BadInput, match=message):
        make(*parts, verifier=verifier)


@pytest.mark.parametrize('name, value', [('workers', 0), ('deadline', 0.0), ('memory_gib', -1.0)])
def test_limits_of_workers_must_be_above_0(name, value):
    with pytest.raises(BadInput, match=f'^reward.{name} = {value}: must be a .* at least '):
        build(**{name: value})


class Place(NamedTuple):
    row: int
    column: int


def test_a_named_tuple_takes_the_options_of_its_fields():
    def at(completion, example, *, place: Place, scale):
        return scale * (10.0 * place.row + place.column)

    changes = {'parts': (('at', 1.0),), 'verifier': ''}
    options = {'at': {'row': 4, 'column': 2, 'scale': 0.5}}
    reward_functions = build(functions={'at': at}, options=options, **changes)
    assert compute(reward_functions, [example('')], [''], [False])[0].tolist() == [21.0]
    with pytest.raises(BadInput, match=r'^reward.options.at lacks column, scale'):
        build(functions={'at': at}, options={'at': {'row': 4}}, **changes)


def test_every_default_option_is_one_that_its_reward_declares():
    for name, options in default.get_config().reward.options.items():
        if hasattr(length, name):
            functions = [getattr(length, name)]
        else:
            module = importlib.import_module(f'grpo_jax.rewards.{name}')
            functions = [getattr(module, key) for key in ('reward', 'strict', 'steps') if hasattr(module, key)]
        declared = {key for function in functions for key in option_names(function)}
        assert declared - {'pool', 'sandbox', 'models', 'correct', 'limit'} == set(options), name


def option_names(function):
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            yield from getattr(parameter.annotation, '_fields', [key])


# shaping by length


def test_shaping_adds_to_the_reward_and_judges_by_the_verifier():
    reward_functions = build(300, length_shaping='kimi', length_shaping_weight=2.0)
    nothing = np.zeros(4, bool)
    rewarded = rewards.Rewards(
        np.array([''] * 4, object),
        nothing,
        np.array([100, 150, 200, 300]),
        np.array([1.0, 5, 1, 0]),
        np.array([1.0, 0, 1, np.nan]),
        {'numeric': np.array([1.0, 0, 1, 0])},
        {},
    )
    np.testing.assert_allclose(
        rewards.shape_rewards(reward_functions, rewarded, Grouping.by_sizes(np.array([4]))), [[2, 5, 1, -1]]
    )


@pytest.mark.parametrize(
    'changes, words',
    [
        (dict(length_shaping='short'), ['short', 'kimi']),
        (dict(length_shaping='overlong', options={'overlong': {'margin': 300}}), ['overlong.margin = 300']),
        (dict(step_rewards='numeric'), ['numeric', 'steps(completion, example)']),
    ],
)
def test_shaping_that_cannot_work_is_refused(changes, words):
    with pytest.raises(BadInput) as error:
        build(300, **changes)
    assert all(word in str(error.value) for word in words)


# steps


@pytest.mark.parametrize(
    'expression, value',
    [
        ('48/2', 24),
        ('2*(3+4)/007', 2),
        ('0.2*50', 10),
        ('-5+3', -2),
        ('1/3', Fraction(1, 3)),
        ('.5*4', 2),
        ('3', 3),
        ('1/0', None),
        ('2**9999999', None),
        ('9' * 101, None),
        ('((((', None),
        ('2(3)', None),
        ('1+', None),
        ('1,2', None),
    ],
)
def test_value_of_an_expression(expression, value):
    assert expressions.value_of(expression) == value


def test_steps_are_judged_one_by_one_where_they_end():
    text = '48/2=24 48+24=720'
    assert calculator.steps(text, example('72')) == [(7, 1.0), (17, 0.0)]
    assert calculator.reward(text, example('72')) == 0.5
    assert calculator.reward('no equation', example('72')) is None


def test_a_value_is_all_of_its_side():
    text = '48/2=24,000 48/2=12*5 48/2=24, 48/2=24.'
    assert [value for _, value in calculator.steps(text, example('72'))] == [0, 0, 1, 1]


def test_a_true_equation_that_was_not_asked_pays_nothing():
    asked = Example('q', '72', 0, {'steps': ['48/2', '48+24']})
    assert [value for _, value in calculator.steps('48/2=24 1+1=2 48+24=72', asked)] == [1, 0, 0]


def test_gsm8k_annotations_are_steps():
    text = 'She sold 48/2 = <<48/2=24>>24 in May, <<48+24=71>>71 in all.\n#### 71'
    assert [value for _, value in calculator.steps(text, example('72'))] == [1, 0]


class Words:
    """A tokenizer of one word a token."""

    eos_token_id = pad_token_id = None

    def decode(self, ids, **options):
        return ' '.join(['48/2=24', '48+24=720', ''][i] for i in ids).strip()


@pytest.mark.parametrize('with_outcome', [False, True])
def test_step_rewards_lie_on_the_token_that_ends_the_step_and_the_outcome_is_one_where_asked(with_outcome):
    tokens = np.array([[9, 0, 1, 2, 0], [9, 1, 0, 0, 0]])
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    texts = ['48/2=24 48+24=720', '48+24=720 48/2=24']
    reward_functions = build(4, step_rewards='calculator', steps_with_outcome=with_outcome)
    rewarded = rewards.compute_rewards(reward_functions, [example('72')], texts, [False, False], [3, 2])
    inputs = rewards.advantage_inputs(
        reward_functions,
        [example('72')],
        rewarded,
        np.array([[0.5, 5.0]]),
        lambda: (tokens, mask),
        Words(),
        Grouping.by_sizes(np.array([2])),
    )
    nan = np.nan
    expected = [[1, 0, 0.5, nan], [0, 6, nan, nan]] if with_outcome else [[1, 0, nan, nan], [0, 1, nan, nan]]
    np.testing.assert_array_equal(inputs['step_rewards'](), [expected])
