"""Checks the rewards before a run starts: each is called once, and the verifier must pass the gold self-test.

In the self-test the verifier must accept gold answers and refuse changed ones. A service must agree with the user's
labelled rows, where its options name such a file.
"""

from collections.abc import Sequence
import functools
import json
import logging
import re
import traceback
import zlib

import numpy as np

from grpo_jax.data import spread
from grpo_jax.errors import BadInput, Checks
from grpo_jax.example import Example
from grpo_jax.rewards.build import RewardFunctions, check_parameters
from grpo_jax.rewards.scoring import call_part, compute_rewards, judge_at_once, service_counts
from grpo_jax.statistics import share_interval
from grpo_jax.text import during, escape

NUMBER = re.compile(r'(?:(?<![\d)}])[-+])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)')
SHORT = 60  # characters; in a longer answer the last number alone may well be the answer
MOST_AT_ONCE = 256  # examples for a verifier that is asynchronous or takes all completions
MOST_ASKED = 20_000  # examples for other verifiers: they take seconds, and all of a large set would take minutes
# the most examples that a thread gets at once; and the least number of such blocks, so that all threads have work
MOST_IN_CALL, LEAST_CALLS = 64, 256
USUAL_WAYS = '\\boxed{{{}}}', 'The answer is {}.'
SOLUTION = re.compile(r'####|\\boxed|\n')  # in a gold answer that is a whole solution
PROSE = re.compile(r'=|####|\\(?:boxed|approx)|[A-Za-z]{3,} +[A-Za-z]{3,}')

logger = logging.getLogger('grpo_jax')


def check(reward_functions: RewardFunctions, examples: Sequence[Example]):
    """Prints the share of examples that the verifier misjudges; raises BadInput when it exceeds reward.self_test.

    An example is misjudged when the verifier refuses the gold answer, alone or in USUAL_WAYS, or accepts a
    changed form of it. The verifier's gold(example) makes these forms, and may raise BadInput; without it, perturb
    makes them. At most MOST_ASKED examples are judged, chosen by their ids. A verifier that is asynchronous, or takes
    all completions at once, judges at most MOST_AT_ONCE, evenly spaced. A source in reward.by_source has its own
    verifier and its own share. Services with labels are tested too, see check_labels.
    """
    for functions, indices in reward_functions.divide(examples):
        _check_source(functions, [examples[i] for i in indices])
    for name, part in reward_functions.every_part.items():
        if part.remote and part.function.keywords['service'].labels:
            check_labels(reward_functions, name)


def check_labels(reward_functions: RewardFunctions, name: str):
    """Prints the share of labelled rows with which a service agrees, and the cost of its verdicts.

    Raises BadInput when the share is below the service's option `agreement`, and for a malformed file. name: of the
    part. A row of the file `labels` has prompt, completion, label (a number, true or false), and may have answer and
    columns. The service agrees where its reward lies less than 0.5 from the label.
    """
    part, key = reward_functions.parts[name], f'reward.options.{name}'
    service, texts, examples, labels = part.function.keywords['service'], [], [], []
    with open(service.labels, encoding='utf8') as lines:
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
                prompt, text, label = str(row.pop('prompt')), str(row.pop('completion')), float(row.pop('label'))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                remedy = f'line {number + 1} has no prompt, completion and label ({error}); mend it'
                raise BadInput(f'{key}.labels', service.labels, remedy) from None
            texts, labels = [*texts, text], [*labels, label]
            examples.append(Example(prompt, str(row.pop('answer', '')), number, row))
    if not labels:
        raise BadInput(f'{key}.labels', service.labels, "has no rows; give some, or ''")
    outcomes = judge_at_once(reward_functions, part, texts, examples, [False] * len(texts))
    values = [np.nan if isinstance(o.value, Exception) or o.value is None else o.value for o in outcomes]
    errors = np.abs(np.array(values) - labels)
    low, high = share_interval(np.where(errors < 0.5, 1.0, 0.0), level=0.95)
    agreement, refused = float(np.mean(errors < 0.5)), int(np.isnan(errors).sum())
    store, paid = reward_functions.resources.services[name].store, service_counts(reward_functions)[f'{name}/cost']
    print(
        escape(
            f'self-test of {name}: agrees with {agreement:.1%} of {len(labels)} labelled rows ({low:.1%} to {high:.1%} '
            f'at 95 %), mean error {np.nanmean([*errors, 0] if refused == len(errors) else errors):.3f}, {refused} '
            f'without a verdict; it has cost {paid:.4g}, and 1,000 verdicts cost {1000 * store.cost / store.count:.4g}'
        )
    )
    if agreement < service.agreement:
        worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
        raise BadInput(
            f'{key}.agreement',
            service.agreement,
            f'is more than the {agreement:.1%} of {service.labels} that {name} judges as labelled; line {worst + 1} is '
            f'{labels[worst]:g}, and it says {outcomes[worst].value}; mend the rubric, or take another model',
        )


