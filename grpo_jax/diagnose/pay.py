"""Monitors of the reward: parts, reward models and failures; and evaluations that contradict the reward."""

import bisect
import math

from grpo_jax.diagnose.signs import (
    Answer,
    Context,
    Monitor,
    Rows,
    Sign,
    average,
    format_change,
    format_steps,
    has_improved,
    last_values,
    rows_until_measured,
    spans,
)
from grpo_jax.rewards.custom import LEARNED, name_of

SERVICES = ('judge', 'http')  # parts that ask a service
# metric -> answer
FAILURES = {
    **{'reward_expired': 'expired', 'reward_died': 'died', 'reward_missing': 'missing'},
    **{'reward_refused': 'refused', 'unscorable': ''},
}
SLOPES = 4  # times the reward that a nat of KL has gained: so large a penalty outweighs what a further nat would gain
SEEN_OFTEN = 0.1  # from this share of retired prompts on, forgetting them shows in evaluations


def hacked_part(rows: Rows, context: Context) -> Sign | None:
    """A Sign if a part of the reward, say the format, is earned more and more, and accuracy does not grow."""
    for name in _paid_parts(context, learned=False):
        rise = _find_rise(rows, context, name)
        if rise and not has_improved(*rise, context):
            before, now = rise
            return Sign(
                f'the part {name} is earned, and no more completions are right for it',
                f'{format_change(f"reward/{name}", before, now)}; {format_change(context.accuracy, before, now)}',
            )
    return None


