"""Monitors of the groups: steps that teach little or nothing."""

import math

from grpo_jax.diagnose.signs import (
    Answer,
    Context,
    Monitor,
    Rows,
    Sign,
    average,
    averages,
    format_change,
    format_number,
    format_steps,
    has_improved,
    has_worsened,
    last_values,
    spans,
)

WRONG = 0.25  # share of groups that are dead and not all right: enough left to learn
ERRORS = 2  # standard errors that chance seldom exceeds
HALF = 0.5  # from this share of completions on, truncation or unread answers explain why all are wrong
MASTERED = 0.99  # from this share of groups on, hardly a prompt is left that teaches
# collection.gate -> what is true, in words, when every group is dead
DEAD = {
    'reward': 'all completions of a prompt get the same reward',
    'outcome': 'all completions of a prompt are right, or all are wrong, whatever else is paid',
    'none': 'no completion has an advantage',
}


def dead_run(rows: Rows, context: Context) -> Sign | None:
    """A Sign if all groups were dead in each of the last `patience` steps, not because most were all right."""
    count = context.options.patience
    recent = rows[-count:]
    dead = [row.get('dead_groups') == 1 or row.get('advantage_abs') == 0 for row in recent]
    if not context.samples or context.taught or len(recent) < count or not all(dead):
        return None
    if all((row.get('groups_all_right') or 0) > HALF for row in recent):
        return None
    answer, now = _explain_all_wrong(recent, context), average(recent, 'reward')
    rewarded = [row for row in rows[:-count] if row.get('reward') is not None]
    best = max(rewarded, key=lambda row: row['reward'], default={})
    if has_worsened([best], recent, context):
        answer = 'broken'
    reward = 'none' if now is None else format_number(now)
    evidence = f'no group with an advantage in {format_steps(recent)}, reward {reward}'
    evidence += f' after {best["reward"]:.3g} at best' if answer == 'broken' else _share_text(recent, answer)
    return Sign(f'nothing is learned: {DEAD[context.gate]} (collection.gate={context.gate})', evidence, answer)


def _explain_all_wrong(rows, context):
    """The key of the Answer that says why groups are all wrong in these rows; '' when none is known."""
    for name in ('truncated', 'unparsed'):
        if (average(rows, name) or 0) >= HALF:
            return name
    right, accuracy = average(rows, 'groups_all_right') or 0.0, average(rows, context.accuracy) or 0.0
    differ = average(rows, 'reward_std') and (context.terms or accuracy > right + context.options.gain)
    return 'gated' if context.gate == 'outcome' and differ else ''


def _share_text(rows, answer):
    """The mean share of truncated or unparsed completions, or the spread of rewards, as a clause of the evidence."""
    name = 'reward_std' if answer == 'gated' else answer
    return f', {name} {average(rows, name):.2f}' if answer else ''


def unverified_advantage(rows: Rows, context: Context) -> Sign | None:
    """A Sign if most of the advantage lies in groups that are all wrong, and accuracy does not grow.

    There, completions differ only in parts of the reward beside the verifier.
    """
    recent = rows[-context.options.window :]
    share = average(recent, 'advantage_all_wrong')
    if not context.terms or not context.compares or context.taught or len(recent) < context.options.window:
        return None
    if share is None or share < HALF or any(has_improved(*pair, context) for pair in spans(rows, len(recent))):
        return None
    return Sign(
        f'{share:.0%} of the advantage lies in groups that are all wrong: {", ".join(context.terms)} teach alone',
        f'advantage_all_wrong {share:.2f} in {format_steps(recent)}, collection.gate={context.gate}',
    )


def dead_all_right(rows: Rows, context: Context) -> Sign | None:
    """A Sign if nearly all groups are all right, so that the prompts teach hardly anything more."""
    recent = rows[-context.options.window :]
    share = _dead_share(recent, 'groups_all_right')
    if not context.samples or len(recent) < context.options.window or share < context.options.dead_share:
        return None
    return Sign(
        f'{share:.0%} of the groups are all right, and teach nothing',
        f'groups_all_right {share:.2f} in {format_steps(recent)}',
        'mastered' if share >= MASTERED else '',
    )