def _check_source(reward_functions, examples):
    """Runs the gold self-test of one source's verifier on the source's examples; see check."""
    verifier = reward_functions.verifier
    if not verifier:
        return
    if not reward_functions.reads_answers:
        examples = [example for example in examples if example.answer] if reward_functions.gold else []
    if not examples:
        print(escape(f'gold self-test: none, since {verifier} judges without gold answers'))
        return
    part, count = reward_functions.parts[verifier], len(examples)
    if part.batched or part.asynchronous:  # each call may cost money, as a judge behind an API does
        examples = [examples[i] for i in spread(count, MOST_AT_ONCE)]
    elif count > MOST_ASKED:  # chosen by their ids, so that other rows of the data change nothing
        chosen = sorted(examples, key=lambda example: zlib.crc32(f'{example.id} is asked'.encode()))[:MOST_ASKED]
        examples = sorted(chosen, key=lambda example: example.id)
    with during('judging gold answers', len(examples)) as judging:
        misjudge = _misjudgements_at_once if part.batched or part.asynchronous else _misjudgements
        reasons = misjudge(reward_functions, part, examples, judging)
    wrong = [(example, reason) for example, reason in zip(examples, reasons, strict=True) if reason]
    share, among = len(wrong) / len(examples), f' (of {count})' if len(examples) < count else ''
    print(
        escape(
            f'gold self-test: {len(wrong)} of {len(examples)}{among} answers are misjudged by {verifier} ({share:.2%})'
        )
    )
    for example, reason in wrong[:5]:
        logger.warning('gold self-test: example %d, answer %.80r: %s', example.id, example.answer, reason)
    if share > (bound := reward_functions.options.self_test):
        example, reason = wrong[0]
        raise BadInput(
            'reward.self_test',
            bound,
            f'{share:.2%} of the gold answers are misjudged, like example '
            f'{example.id} with answer {example.answer[:80]!r}: {reason}; mend the data, choose another '
            'reward.verifier, or raise the bound',
        )


def try_out(reward_functions: RewardFunctions, examples: Sequence[Example], stores: bool = True) -> RewardFunctions:
    """Calls each reward once, as a run does, on the gold answer of an example; returns reward_functions.

    stores: whether verdicts of services are stored from now on. Raises BadInput for each reward that fails or returns
    no reward, and where an example lacks a column. Warns of a reward that runs out of time or memory. Reward models are
    not called, since they would be loaded and compiled.
    """
    reward_functions.resources.services.stores = stores
    check_parameters(reward_functions, examples)
    with Checks() as check:
        for functions, indices in reward_functions.divide(examples):
            for name, part in functions.parts.items():
                if 'models' not in part.function.keywords:
                    check(_try_part, functions, name, examples[indices[0]])
    return reward_functions


