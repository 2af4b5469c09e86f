"""Countdown: the reward as a table, and data whose every problem has the solution that it was made from."""

import re
import warnings

from hypothesis import given
from hypothesis import strategies as st
import pytest

from grpo_jax import expressions
from grpo_jax.data import countdown as problems
from grpo_jax.errors import BadInput
from grpo_jax.rewards import calculator, countdown, format, gold
from grpo_jax.types import Example

EXAMPLE = Example('question', '3*5+7', 0, {'numbers': [5, 7, 3], 'target': 22})


def reward(completion, example=EXAMPLE, partial=0.1):
    return countdown.reward(completion, example, partial=partial)


@pytest.mark.parametrize(
    'completion',
    [
        '3*5+7',
        ' 7 + 3*5\n',
        '(5*3)+7',
        '<answer>3*5+7</answer>',
        '<think>3+5=8</think>\n<answer> 3 * 5 + 7 </answer> ok',
        '<answer>1</answer> no: <answer>7+5*3</answer>',
        '7--5*3',
        '007+05*3',
        '-(-7-5*3)',
        '((((7)))+5*3)',
        '(3*5\n+7)',
        '<answer><answer>3*5+7</answer>',
    ],
)
def test_right_expressions(completion):
    assert reward(completion) == 1


@pytest.mark.parametrize(
    'completion',
    [
        '3*5+8',
        '22',
        '3*5',
        '3*5+7+0',
        '3+5+7',
        '3*5+7*1',
        '3*7+1',
        '15+7',
        '3*5+7-3+3',
        '35+7',
        '3+57',
        '<answer>3*5+7</answer> or <answer>22</answer>',
        '1/3',
        '5*3+7/1',
    ],
)
def test_other_expressions_get_the_partial_reward(completion):
    assert reward(completion) == 0.1
    assert reward(completion, partial=0.0) == 0


@pytest.mark.parametrize(
    'completion',
    [
        '',
        'no',
        '3*5+7=22',
        '<answer>3*5+7',
        'it is 3*5+7',
        '3*5+7 <answer></answer>',
        '3*5+7.',
        '3 5 7',
        '3**5+7',
        '7//3*5',
        '5/(3-3)+7',
        '()',
        '(3*5+7',
        '3(5)+7',
        '3*5+7,',
        '3*5+1.5',
        '3*5+7.0',
        '3*5+0x7',
        '3*5+7e0',
        '3*5+7j',
        '3*5+0_7',
        '3*5+\u0667',
        '\uff13*5+7',
        '3\u00d75+7',
        '+3*5+7',
        '3*5+seven',
        '[3*5+7]',
        '3*5+7\0',
        '3*5 # +7',
        "__import__('os')",
        '1' * 101,
        '(' * 60 + '3*5+7' + ')' * 60,
        '9**9**9**9',
    ],
)
def test_what_is_no_expression_gets_nothing(completion):
    assert reward(completion) == 0 and countdown.extract(completion) is None


@pytest.mark.parametrize(
    'target, completion', [('1/3*3', 1), ('8/(3-8/3)', 24), ('(1/3+1/6)*2', 1), ('1/49*49', 1), ('7-3*5', -8)]
)
def test_values_are_exact(target, completion):
    # in floats 1/49*49 is not 1
    numbers = [int(number) for number in re.findall(r'\d+', target)]
    assert reward(target, Example('', target, 0, {'numbers': numbers, 'target': completion})) == 1


def test_numbers_count_as_often_as_they_are_given():
    twice = Example('', '4+4', 0, {'numbers': [4, 4], 'target': 8})
    assert reward('4+4', twice) == 1 and reward('4*2', twice) == reward('4', twice) == reward('4+4+4-4', twice) == 0.1


def test_refused_expressions_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert reward('3(5)+7') == reward('(3)(5)') == 0


@pytest.mark.parametrize(
    'completion, expected',
    [(' 3 * 5 + 7', '3*5+7'), ('<answer>\n3*5\n</answer>', '3*5'), ('it is 22', None), ('<answer>x</answer>', None)],
)
def test_extracted_answers_are_expressions_without_spaces(completion, expected):
    assert countdown.extract(completion) == expected


# data

SIZES = {
    'three': dict(numbers=(3, 3), largest=20, highest=99, operations='+-*'),
    'three or four': dict(numbers=(3, 4), largest=100, highest=1000, operations='+-*/'),
    'six': dict(numbers=(6, 6), largest=10, highest=10**6, operations='+-*/'),
}


