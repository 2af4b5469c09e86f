"""Expressions: judged by their value, exactly; what is none gets nothing."""

import pytest

from grpo_jax.example import Example
from grpo_jax.rewards import expression


def reward(completion, answer):
    return expression.reward(completion, Example('', answer, 0, {}))


@pytest.mark.parametrize(
    'completion, answer',
    [
        ('43 - 21', '22'),
        ('( 5 + 3 ) * 2', '16'),
        ('(5+3)*2', '#### 16'),
        ('7 - 9', '-2'),
        ('10 / 4', '2.5'),
        ('2.5 * 4', '10.0'),
        ('1 / 3 * 3', '1'),
        ('1 / 49 * 49', '1'),  # not 1 in floats
        ('600 * 2', '1,200'),
        ('22', '22'),
        ('-(3 - 5)', '2'),
        (' 43\n-\t21 ', '22'),
        ('43 minus 21 is <answer>43 - 21</answer>', '22'),
        ('<answer>1</answer><answer>43 - 21</answer>', '22'),  # the last one
        ('007 + 1', '8'),
    ],
)
def test_an_expression_of_the_answers_value_is_right(completion, answer):
    assert reward(completion, answer) == 1


@pytest.mark.parametrize(
    'completion',
    [
        '',
        '43 + 21',
        '43 - 21 = 22',  # a statement, which may be wrong on either side
        '43 - 21 is 22',
        'the answer is 22',
        '<answer>43 - 21',  # never closed
        '43 - 21,',
        '22, 23',
        '(43 - 21',
        '43 -- 21 +',
        '22 / 0',
        '22 // 1',
        '22 % 23',
        '484 ** 0.5',
        '2_2',
        '22e0',
        '0x16',
        '22 if 1 else 0',
        '22 (1)',
        '1' + ' + 1' * 60,
        '(' * 3000 + '22' + ')' * 3000,
        '9**9**9**9',
        '\u0662\u0662',  # digits of another script
    ],
)
def test_whatever_else_is_wrong(completion):
    assert reward(completion, '22') == 0


@pytest.mark.parametrize('answer', ['', 'many', '1/2 or 3'])
def test_without_a_gold_number_nothing_is_said(answer):
    assert reward('22', answer) is None


def test_votes_count_values():
    spellings = ('43 - 21', '44 / 2', '22.0', '<answer>11+11</answer>')
    assert {expression.extract(text) for text in spellings} == {'22'}
    assert expression.extract('1 / 3') == '1/3' and expression.extract('none') is None