def overoptimization(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the reward model's reward grows while accuracy falls (arXiv 2210.10760)."""
    for name in _paid_parts(context, learned=True):
        rise = _find_rise(rows, context, name)
        if rise:
            before, now = rise
            old, new = average(before, context.accuracy), average(now, context.accuracy)
            if old is not None and new is not None and old - new >= context.options.gain:
                return Sign(
                    'the reward model pays more and more for completions that are less and less right',
                    f'{format_change(f"reward/{name}", before, now)}; {format_change(context.accuracy, before, now)}',
                )
    return None


def unverified_reward(rows: Rows, context: Context) -> Sign | None:
    """A Sign if a learned reward, or one of yours, grows without a verifier, and seems to be deceived.

    It seems so if the policy is far from the reference, where reward models begin to err (arXiv 2210.10760, figure 1),
    or if the rewards have hardly any spread left, since all completions have the look that is paid.
    """
    options, measured = context.options, rows_until_measured(rows, 'kl_ref_sequence')
    far, first = measured[-1]['kl_ref_sequence'] if measured else 0.0, average(rows[: options.patience], 'reward_std')
    for path, weight in () if context.verifier else context.parts:
        name = name_of(path)
        rise = _find_rise(rows, context, name) if weight and (name in LEARNED or name != path) else None
        if not rise:
            continue
        paid, spreads = ([average(some, metric) or 0.0 for some in rise] for metric in (f'reward/{name}', 'reward_std'))
        if far < options.kl_unverified and spreads[1] > options.variance_share * (first or 0.0):
            continue
        evidence = f'{format_change(f"reward/{name}", *rise)}; {format_change("reward_std", *rise)}'
        evidence += f'; kl_ref_sequence {far:.3g} in {format_steps(measured[-1:])}' if measured else ''
        return Sign(
            f'{name} pays more and more, and no verifier checks whether it is right to',
            evidence,
            'free' if context.kl == 'none' else '',
            {'more_kl': f'{max(SLOPES * weight * (paid[1] - paid[0]) / far, 4 * context.kl_coef):.1g}'} if far else {},
        )
    return None


def _paid_parts(context, learned):
    """Names of parts with a weight beside the verifier: reward models if `learned`, else others; [] if no verifier."""
    names = [name_of(path) for path, weight in context.parts if weight]
    return [n for n in names if context.verifier and n != context.verifier and (n in LEARNED) == learned]


def _find_rise(rows, context, name):
    """(earlier rows, newest rows) between which the weighted reward of part `name` has risen; None when it has not.

    The rise must be config.diagnose.part_growth standard deviations of the first rewards. A penalty that shrinks is no
    rise.
    """
    options, metric = context.options, f'reward/{name}'
    weight = next(weight for path, weight in context.parts if name_of(path) == name)
    unit = average(rows[: options.window], 'reward_std')
    for before, now in spans(rows, options.window):
        old, new = average(before, metric), average(now, metric)
        if old is None or new is None or not unit or weight * new <= 0:
            continue
        if weight * (new - old) >= options.part_growth * unit:
            return before, now
    return None


def flaky_reward(rows: Rows, context: Context) -> Sign | None:
    """A Sign if many rewards fail: a part dies, runs out of time, raises exceptions, or cannot judge."""
    count = context.options.patience
    for name, answer in FAILURES.items():
        shares = last_values(rows, name, count)
        if shares and min(shares) >= context.options.reward_failures:
            asks = any(part in SERVICES for part, _ in context.parts)
            return Sign(
                f'{shares[-1]:.0%} of the completions have a reward that failed',
                f'{name} {shares[0]:.2f} to {shares[-1]:.2f} in {format_steps(rows[-count:])}',
                'away' if asks and answer == 'missing' else answer,
            )
    return None


def falling_evaluation(rows: Rows, context: Context) -> Sign | None:
    """A Sign if pass@1 on held-out prompts has fallen, and the reward in training, if it is the policy's, has not."""
    fall = _find_fall(context)
    if fall is None:
        return None
    best, now = fall
    if context.source != 'policy':
        return Sign('held-out prompts are answered worse', _pass_rates(best, now), 'others')
    first = bisect.bisect_left(rows, best['step'], key=lambda row: row['step'])
    width = min(context.options.window, (len(rows) - first) // 2)
    if not width:
        return None
    before, after = rows[first : first + width], rows[-width:]
    old, new = average(before, 'reward'), average(after, 'reward')
    if old is None or new is None or new < old:
        return None
    return Sign(
        'the reward grows, and held-out prompts are answered worse',
        f'{_pass_rates(best, now)}; {format_change("reward", before, after)}',
        'paid' if _paid_parts(context, learned=False) or _paid_parts(context, learned=True) else '',
    )


def forgetting(rows: Rows, context: Context) -> Sign | None:
    """A Sign if pass@1 on held-out prompts has fallen, and a tenth or more of the prompts are retired as mastered."""
    retired = average(rows[-context.options.window :], 'retired')
    if retired is None or retired < SEEN_OFTEN:
        return None
    fall = _find_fall(context)
    if fall is None:
        return None
    return Sign(
        'since prompts are retired, held-out ones are answered worse',
        f'retired {retired:.2f} in {format_steps(rows[-context.options.window :])}; {_pass_rates(*fall)}',
    )


def _find_fall(context):
    """(the best earlier evaluation, the newest one) if pass@1 has fallen between them beyond chance; else None."""
    rates = [row for row in context.evaluations if row.get('pass@1') is not None]
    if len(rates) < 2:
        return None
    now, best = rates[-1], max(rates[:-1], key=lambda row: row['pass@1'])
    variances = [row['pass@1'] * (1 - row['pass@1']) / context.evaluation_prompts for row in (best, now)]
    least = max(context.options.evaluation_drop, 2 * math.sqrt(sum(variances)))
    return (best, now) if best['pass@1'] - now['pass@1'] >= least else None


def _pass_rates(best, now):
    """The pass@1 and step of two evaluations as text, for the evidence of a Sign."""
    return f'pass@1 {best["pass@1"]:.2f} at step {best["step"]}, {now["pass@1"]:.2f} at step {now["step"]}'


_PENALTY = '--branch=DIR --config.algorithm.kl=k3 --config.algorithm.kl_coef={more_kl}'
_DECEIVED = (
    'a learned reward is deceived far from what its model was trained on (arXiv 2210.10760), or by one look that all '
    'completions take: read some, let a verifier look if there is one, and hold the policy nearer'
)

MONITORS = (
    Monitor(
        'hacked_part',
        'the reward grows, and accuracy does not',
        ('reward/PART', 'reward/VERIFIER', 'reward_std'),
        hacked_part,
        {
            '': Answer(
                'the part is easier to earn than the answer: pay less for it, or only for right completions',
                '--amend --config.reward.parts="({smaller_parts})"',
            )
        },
    ),
    Monitor(
        'overoptimization',
        'the reward model is pleased, and the answers get worse',
        ('reward/model', 'reward/process', 'reward/VERIFIER', 'reward_std'),
        overoptimization,
        {
            '': Answer(
                'the policy has left what the reward model was trained on (arXiv 2210.10760), and hardly comes back: '
                'begin again, pay the verifier, which is there, and the model less',
                '--workdir=NEW --config.reward.parts="({smaller_parts})"',
            )
        },
    ),
    Monitor(
        'unverified_reward',
        'the learned reward grows to its maximum, and nobody knows whether the answers are better',
        ('reward/model', 'reward/process', 'kl_ref_sequence', 'reward_std'),
        unverified_reward,
        {'': Answer(_DECEIVED, '--amend --config.algorithm.kl_coef={more_kl}'), 'free': Answer(_DECEIVED, _PENALTY)},
        because=('large_updates',),
    ),
    Monitor(
        'flaky_reward',
        'rewards are missing, or wrong for no visible reason',
        ('reward_expired', 'reward_died', 'reward_missing', 'reward_refused', 'unscorable'),
        flaky_reward,
        {
            'expired': Answer(
                'judging takes longer than its deadline: a slow verifier, or too many workers for these cores',
                '--config.reward.deadline={more_seconds}',
            ),
            'died': Answer(
                'the worker processes need more memory to judge these completions',
                '--config.reward.memory_gib={more_memory}',
            ),
            'missing': Answer(
                'a reward of yours raises exceptions, also when it is called again; the console has the first of each '
                'step. If a service fails, give it more time to come back: minutes',
                '--config.reward.retries=8',
            ),
            'away': Answer(
                'a service does not answer, also when it is asked again; the console has the first reason of each '
                'step. Its options at_once, timeout, retries and deadline say how it is asked',
                '',
            ),
            'refused': Answer(
                'a service refuses completions, or its answers hold no verdict; verdicts.jsonl has the reasons. '
                'Answers that were cut need more of max_tokens, and a rubric must say how an answer ends',
                '',
            ),
            '': Answer(
                'a part of the reward cannot judge these completions, which no flag mends: the dumps in rollouts/ have '
                'them, with reward null; mend the part, or the gold answers that it cannot read, which the test at the '
                'start names',
                '',
            ),
        },
    ),
    Monitor(
        'falling_evaluation',
        'the reward grows, and evaluations get worse',
        ('evaluation/pass@1', 'reward'),
        falling_evaluation,
        {
            '': Answer(
                'the training prompts are memorized, or reward and evaluation measure different things',
                '--amend --config.optimizer.learning_rate={lower_rate}',
            ),
            'others': Answer(
                'the policy learns from completions that it did not write, and has gone too far with them',
                '--workdir=NEW --config.optimizer.learning_rate={lower_rate}',
            ),
            'paid': Answer(
                'what is paid beside the verifier does not make answers right: pay less for it',
                '--amend --config.reward.parts="({smaller_parts})"',
            ),
        },
        because=('large_updates', 'forgetting', 'hacked_part', 'overoptimization'),
    ),
    Monitor(
        'forgetting',
        'what was mastered before goes wrong again',
        ('retired', 'evaluation/pass@1'),
        forgetting,
        {
            '': Answer(
                'nothing practises what retired prompts taught, and updates of this size write over it',
                '--workdir=NEW --config.optimizer.learning_rate={lower_rate}',
            )
        },
        because=('large_updates',),
    ),
)
