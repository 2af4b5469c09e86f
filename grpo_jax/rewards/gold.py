"""The gold self-test: before a run learns from them, gold answers must be right and changed ones wrong."""

from collections.abc import Sequence
import functools
import logging
import re

from grpo_jax import activity
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.rewards.build import RewardFunctions
from grpo_jax.rewards.scoring import FAILURES

NUMBER = re.compile(r'(?:(?<![\d)}])[-+])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)')
SHORT = 60  # characters of an answer in which the last number is not the whole
PROSE = re.compile(r'=|####|\\(?:boxed|approx)|[A-Za-z]{3,} +[A-Za-z]{3,}')

logger = logging.getLogger('grpo_jax')


def check(reward_functions: RewardFunctions, examples: Sequence[Example]):
    """Prints the share of examples whose gold the verifier misjudges; BadInput when it is above reward.self_test.

    An example is misjudged when its gold is not correct, or when one of several changes of it is still correct (see
    perturb, and the verifier's own gold(example), where it has one, which may raise BadInput).
    """
    verifier, bound = reward_functions.verifier, reward_functions.options.self_test
    if not verifier:
        return
    part, correct_at = reward_functions.parts[verifier], reward_functions.options.correct_at
    if part.batched or part.asynchronous:  # like a reward model
        print(f'gold self-test: none, since {verifier} judges many completions at once')
        return
    judge = functools.partial(_misjudgement, part.function, reward_functions.gold or perturb, correct_at)
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


def change_answer(example: Example) -> tuple[str, str]:
    """(answer, changed): the answer with its last number one higher, or with '+1' behind when it has no number."""
    text = example.answer
    last = re.search(r'\d{1,18}(?=\D*$)', text[-2000:])
    if not last:
        return text, f'{text}+1'
    start, end = (max(len(text) - 2000, 0) + place for place in last.span())
    return text, f'{text[:start]}{int(text[start:end]) + 1:0{end - start}d}{text[end:]}'


def perturb(example: Example) -> tuple[str, ...]:
    """(answer, changed ones): with its last number one higher; a number also negated, and ten times as large.

    Of other short answers, also the last number alone, which a naive reading would find: 2 of 1/2, and -5 of 1e-05.
    """
    text, higher = change_answer(example)
    changed = {higher: None}
    if NUMBER.fullmatch(text.strip()):
        if re.search('[1-9]', text):
            number = text.strip().removeprefix('+')
            whole, _, decimals = number.replace(',', '').partition('.')
            negated = number[1:] if number.startswith('-') else f'-{number}'
            changed |= {negated: None, f'{whole}{decimals[:1] or "0"}.{decimals[1:]}'.rstrip('.'): None}
    elif len(text) <= SHORT and not PROSE.search(text):
        *others, last = NUMBER.findall(text) or ['']
        if others and last:
            changed[last] = None
    return text, *changed


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
