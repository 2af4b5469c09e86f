"""Other numbers for a story: right, plausible, and none where the story does not say them."""

from fractions import Fraction

import pytest

from grpo_jax.data import renumber
from grpo_jax.expressions import value_of
from grpo_jax.types import Example

ROPE = Example('A rope of 7.5 m is cut into 3 parts. How long is a part?', '2.5', 4, {'demonstration': '7.5 / 3 = 2.5'})


def problem(prompt, answer, expression):
    return Example(prompt, answer, 4, {'demonstration': expression})


def test_a_variant_is_a_function_of_the_prompt_and_its_number():
    story = problem('Ann had 40 cards, and gave Bob 15. How many are left?', '25', '40 - 15')
    variants = [renumber.change_numbers(story, id) for id in range(100, 130)]
    assert variants == [renumber.change_numbers(story, id) for id in range(100, 130)]
    assert [variant.id for variant in variants] == [*range(100, 130)] and len({v.prompt for v in variants}) > 25
    for variant in variants:
        had, gave = map(int, variant.meta['demonstration'].split(' - '))
        assert 20 <= had <= 80 and 8 <= gave <= 30 and had > gave and int(variant.answer) == had - gave
        assert variant.prompt == f'Ann had {had} cards, and gave Bob {gave}. How many are left?'


def test_numbers_of_the_story_that_no_operation_has_change_too_and_keep_their_order():
    story = problem('In 5 days 12 ants ate 60 crumbs, of 3 kinds. How many did each eat?', '5', '60 / 12')
    variants = [renumber.change_numbers(story, id) for id in range(30)]
    for variant in filter(None, variants):
        days, ants, crumbs, kinds = map(int, renumber.NUMBER.findall(variant.prompt))
        assert kinds < days < ants < crumbs == ants * int(variant.answer)
    assert sum(variant is not None for variant in variants) > 20


def test_decimals_and_the_value_behind_an_equals_sign_stay_exact():
    for number in range(30):
        variant = renumber.change_numbers(ROPE, number)
        expression, _, value = variant.meta['demonstration'].partition(' = ')
        assert value == variant.answer and value_of(expression) == Fraction(value)
        assert '.' in expression and variant.prompt != ROPE.prompt
    large = problem('A town has 1234567 people, and 12345.25 trees. Both?', '1246912.25', '1234567 + 12345.25')
    variant = renumber.change_numbers(large, 1)
    assert value_of(variant.meta['demonstration']) == Fraction(variant.answer)
    product = problem('9999999999 rows of 9999999999. How many?', '99999999980000000001', '9999999999 * 9999999999')
    assert renumber.change_numbers(product, 1) is None  # nobody works that out


@pytest.mark.parametrize(
    ('prompt', 'expression'),
    [
        ('Two boys have 4 marbles each. How many have they?', '4 * 2'),  # the prompt writes 2 as a word
        ('What is a dozen?', '12'),
        ('A book costs 1,250 dollars, a pen 2. Together?', '1250 + 2'),  # commas are no part of a number here
        ('Ann has 4 apples.', ''),
        ('Ann has 4 apples.', '4 +'),
        ('Ann has 0 apples and buys 0.', '0 / 0'),
        ('Ann has 1 apple and 1 pear. Together?', '0 + 0'),
        ('She comes 2nd at 4:00 in B2. Twice that?', '2 * 4'),
        ('Version 1.2.3 and 4 more?', '4 + 4.2'),
        ('4 and 4 and ' + '9' * 400, '4 + 4'),
        ('4 and 4 and 0.' + '1' * 400, '4 + 4'),
        ('4 and 4' + ' and 5.5' * 10**5 + ' and ' + ' '.join(map(str, range(10, 5000))), '4 + 4'),
        ('1' * 500_000 + ',1 and 7', '7 + 1'),
        ('Ann had 5 and 4.', '5 + 4'),  # which is not 8
    ],
)
def test_there_is_none_for_a_story_without_its_numbers(prompt, expression):
    assert renumber.change_numbers(problem(prompt, '8', expression), 1) is None


@pytest.mark.parametrize(
    ('prompt', 'numbers'),
    [
        ('Ann has 5.', ['5']),
        ('It is 2.5. Or 3/4, or $7, or (8)!', ['2.5', '3', '4', '7', '8']),
        ('5...6', ['5']),  # a point before a number may be a part of it
        ('1 and 1', ['1', '1']),
    ],
)
def test_numbers_at_the_ends_of_words_are_found(prompt, numbers):
    assert renumber.NUMBER.findall(prompt) == numbers


def test_there_is_none_without_a_demonstration():
    assert renumber.change_numbers(Example('1 and 2?', '3', 0, {}), 1) is None
