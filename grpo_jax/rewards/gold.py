"""The gold self-test: before a run learns from them, gold answers must be right and changed ones wrong."""

from collections.abc import Sequence
import functools
import logging
import re

from grpo_jax.data import spread
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.rewards.build import RewardFunctions
from grpo_jax.rewards.scoring import FAILURES, judge_at_once
from grpo_jax.text import during, escape

NUMBER = re.compile(r'(?:(?<![\d)}])[-+])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)')
SHORT = 60  # characters of an answer in which the last number is not the whole
MOST_AT_ONCE = 256  # examples
MOST_IN_CALL, LEAST_CALLS = 64, 256  # examples that a thread is handed at once, and calls before it gets more than one
PROSE = re.compile(r'=|####|\\(?:boxed|approx)|[A-Za-z]{3,} +[A-Za-z]{3,}')

logger = logging.getLogger('grpo_jax')


def check(reward_functions: RewardFunctions, examples: Sequence[Example]):
    """Prints the share of examples whose gold the verifier misjudges; BadInput when it is above reward.self_test.

    An example is misjudged when its gold is not correct, or when one of several changes of it is still correct (see
    perturb, and the verifier's own gold(example), where it has one, which may raise BadInput). A verifier that is
    asynchronous, or takes all completions at once, judges at most MOST_AT_ONCE examples, evenly over all. Examples of a
    source with rewards of its own are judged by its verifier, and have a share of their own.
    """
    for functions, indices in reward_functions.divide(examples):
        _check_source(functions, [examples[i] for i in indices])


def _check_source(reward_functions, examples):
    """The same for examples that have one verifier."""
    verifier, bound = reward_functions.verifier, reward_functions.options.self_test
    if not verifier:
        return
    if not reward_functions.reads_answers:
        print(escape(f'gold self-test: none, since {verifier} judges without gold answers'))
        return
    part, every = reward_functions.parts[verifier], len(examples)
    if part.batched or part.asynchronous:  # each call may cost, as that of a judge elsewhere
        examples = [examples[i] for i in spread(every, MOST_AT_ONCE)]
    with during('judging gold answers', len(examples)) as judging:
        misjudge = _misjudgements_at_once if part.batched or part.asynchronous else _misjudgements
        reasons = misjudge(reward_functions, part, examples, judging)
    wrong = [(example, reason) for example, reason in zip(examples, reasons, strict=True) if reason]
    share, among = len(wrong) / len(examples), f' (of {every})' if len(examples) < every else ''
    print(
        escape(
            f'gold self-test: {len(wrong)} of {len(examples)}{among} answers are misjudged by {verifier} ({share:.2%})'
        )
    )
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


def _misjudgements(reward_functions, part, examples, judging):
    """What is wrong with the verdicts on each example's gold, or ''; judging counts the examples."""
    judge = functools.partial(_misjudgement, part.function, reward_functions)
    size = min(max(len(examples) // LEAST_CALLS, 1), MOST_IN_CALL)
    together = [examples[i : i + size] for i in range(0, len(examples), size)]
    reasons = []
    for some in reward_functions.resources.threads.map(lambda some: [*map(judge, some)], together):
        reasons += some
        judging.done += len(some)
    return reasons


def _misjudgement(verify, reward_functions, example):
    right, *wrong = (reward_functions.gold or perturb)(example)
    try:
        for completion, expected in [(right, True), *((text, False) for text in wrong)]:
            if reason := _verdict(reward_functions, verify(completion, example), completion, expected):
                return reason
    except tuple(FAILURES) as failure:
        return _reason(failure)
    return ''


def _misjudgements_at_once(reward_functions, part, examples, judging):
    """The same by a verifier that takes completions together: it is called with those of all examples."""
    golds = [(reward_functions.gold or perturb)(example) for example in examples]
    texts, owners = zip(*((t, e) for e, gold in zip(examples, golds, strict=True) for t in gold), strict=True)
    values = iter(judge_at_once(reward_functions, part, texts, owners))
    reasons = []
    for gold in golds:
        ours = [
            _reason(value) if isinstance(value, Exception) else _verdict(reward_functions, value, text, not i)
            for i, (text, value) in enumerate(zip(gold, values, strict=False))
        ]
        reasons.append(next(filter(None, ours), ''))
    judging.done = len(examples)
    return reasons


def _verdict(reward_functions, value, completion, expected):
    """What is wrong with the verifier's value of a completion that is expected to be correct or not, or ''."""
    verdict = value is not None and value >= reward_functions.options.correct_at
    return '' if verdict == expected else f'{completion[:80]!r} {"refused" if expected else "accepted"}'


def _reason(failure):
    return str(failure) or type(failure).__name__