def _try_part(functions, name, example):
    """Calls the part `name`, and the verifier if the part reads it, on a gold answer; raises BadInput if that fails."""
    read = functions.parts[name].reads_correct and functions.verifier
    parts = {other: part for other, part in functions.parts.items() if other in (name, read)}
    if parts[name].remote:
        (outcome,) = judge_at_once(functions, parts[name], [example.answer], [example], [False])
        if isinstance(outcome.value, Exception):
            remedy = f'fails on the gold answer of example {example.id}: {outcome.value}; '
            remedy += f'see that its service answers, or mend reward.options.{name}'
            raise BadInput('reward.parts', name, remedy)
        return
    try:
        once = functions._replace(parts=parts, options=functions.options._replace(retries=0))
        rewarded = compute_rewards(once, [example], [example.answer], [False], [1])
    except BadInput:
        raise
    except Exception as error:  # of a function that was handed to train.run, or of data that the reward cannot judge
        *_, frame = traceback.extract_tb(error.__traceback__)
        what = f'{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})'
        remedy = f'fails on the answer of example {example.id} with {what}; mend it, or choose a reward for these data'
        raise BadInput('reward.parts', name, remedy) from error
    for kind, failed in rewarded.failures.items():
        if failed.any():
            logger.warning('reward %s has %s on the answer of example %d', name, kind, example.id)


def change_answer(example: Example) -> tuple[str, str]:
    """(answer, changed answer). The change makes the last number one higher, or appends '+1' where there is none."""
    text = example.answer
    last = re.search(r'\d{1,18}(?=\D*$)', text[-2000:])
    if not last:
        return text, f'{text}+1'
    start, end = (max(len(text) - 2000, 0) + index for index in last.span())
    return text, f'{text[:start]}{int(text[start:end]) + 1:0{end - start}d}{text[end:]}'


def perturb(example: Example) -> tuple[str, ...]:
    """(answer, wrong answers...). The first wrong answer is the changed one of change_answer.

    For an answer that is one number, the number negated and the number times ten are wrong answers too. For another
    short answer, the last number alone is wrong too, since a naive verifier would read it: 2 for 1/2, -5 for 1e-05.
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
    """_misjudgement's text for each example, computed on threads. judging: the Activity that counts examples."""
    judge = functools.partial(_misjudgement, reward_functions, part)
    size = min(max(len(examples) // LEAST_CALLS, 1), MOST_IN_CALL)
    blocks = [examples[i : i + size] for i in range(0, len(examples), size)]
    reasons = []
    for block_reasons in reward_functions.resources.threads.map(lambda block: [*map(judge, block)], blocks):
        reasons += block_reasons
        judging.done += len(block_reasons)
    return reasons


def _misjudgement(reward_functions, part, example):
    """A text on the first completion of an example that the verifier misjudges; '' where it judges all rightly."""
    for completion, expected in _questions(reward_functions, example):
        value = call_part(reward_functions, part, completion, example, **part.tell(False, None)).value
        if reason := _verdict(reward_functions, value, completion, expected):
            return reason
    return ''


def _questions(reward_functions, example):
    """The completions on which the verifier is tested for an example, as (text, whether the text is right).

    A verifier with a strict reading reads boxes, so the gold answer is also tested in USUAL_WAYS, as models write it.
    """
    right, *wrong = (reward_functions.gold or perturb)(example)
    ways = USUAL_WAYS if reward_functions.strict and not SOLUTION.search(right) else ()
    return [(right, True), *((way.format(right), True) for way in ways), *((text, False) for text in wrong)]


def _misjudgements_at_once(reward_functions, part, examples, judging):
    """As _misjudgements, for a verifier that is asynchronous or takes all completions: one call for all examples."""
    questions = [_questions(reward_functions, example) for example in examples]
    texts, owners = zip(
        *((text, e) for e, asked in zip(examples, questions, strict=True) for text, _ in asked), strict=True
    )
    outcomes = iter(judge_at_once(reward_functions, part, texts, owners, [False] * len(texts)))
    reasons = []
    for asked in questions:
        gold_reasons = [
            _verdict(reward_functions, outcome.value, text, expected)
            for (text, expected), outcome in zip(asked, outcomes, strict=False)
        ]
        reasons.append(next(filter(None, gold_reasons), ''))
    judging.done = len(examples)
    return reasons


def _verdict(reward_functions, value, completion, expected):
    """'' when the verifier's value agrees with `expected` (bool: correct), else a text on the misjudged completion.

    For an exception in scoring.FAILURES as the value, the text is the exception's.
    """
    if isinstance(value, Exception):
        return str(value) or type(value).__name__
    verdict = value is not None and value >= reward_functions.options.correct_at
    return '' if verdict == expected else f'{completion[:80]!r} {"refused" if expected else "accepted"}'
