"""The gold self-test: before a run learns from them, gold answers must be right and changed ones wrong."""

import concurrent.futures
import functools
import logging
import re

import rich.console
import rich.progress

from grpo_jax.errors import BadInput
from grpo_jax.rewards.scoring import FAILURES


def check(reward_functions, examples, bound):
    """Prints the share of examples whose gold answer the verifier misjudges; BadInput when it is above bound.

    An example is misjudged when its gold is not correct, or is still so when it was changed (see of_answer, and
    the verifier's own gold(example), where it has one).
    """
    if not reward_functions.verifier:
        return
    judge = functools.partial(
        _misjudged, reward_functions.parts[reward_functions.verifier].function, reward_functions.gold
    )
    with concurrent.futures.ThreadPoolExecutor(reward_functions.threads) as threads:
        console = rich.console.Console(stderr=True)
        found = list(
            rich.progress.track(
                threads.map(judge, examples),
                'gold self-test',
                len(examples),
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
        )
    wrong = [(example, what) for example, what in zip(examples, found, strict=True) if what]
    share = len(wrong) / len(examples)
    print(
        f'gold self-test: {len(wrong)} of {len(examples)} answers are misjudged by {reward_functions.verifier} ({share:.2%})'
    )
    for example, what in wrong[:5]:
        logging.warning('gold self-test: example %d, answer %.80r: %s', example.id, example.answer, what)
    if share > bound:
        example, what = wrong[0]
        raise BadInput(
            'reward.self_test',
            bound,
            f'{share:.2%} of the gold answers are misjudged, like example '
            f'{example.id} with answer {example.answer[:80]!r}: {what}; mend the data, choose another '
            'reward.verifier, or raise the bound',
        )


def of_answer(example):
    """(gold, changed): the answer, and the same with its last number one higher, or '+1' behind when it has none."""
    text = example.answer
    last = re.search(r'\d{1,18}(?=\D*$)', text[-2000:])
    if not last:
        return text, f'{text}+1'
    start, end = (max(len(text) - 2000, 0) + place for place in last.span())
    return text, f'{text[:start]}{int(text[start:end]) + 1:0{end - start}d}{text[end:]}'


def _misjudged(verify, gold, example):
    """What is wrong with the verdicts on an example's gold, or ''."""
    text, other = gold(example)
    try:
        for completion, right in [(text, True), (other, False)]:
            verdict = verify(completion, example)
            if (verdict is not None and verdict >= 1) != right:
                return f'{completion[:80]!r} {"refused" if right else "accepted"}'
    except tuple(FAILURES) as failure:
        return str(failure)
    return ''