def dead_all_wrong(rows: Rows, context: Context) -> Sign | None:
    """A Sign if nearly all groups are all wrong, or most are after the reward has fallen; if all are, see dead_run."""
    options = context.options
    recent = rows[-options.window :]
    if not context.samples or dead_run(rows, context):
        return None
    share = _dead_share(recent, 'groups_all_wrong')
    if len(recent) == options.window and share >= options.dead_share:
        answer = _explain_all_wrong(recent, context)
        evidence = f'groups_all_wrong {share:.2f} in {format_steps(recent)}{_share_text(recent, answer)}'
        return Sign(f'{share:.0%} of the groups are all wrong, and teach nothing', evidence, answer)
    for before, now in spans(rows, options.window):
        share = _dead_share(now, 'groups_all_wrong')
        if share >= max(HALF, 2 * _dead_share(before, 'groups_all_wrong')) and has_worsened(before, now, context):
            evidence = f'{format_change("groups_all_wrong", before, now)}; {format_change("reward", before, now)}'
            return Sign(f'{share:.0%} of the groups are all wrong, which they were not before', evidence, 'broken')
    return None


def _dead_share(rows, name):
    """The mean of the metric `name`, groups_all_right or groups_all_wrong, but at most the mean share of dead groups.

    A group with equal verdicts is not dead when other parts of its reward differ.
    """
    shares = averages(rows, name, 'dead_groups')
    return min(shares) if shares else 0.0


def stagnation(rows: Rows, context: Context) -> Sign | None:
    """A Sign if advantages have lost their variance and the reward stands still, though not all is right."""
    first, now = rows[: context.options.window], rows[-context.options.window :]
    old, new = average(first, 'advantage_variance'), average(now, 'advantage_variance')
    if not old or new is None or new > context.options.variance_share * old or not _stands_still(rows, context):
        return None
    return Sign('the completions of a prompt hardly differ any longer', format_change('advantage_variance', first, now))


