"""Monitors of the completions: lengths, truncation, repetition and languages."""

from grpo_jax.diagnose.signs import (
    Answer,
    Context,
    Monitor,
    Rows,
    Sign,
    average,
    average_earned,
    averages,
    format_change,
    format_steps,
    has_improved,
    last_values,
    spans,
)

SOON = 2  # steps in a row
LONGER = 1.1  # times the length of right completions; in the healthy demo it comes to 1.03
GROWN = 1.5  # times the first steps' length: completions have become longer
ALL = 0.99  # share of completions from which on they do not differ any more


def truncation(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the token budget cuts off a large share of the completions."""
    shares = last_values(rows, 'truncated', SOON)
    if shares is None or min(shares) < context.options.truncated:
        return None
    recent = rows[-SOON:]
    first, now = average(rows[:1], 'length'), average(recent, 'length')
    answer = 'grown' if first and now and now >= GROWN * first else ''
    if answer and min(shares) >= ALL:
        answer = 'endless'
    elif answer and not _is_paid_better(rows[:1], recent, context):
        answer = 'broken'
    return Sign(
        f'{shares[-1]:.0%} of the completions are cut off by the budget',
        f'truncated {shares[0]:.2f} to {shares[-1]:.2f} in {format_steps(recent)}, at {context.max_tokens} tokens',
        answer,
    )


def _is_paid_better(before, now, context):
    """Whether the policy's mean reward is higher in later rows than in earlier rows; True where one is unknown."""
    old, new = (average_earned(rows, 'reward', context) for rows in (before, now))
    return old is None or new is None or new > old


def repetition(rows: Rows, context: Context) -> Sign | None:
    """A Sign if many completions repeat themselves, at least twice as many as at the start."""
    return _sign_of_rise(rows, context, 'repetitive', 'the completions repeat themselves')


def language_mixing(rows: Rows, context: Context) -> Sign | None:
    """A Sign if many completions mix languages or scripts, at least twice as many as at the start."""
    return _sign_of_rise(rows, context, 'language_mixed', 'the completions mix languages')


def _sign_of_rise(rows, context, name, seen):
    """A Sign if the metric `name`, a share, is above its threshold and has doubled; seen: what completions do."""
    count = context.options.patience
    shares, first = last_values(rows, name, count), average(rows[:1], name)  # an update may break the policy at once
    if shares is None or first is None or min(shares) < max(getattr(context.options, name), 2 * first):
        return None
    return Sign(f'{shares[-1]:.0%} of {seen}', format_change(name, rows[:1], rows[-count:]))


def length_hacking(rows: Rows, context: Context) -> Sign | None:
    """A Sign if completions get longer and no better, because within a group the longer ones are paid more."""
    options = context.options
    # over two windows, since it falls once all completions are long
    correlation = average(rows[-2 * options.window :], 'length_reward_correlation')
    if correlation is None or correlation < options.length_correlation:
        return None
    for before, now in spans(rows, options.window):
        old, new = average(before, 'length'), average(now, 'length')
        grown = old and new and new >= options.length_growth * old
        # without a verifier, count the longer completions as no better
        if grown and not (context.accuracy in now[-1] and has_improved(before, now, context)):
            evidence = f'{format_change("length", before, now)}; length_reward_correlation {correlation:.2f}'
            evidence += f'; {format_change(context.accuracy, before, now)}' if context.accuracy in rows[-1] else ''
            numbers = {'margin': _margin(context, old)}
            return Sign('completions get longer, are paid for it, and no more of them are right', evidence, '', numbers)
    return None


def wrong_answers_growing(rows: Rows, context: Context) -> Sign | None:
    """A Sign if wrong completions grow faster than right ones, and are longer (Dr. GRPO, arXiv 2503.20783)."""
    options, names = context.options, ('length_wrong', 'length_right')
    accuracy = average(rows[-options.window :], context.accuracy)
    if accuracy is not None and accuracy > 0.9:  # the few wrong ones are on hard prompts, which take longer
        return None
    for before, now in spans(rows, options.window):
        old, new = averages(before, *names), averages(now, *names)
        if old is None or new is None or 0 in (old[0], *new[1:], *old[1:]):
            continue
        grown, relative = new[0] / old[0], new[0] / new[1] / (old[0] / old[1])
        if min(grown, relative) >= options.length_growth and new[0] >= LONGER * new[1]:
            return Sign(
                'wrong answers get longer, and right ones do not keep pace',
                f'{format_change("length_wrong", before, now)}; {format_change("length_right", before, now)}',
                '' if context.weights == 'sequence_mean' else 'weighed',
                {'margin': _margin(context, old[1])},
            )
    return None


def _margin(context, length):
    """The option overlong.margin, as text, with which the penalty begins at completions of `length` tokens."""
    return f'{max(context.max_tokens - round(length), 1)}'


MONITORS = (
    Monitor(
        'truncation',
        'completions are cut off in the middle',
        ('truncated', 'length'),
        truncation,
        {
            '': Answer('the budget is too small for this task', '--amend --config.rollout.max_tokens={more_tokens}'),
            'grown': Answer(
                'completions have grown while the policy learned, and to be cut off costs them nothing',
                '{amend_paid} --config.reward.truncated_reward=-0.5',
                '--amend --config.optimizer.learning_rate={lower_rate}',
            ),
            'broken': Answer(
                'completions have grown and are paid no better than at the start: the updates have broken the policy',
                '--workdir=NEW --config.optimizer.learning_rate={lower_rate}',
            ),
            'endless': Answer(
                'no completion ends any more, so that none can be paid for its end: the learning rate is too high',
                '--workdir=NEW --config.optimizer.learning_rate={lower_rate}',
            ),
        },
        because=('large_updates', 'length_hacking', 'wrong_answers_growing'),
    ),
    Monitor(
        'repetition',
        'completions say the same again and again',
        ('repetitive',),
        repetition,
        {
            '': Answer(
                'the policy has degenerated, or repetition is paid by a part of the reward',
                '{branch_paid} --config.reward.parts="({parts} (\'repetition\', 1.0))"',
                '--amend --config.optimizer.learning_rate={lower_rate}',
            )
        },
        because=('large_updates', 'entropy_collapse'),
    ),
    Monitor(
        'language_mixing',
        'completions change the language in the middle',
        ('language_mixed',),
        language_mixing,
        {
            '': Answer(
                'only the outcome is paid, and nothing holds the working to one language (R1, arXiv 2501.12948)',
                '{branch_paid} --config.reward.parts="({parts} (\'language\', 1.0))"',
            )
        },
        because=('large_updates',),
    ),
    Monitor(
        'length_hacking',
        'completions get longer and longer while accuracy stands still',
        ('length', 'length_reward_correlation'),
        length_hacking,
        {
            '': Answer(
                'some part of the reward pays for length as such',
                '--branch=DIR --config.reward.length_shaping=overlong --config.reward.options.overlong.margin={margin}',
            )
        },
        because=('large_updates',),
    ),
    Monitor(
        'wrong_answers_growing',
        'wrong answers get longer and longer',
        ('length_wrong', 'length_right'),
        wrong_answers_growing,
        {
            '': Answer(
                'the mean over a completion makes long wrong ones cheap a token: divide by one length for all',
                '--branch=DIR --config.algorithm.weights=fixed_length --config.algorithm.fixed_length={budget}',
            ),
            'weighed': Answer(
                'length costs wrong completions nothing',
                '--branch=DIR --config.reward.length_shaping=overlong --config.reward.options.overlong.margin={margin}',
            ),
        },
        because=('large_updates',),
    ),
)
