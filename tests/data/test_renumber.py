"""Other numbers for a story: right, plausible, and none where the story does not say them."""

import pytest

from grpo_jax.data import renumber
from grpo_jax.expressions import value_of
from grpo_jax.types import Example

ROPE = Example('A rope of 7.5 m is cut into 3 parts. How long is a part?', '2.5', 4, {'demonstration': '7.5 / 3 = 2.5'})


def problem(prompt, answer, expression):
    return Example(prompt, answer, 4, {'demonstration': expression})


def test_a_variant_is_a_function_of_the_prompt_and_its_number():
    story = problem('Ann had 40 cards, and gave Bob 15. How many are left?', '25', '40 - 15')
    variants = [renumber.renumbered(story, id) for id in range(100, 130)]
    assert variants == [renumber.renumbered(story, id) for id in range(100, 130)]
    assert [variant.id for variant in variants] == [*range(100, 130)] and len({v.prompt for v in variants}) > 25
    for variant in variants:
        had, gave = map(int, variant.meta['demonstration'].split(' - '))
        assert 20 <= had <= 80 and 8 <= gave <= 30 and had > gave and int(variant.answer) == had - gave
        assert variant.prompt == f'Ann had {had} cards, and gave Bob {gave}. How many are left?'


def test_numbers_of_the_story_that_no_operation_has_change_too_and_keep_their_order():
    story = problem('In 5 days 12 ants ate 60 crumbs, of 3 kinds. How many did each eat?', '5', '60 / 12')
    variants = [renumber.renumbered(story, id) for id in range(30)]
    for variant in filter(None, variants):
        days, ants, crumbs, kinds = map(int, renumber.NUMBER.findall(variant.prompt))
        assert kinds < days < ants < crumbs == ants * int(variant.answer)
    assert sum(variant is not None for variant in variants) > 20


def test_decimals_and_the_value_behind_an_equals_sign_stay():
    variant = renumber.renumbered(ROPE, 9)
    expression, _, value = variant.meta['demonstration'].partition(' = ')
    assert value == variant.answer and abs(float(value_of(expression)) - float(value)) < 1e-4
    assert '.' in expression and variant.prompt != ROPE.prompt


@pytest.mark.parametrize(
    ('prompt', 'expression'),
    [
        ('Two boys have 4 marbles each. How many have they?', '4 * 2'),  # the prompt writes 2 as a word
        ('What is a dozen?', '12'),
        ('A book costs 1,250 dollars, a pen 2. Together?', '1250 + 2'),  # commas are no part of a number here
        ('Ann has 4 apples.', ''),
        ('Ann has 4 apples.', '4 +'),
        ('Ann has 0 apples and buys 0.', '0 / 0'),
    ],
)
def test_there_is_none_for_a_story_without_its_numbers(prompt, expression):
    assert renumber.renumbered(problem(prompt, '8', expression), 1) is None


def test_there_is_none_without_a_demonstration():
    assert renumber.renumbered(Example('1 and 2?', '3', 0, {}), 1) is None
