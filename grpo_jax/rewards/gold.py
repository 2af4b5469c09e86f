"""The gold self-test: before a run learns from them, gold answers must be right and changed ones wrong."""

from collections.abc import Sequence
import contextlib
from fractions import Fraction
import functools
import logging
import re

from grpo_jax import activity
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.rewards.build import RewardFunctions
from grpo_jax.rewards.scoring import FAILURES

logger = logging.getLogger('grpo_jax')
# one number in several parts: a fraction, a decimal, thousands, a power of ten
COMPOUND = re.compile(r'[-+]?\d{1,18}(?:[/.,]\d{1,18}){1,9}(?:[eE][-+]?\d{1,3})?|[-+]?\d{1,18}[eE][-+]?\d{1,3}')


def check(reward_functions: RewardFunctions, examples: Sequence[Example]):
    """Prints the share of examples whose gold the verifier misjudges; BadInput when it is above reward.self_test.

    An example is misjudged when its gold is not correct, or when it is still correct after a change (see
    change_answer, and the verifier's own gold(example), where it has one). A verifier of many completions at once, like
    a reward model, has no test.
    """
    verifier, bound = reward_functions.verifier, reward_functions.options.self_test
    if not verifier:
        return
    part = reward_functions.parts[verifier]
    if part.batched or part.asynchronous:
        print(f'gold self-test: none, since {verifier} judges many completions at once')
        return
    judge = functools.partial(
        _misjudgement, part.function, reward_functions.gold or change_answer, reward_functions.options.correct_at
    )
    reasons = []
    with activity.during('judging gold answers', len(examples)) as judging:
        for reason in reward_functions.resources.threads.map(judge, examples):
            reasons.append(reason)
            judging.done += 1
    wrong = [(example, reason) for example, reason in zip(examples, reasons, strict=True) if reason]
    share = len(wrong) / len(examples)
    print(f'gold self-test: {len(wrong)} of {len(examples)} answers are misjudged by {verifier} ({share:.2%})')
    for example, reason in wrong[:5]:
        logger.warning('gold self-test: example %d, answer %.80r: %s', example.id, example.answer, reason)
    if share > bound:
        example, reason = wrong[0]
        raise BadInput(
            'reward.self_test',
            bound,
            f'{share:.2%} of the gold answers are misjudged, like example '
            f'{example.id} with answer {example.answer[:80]!r}: {reason}; mend the data, choose another '
            'reward.verifier, or raise the bound',
        )


def change_answer(example: Example) -> tuple[str, ...]:
    """(answer, wrong ones): with its last number one higher, or with '+1' behind when it has none.

    Of one number in several parts, like 1/2, 1e-05 or 1,234.5, also each part alone, as a naive reading would find it.
    """
    text = example.answer
    last = re.search(r'\d{1,18}(?=\D*$)', text[-2000:])
    if not last:
        return text, f'{text}+1'
    start, end = (max(len(text) - 2000, 0) + place for place in last.span())
    higher = f'{text[:start]}{int(text[start:end]) + 1:0{end - start}d}{text[end:]}'
    parts = dict.fromkeys(re.findall(r'\d+', text)) if COMPOUND.fullmatch(text.strip()) else ()
    return text, higher, *(part for part in parts if Fraction(part) != _value(text))


def _value(text):
    """The Fraction of a number of several parts; None for what is not one number, like 10,20 or 1/0."""
    with contextlib.suppress(ValueError, ZeroDivisionError):
        return Fraction(text.strip().replace(',', ''))


def _misjudgement(verify, gold, correct_at, example):
    """What is wrong with the verdicts on an example's gold, or ''."""
    right, *wrong = gold(example)
    try:
        for completion, expected in [(right, True), *((text, False) for text in wrong)]:
            verdict = verify(completion, example)
            if (verdict is not None and verdict >= correct_at) != expected:
                return f'{completion[:80]!r} {"refused" if expected else "accepted"}'
    except tuple(FAILURES) as failure:
        return str(failure)
    return ''