def examples(split='train', size='three', **changes):
    return problems.examples(split, **dict(count=300, short=True, wrong=0.0) | SIZES[size] | changes)


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('split', ['train', 'test'])
def test_every_problem_has_a_solution_of_its_numbers(split, size):
    found = examples(split, size, count=100)
    assert len(found) == len({e.prompt for e in found}) == len({e.id for e in found}) == 100
    fewest, most = SIZES[size]['numbers']
    for e in found:
        assert fewest <= len(e.meta['numbers']) <= most and 1 <= e.meta['target'] <= SIZES[size]['highest']
        assert all(1 <= number <= SIZES[size]['largest'] for number in e.meta['numbers'])
        assert reward(e.answer, e) == 1 == reward(e.meta['demonstration'], e)
    assert {len(e.meta['numbers']) for e in found} == set(range(fewest, most + 1))


def test_train_and_test_share_no_numbers_in_any_order():
    # nearly all that there are, so that shared ones would show
    train, test = (
        {tuple(sorted(e.meta['numbers'])) for e in examples(split, largest=6, count=1000)}
        for split in ('train', 'test')
    )
    assert len(train) > 40 and len(test) > 2 and not train & test
    assert len(train | test) == 56  # 3 of 6 with repetition


def test_there_may_be_fewer_problems_than_asked_for():
    # 1+1, 1+2 and 2+2, and each pair of numbers is in one split
    few = dict(numbers=(2, 2), largest=2, operations='+', count=50)
    found = [e for split in ('train', 'test') for e in examples(split, **few)]
    assert sorted(e.prompt.replace('2,1', '1,2') for e in found) == ['1,1=2:', '1,2=3:', '2,2=4:']
    assert sorted(e.meta['demonstration'].replace('2+1', '1+2') for e in found) == ['1+1', '1+2', '2+2']


def test_examples_are_the_same_each_time_and_a_smaller_count_is_a_beginning():
    # a config that was read back has lists for tuples
    assert examples() == examples(numbers=[3, 3])
    assert examples(count=50) == examples()[:50]


def test_wrong_demonstrations_are_expressions_of_the_numbers_that_miss_and_the_problems_stay():
    found = examples(wrong=1.0)
    assert [e.prompt for e in found] == [e.prompt for e in examples()]
    missed = [e for e in found if reward(e.meta['demonstration'], e) == 0.1]
    assert len(missed) > 290  # 1,1,1 and the like have no other value
    for e in missed:
        used = [int(number) for number in re.findall(r'\d+', e.meta['demonstration'])]
        assert sorted(used) == sorted(e.meta['numbers']) and reward(e.answer, e) == 1


def test_share_of_wrong_demonstrations_is_the_asked_one():
    # 2000 draws: the standard deviation is .011, the bound 4 of them
    found = examples(count=2000, wrong=0.6)
    assert abs(sum(reward(e.meta['demonstration'], e) == 1 for e in found) / 2000 - 0.4) < 0.045


def test_prompt_in_words_asks_for_the_tags_that_its_demonstration_has():
    for e in examples(size='three or four', short=False):
        assert str(e.meta['target']) in e.prompt and ', '.join(map(str, e.meta['numbers'])) in e.prompt
        demonstration = e.meta['demonstration']
        assert format.reward(demonstration, e, tags=('think', 'answer')) == 1 == reward(demonstration, e)
        # the thought is the way to the answer
        assert calculator.reward(demonstration.partition('</think>')[0], e) == 1
        assert re.search(r'=(\d+)</think>', demonstration)[1] == str(e.meta['target'])


def test_the_gold_self_test_refuses_changed_answers():
    for e in examples(size='three or four'):
        right, changed = gold.change_answer(e)
        assert reward(right, e) == 1 and reward(changed, e) == 0.1


@given(st.recursive(st.integers(1, 9), lambda parts: st.tuples(parts, st.sampled_from('+-*/'), parts), max_leaves=8))
def test_texts_have_the_brackets_that_their_value_needs(tree):
    def built(node):
        if isinstance(node, int):
            return problems.Term(node, str(node), problems.NUMBER), str(node)
        (left, plain_left), sign, (right, plain_right) = built(node[0]), node[1], built(node[2])
        binds = problems.SUM if sign in '+-' else problems.PRODUCT
        return problems.Term(0, problems._text(left, sign, right), binds), f'({plain_left}{sign}{plain_right})'

    term, plain = built(tree)
    assert expressions.value_of(term.text) == expressions.value_of(plain)
    assert term.text.count('(') <= plain.count('(')


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(numbers=(4, 3)), r'^data.options.numbers'),
        (dict(operations='+^'), r"^data.options.operations = '\+\^': has others than \+-\*/; leave them out"),
    ],
)
def test_options_that_cannot_work_are_refused(changes, message):
    with pytest.raises(BadInput, match=message):
        examples(**changes)