def noisy_advantages(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the reward stands still while the variance of advantages is high: differences in groups teach nothing.

    Advantages that are divided by the spread of their group have a variance of 1 - 1/G where all groups differ, however
    little. Advantages that are not divided have more, where a few rewards outweigh all others. Where they are divided
    by the spread of the whole batch, the variance tells nothing, and the monitor is silent.
    """
    recent = rows[-context.options.window :]
    variance, least = (
        average(recent, 'advantage_variance'),
        context.options.variance_high * (1 - 1 / context.group_size),
    )
    if not context.compares or context.over_batch or variance is None or variance < least:
        return None
    if not _stands_still(rows, context):
        return None
    return Sign(
        'nearly all groups differ, and no more completions are right for it',
        f'advantage_variance {format_number(variance)} in {format_steps(recent)}; '
        f'{format_change(context.accuracy or "reward", rows[: context.options.window], recent)}',
    )


def _stands_still(rows, context):
    """Whether the newest of 3 windows is no better than the one before, with at most half of its groups all right."""
    before, now = rows[-2 * context.options.window : -context.options.window], rows[-context.options.window :]
    if not context.samples or len(rows) < 3 * context.options.window:
        return False
    return (average(now, 'groups_all_right') or 0) <= HALF and not has_improved(before, now, context)


def low_diversity(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the completions of a prompt are nearly all the same, and many prompts have no right one.

    A quarter of the groups must be dead and not all right: a policy that is sure of right answers repeats itself too.
    """
    name, count = 'distinct_completions', context.options.patience
    shares, recent, one = last_values(rows, name, count), rows[-count:], 1 / context.group_size
    dead, right = average(recent, 'dead_groups'), average(recent, 'groups_all_right') or 0.0
    if not context.samples or shares is None or dead is None or dead - right < WRONG:
        return None
    if max(shares) > one + context.options.distinct * (1 - one):
        return None
    return Sign(
        f'of {context.group_size} completions of a prompt {shares[-1] * context.group_size:.1f} differ',
        f'{name} {shares[0]:.2f} to {shares[-1]:.2f} in {format_steps(recent)}, groups dead {dead:.2f} and all right '
        f'{right:.2f}, rollout.temperature={context.temperature:g}',
    )


def data_exhausted(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the data have no more to teach: prompts are retired or memorized, or draws find no living groups."""
    options, count = context.options, context.options.patience
    recent = rows[-options.window :]
    retired = rows[-1].get('retired')
    if retired is not None and retired >= options.retired:
        return Sign(f'{retired:.0%} of the prompts are retired', f'retired {retired:.2f} in {format_steps(rows[-1:])}')
    draws, dead = last_values(rows, 'draws', count), last_values(rows, 'dead_groups', count)
    if draws and dead and context.max_draws > 1 and min(draws) >= context.max_draws and min(dead) >= HALF:
        return Sign(
            'as many rollouts as may be drawn, and most groups are dead all the same',
            f'draws {draws[-1]:.0f} and dead_groups {dead[-1]:.2f} in {format_steps(rows[-count:])}',
            'draws',
        )
    evaluations = [row for row in context.evaluations if row.get('pass@1') is not None]
    accuracy = average(recent, context.accuracy)
    if len(evaluations) < 2 or accuracy is None or evaluations[-1]['step'] <= rows[-1]['step'] - options.window:
        return None
    first, newest = average(rows[: options.window], context.accuracy), evaluations[-1]['pass@1']
    gap, oldest = accuracy - newest, evaluations[0]['pass@1']
    # of the difference of two evaluations, each a mean over prompts
    error = math.sqrt((newest * (1 - newest) + oldest * (1 - oldest)) / context.evaluation_prompts)
    least = max(options.generalization_gap, ERRORS * error)
    if first is None or min(gap, gap - (first - oldest)) < least:
        return None
    return Sign(
        'right on the prompts that it trains on, and not on held-out ones',
        f'{context.accuracy} {accuracy:.2f} in {format_steps(recent)}, '
        f'pass@1 {newest:.2f} at step {evaluations[-1]["step"]}, standard error of its change {error:.2f}',
        'heart',
    )


def loss_is_zero(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the loss of the first steps is about 0, because the advantages of a group cancel; it is no fault."""
    count = context.options.patience
    first = rows[:count]
    losses, sizes, gradients = (last_values(first, name, count) for name in ('loss', 'advantage_abs', 'grad_norm'))
    if context.updates > 1 or losses is None or sizes is None or gradients is None:
        return None
    if any(abs(loss) > 0.01 * size for loss, size in zip(losses, sizes, strict=True)) or not all(gradients):
        return None
    largest = max(abs(loss) for loss in losses)
    return Sign(
        'the loss is about 0, and that is no fault: the advantages of a group cancel',
        f'|loss| at most {largest:.1g} in {format_steps(first)}, grad_norm {format_number(gradients[-1])}',
    )


_BROKEN = Answer(
    'the updates have made the policy worse: the learning rate is too high',
    '--workdir=NEW --config.optimizer.learning_rate={lower_rate}',
)
_EASIER = Answer(
    'these prompts are too hard for this policy: hardly any completion is right, so it must begin higher, with a cold '
    'start, or with easier prompts',
    '--workdir=NEW --config.supervised.updates={more_updates}',
)
_LONGER = Answer(
    'completions do not end within the budget, so there is no answer to judge',
    '--amend --config.rollout.max_tokens={more_tokens}',
)
_GATED = Answer(
    'rewards differ where all are wrong, and by outcome only right answers beside wrong ones teach',
    '--branch=DIR --config.collection.gate=reward',
)
_TEMPLATE = Answer(
    'the verifier reads no answer: prompt, chat template and verifier do not fit (python -m grpo_jax show shows them)',
    '--workdir=NEW --config.data.chat={other_chat}',
)

MONITORS = (
    Monitor(
        'dead_run',
        'the reward stays at one value, like 0, and the run goes on to its end all the same',
        ('dead_groups', 'advantage_abs', 'groups_all_right', 'reward', 'reward_std', 'truncated', 'unparsed'),
        dead_run,
        {
            '': Answer(
                'the policy never succeeds on these prompts, so it must begin higher, with a cold start',
                '--workdir=NEW --config.supervised.updates={more_updates}',
            ),
            'broken': _BROKEN,
            'truncated': _LONGER,
            'unparsed': _TEMPLATE,
            'gated': _GATED,
        },
        because=('large_updates', 'entropy_collapse', 'flaky_reward'),
    ),
    Monitor(
        'dead_all_right',
        'the reward is near its maximum, and few groups give a gradient',
        ('groups_all_right', 'dead_groups'),
        dead_all_right,
        {
            '': Answer(
                'the prompts have become too easy: take them out, or take harder ones',
                '--amend --config.collection.retire_above={retire}',
            ),
            'mastered': Answer(
                'the policy has mastered these prompts: end here, or take harder ones, which no flag can name', ''
            ),
        },
    ),
    Monitor(
        'dead_all_wrong',
        'the reward stays near its lowest value, and moves a little at times',
        ('groups_all_wrong', 'dead_groups', 'reward', 'reward_std', 'truncated', 'unparsed'),
        dead_all_wrong,
        {'': _EASIER, 'broken': _BROKEN, 'truncated': _LONGER, 'unparsed': _TEMPLATE, 'gated': _GATED},
        because=('large_updates', 'entropy_collapse'),
    ),
    Monitor(
        'unverified_advantage',
        'completions get the form or the length that is paid, and no more of them are right',
        ('advantage_all_wrong',),
        unverified_advantage,
        {
            '': Answer(
                'by the spread of its group a small term becomes an advantage of full size where no answer is right',
                '--branch=DIR --config.collection.gate=outcome',
            )
        },
    ),
    Monitor(
        'stagnation',
        'the reward stands still below its maximum, and gradients get smaller',
        ('advantage_variance', 'reward', 'reward_std', 'groups_all_right'),
        stagnation,
        {
            '': Answer(
                'the groups have lost their variance (GRPO learns from differences alone): draw until they differ',
                '--branch=DIR --config.collection.dead_groups=resample',
                '--amend --config.rollout.group_size={more_completions}',
            )
        },
        because=('large_updates', 'entropy_collapse', 'dead_run', 'dead_all_right', 'dead_all_wrong'),
    ),
    Monitor(
        'noisy_advantages',
        'the reward stands still below its maximum, and gradients are as large as ever',
        ('advantage_variance', 'reward', 'reward_std', 'groups_all_right'),
        noisy_advantages,
        {
            '': Answer(
                'small or outlying differences of a few completions count in full: divide by the spread of the whole '
                'batch, or compare more completions of a prompt',
                '--branch=DIR --config.algorithm.advantage=batch_centred_std',
                '--amend --config.rollout.group_size={more_completions}',
            )
        },
        because=('large_updates', 'entropy_collapse'),
    ),
    Monitor(
        'low_diversity',
        'the completions of a prompt are the same, and so are their rewards',
        ('distinct_completions', 'dead_groups', 'groups_all_right'),
        low_diversity,
        {
            '': Answer(
                'the sampler hardly leaves the likeliest completion, so that nothing else is tried: sample hotter',
                '--amend --config.rollout.temperature={hotter}',
            )
        },
        because=('large_updates', 'entropy_collapse'),
    ),
    Monitor(
        'data_exhausted',
        'accuracy in training leaves the evaluation behind, or no prompts are left',
        ('retired', 'draws', 'dead_groups', 'evaluation/pass@1'),
        data_exhausted,
        {
            '': Answer(
                'the policy has learned what these prompts teach: end here, or take more data, which no flag can name',
                '',
            ),
            'draws': Answer(
                'hardly any prompt is left whose completions differ',
                '--amend --config.collection.max_draws={more_draws}',
            ),
            'heart': Answer(
                'few prompts are seen again and again: take more prompts, or a smaller learning rate',
                '--amend --config.optimizer.learning_rate={lower_rate}',
            ),
        },
    ),
    Monitor(
        'loss_is_zero',
        'the loss is 0 from the first step on',
        ('loss', 'advantage_abs', 'grad_norm'),
        loss_is_zero,
        {
            '': Answer(
                'one update a rollout: all ratios are 1, so the loss is the mean advantage, 0; its gradient is not 0; '
                'watch reward and grad_norm instead',
                '',
            )
        },
        'note',
    ),
)
