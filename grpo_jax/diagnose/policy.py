"""Monitors of the policy's distribution: its entropy, and its distance from where it began."""

from grpo_jax.diagnose.signs import (
    Answer,
    Context,
    Monitor,
    Rows,
    Sign,
    average,
    format_change,
    format_number,
    format_steps,
    has_improved,
    has_worsened,
    last_values,
    rows_until_measured,
    spans,
)

SOON = 2  # steps in a row; few are enough, because no healthy run looks like this
FARTHER = 1.5  # times the earlier distance: the policy still moves away
WRONG = 0.25  # share of groups that are not all right: enough left to learn


def entropy_collapse(rows: Rows, context: Context) -> Sign | None:
    """A Sign if entropy is near 0 while there is still something to learn.

    A policy that becomes sure of right answers also loses entropy, without a collapse. So the reward must also have
    fallen since the first step, or nearly all groups must be dead and many of them not all right.
    """
    options, recent = context.options, rows[-SOON:]
    entropies, first = last_values(rows, 'entropy', SOON), rows[0].get('entropy')
    if entropies is None or first is None or len(rows) <= SOON:
        return None
    if max(entropies) > max(options.entropy_floor, options.entropy_share * first):
        return None
    evidence = f'entropy {format_number(first)} in {format_steps(rows[:1])}'
    evidence += f', {format_number(entropies[-1])} in {format_steps(recent)}'
    if has_worsened(rows[:1], recent, context):
        return Sign(
            'the policy is certain, and worse than it was', f'{evidence}; {format_change("reward", rows[:1], recent)}'
        )
    dead, right = average(recent, 'dead_groups'), average(recent, 'groups_all_right') or 0.0
    if context.samples and dead is not None and dead >= options.dead_share and dead - right >= WRONG:
        return Sign(
            'the policy is certain, and what it gets wrong it always gets wrong',
            f'{evidence}, groups dead {dead:.2f} and all right {right:.2f}',
        )
    return None


def kl_runaway(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the policy is far from the reference, moved there lately, and became no better."""
    options = context.options
    for name, limit, unit in (
        ('kl_ref_sequence', options.kl_sequence, 'a completion'),
        ('kl_ref', options.kl_token, 'a token'),
    ):
        measured = rows_until_measured(rows, name)
        for before, now in spans(measured, options.window, options.patience):
            old, new = average(before, name), average(now, name)
            if old is None or new is None or new < max(limit, FARTHER * old) or has_improved(before, now, context):
                continue
            return Sign(
                f'{new:.3g} nats {unit} from the reference, and no better for the last of it',
                f'{format_change(name, before, now)}; {format_change("reward", before, now)}',
                'free' if context.kl == 'none' else '',
            )
    return None


def likelihood_displacement(rows: Rows, context: Context) -> Sign | None:
    """A Sign if right completions lose likelihood and accuracy is no better (arXiv 2410.08847, 2505.18830, 2512.04220).

    Measured on the probe; without one, between the updates of a step, which needs several updates a rollout.
    """
    options = context.options
    name = 'probe_logprob_change'
    measured = rows_until_measured(rows, name)
    for before, now in spans(measured, options.window):
        old, newest = average(before, name), measured[-1][name]
        if newest > -options.displacement or old is None or newest > min(2 * old, old - options.displacement):
            continue
        if not has_improved(before, now, context):
            evidence = f'{name} {format_number(old)} in {format_steps(before)}'
            evidence += f', {format_number(newest)} in {format_steps(measured[-1:])}'
            accuracy = context.accuracy if context.accuracy in measured[-1] else 'reward'
            return Sign(
                'right completions become less likely, and no others that are right take their place',
                f'{evidence}; {format_change(accuracy, before, now)}',
            )
    if measured:
        return None
    changes = last_values(rows, 'logprob_change_better', options.window)
    if context.updates > 1 and changes and max(changes) < 0 and sum(changes) <= -options.displacement:
        return Sign(
            'the updates of a step take likelihood from completions that are better than their group',
            f'logprob_change_better {sum(changes):.2g} nats a token in all of {format_steps(rows[-options.window :])}',
            'within',
        )
    return None


MONITORS = (
    Monitor(
        'entropy_collapse',
        'all completions of a prompt become the same before they are right',
        ('entropy', 'reward', 'reward_std', 'dead_groups', 'groups_all_right'),
        entropy_collapse,
        {
            '': Answer(
                'the steps are too large, and nothing keeps the entropy up; this policy explores nothing any more, so '
                'the run must begin again',
                '--workdir=NEW --config.optimizer.learning_rate={lower_rate}',
            )
        },
        because=('large_updates',),
    ),
    Monitor(
        'kl_runaway',
        'the policy drifts away from its start, and the reward does not grow',
        ('kl_ref_sequence', 'kl_ref', 'reward', 'reward_std'),
        kl_runaway,
        {
            '': Answer(
                'the pull to the reference is too weak for this learning rate: a firm one brings the policy back',
                '--amend --config.algorithm.kl_coef={more_kl}',
            ),
            'free': Answer(
                'nothing holds the policy near the reference; a penalty would',
                '--branch=DIR --config.algorithm.kl=k3 --config.algorithm.kl_coef={more_kl}',
            ),
        },
        because=('large_updates',),
    ),
    Monitor(
        'likelihood_displacement',
        'answers that were right become rarer, and then the run collapses',
        ('probe_logprob_change', 'logprob_change_better', 'reward'),
        likelihood_displacement,
        {
            '': Answer(
                'gradients of wrong completions push down the tokens that they share with right ones: steps too large',
                # positive_nll did not help: at 1e-3 the probe lost 1.5 nats a token, and not 1.7
                '--workdir=NEW --config.optimizer.learning_rate={third_rate}',
            ),
            'within': Answer(
                'gradients of wrong completions push down the tokens that they share with right ones, within a step',
                '--branch=DIR --config.algorithm.regularizers="{with_llds}"',
            ),
        },
        # a policy that is paid for something else makes right completions less likely
        because=(
            *(
                'large_updates',
                'kl_runaway',
                'hacked_part',
                'overoptimization',
                'length_hacking',
                'unverified_advantage',
            ),
            'forgetting',
        ),
    ),
)
