"""A correct number: 1 if the completion's answer equals the gold number, else 0."""

from fractions import Fraction
import re

from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.rewards.gold import perturb

# a minus after a digit or a bracket is subtraction
NUMBER = re.compile(r'(?:(?<![\d)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)')
PLAIN = re.compile(r'[-+]?[$]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?[$]?\.\d+')


def reward(completion: str, example: Example) -> float | None:
    """1.0 if the extracted number equals example.answer exactly, else 0.0; None where the answer is not one number."""
    gold = plain_number(example.answer)
    if gold is None:
        return None
    return float(extract(completion) == gold)


def extract(completion: str) -> str | None:
    """The first number after the last ####, or without #### the last number, in canonical form, like '7/2'.

    None without a number, and for one of more than 100 characters.
    """
    _, mark, tail = completion.rpartition('####')
    numbers = NUMBER.findall(tail)
    if not numbers:
        return None
    text = numbers[0 if mark else -1].replace(',', '')
    # a numeral of thousands of digits is noise, and exact arithmetic on it is slow
    return None if len(text) > 100 else str(Fraction(text))


def gold(example: Example) -> tuple[str, ...]:
    """(gold answer, wrong answers...) for the self-test; see gold.perturb.

    Raises BadInput for a gold answer with digits that is no plain number: 1/2 would be read as 2, and 1e-05 as -5.
    """
    text = example.answer.rpartition('####')[2].strip()
    if re.search(r'\d', text) and not PLAIN.fullmatch(text):
        remedy = 'is not one plain number, like -1,234.5; choose reward.verifier math, or mend the data'
        raise BadInput(f'answer of example {example.id}', example.answer[:80], remedy)
    return perturb(example)


def plain_number(answer: str) -> str | None:
    """A gold answer's number in canonical form, where the text after #### (or all of it) is one number; else None."""
    text = answer.rpartition('####')[2].strip()
    return extract(text) if PLAIN.fullmatch(text) else None
