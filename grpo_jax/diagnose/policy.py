"""Monitors of the policy's distribution: how certain it is, and how far from where it began."""

from grpo_jax.diagnose.signs import (
    Answer,
    Context,
    Monitor,
    Rows,
    Sign,
    average,
    change,
    improved,
    last,
    number,
    spans,
    steps,
    until_known,
    worsened,
)

SOON = 2  # steps in a row that are enough where nothing healthy looks so
FARTHER = 1.5  # times the earlier distance: the policy is still on its way
WRONG = 0.25  # of groups: so many that are not all right are something left to learn


def entropy_collapse(rows: Rows, context: Context) -> Sign | None:
    """Entropy near 0 while there is still something to learn.

    A policy that becomes sure of right answers loses entropy too, which is no collapse: so the reward must have fallen
    below what it began with, or nearly all groups must be dead of which many are not right.
    """
    options, recent = context.options, rows[-SOON:]
    entropies, first = last(rows, 'entropy', SOON), rows[0].get('entropy')
    if entropies is None or first is None or len(rows) <= SOON:
        return None
    if max(entropies) > max(options.entropy_floor, options.entropy_share * first):
        return None
    evidence = f'entropy {number(first)} in {steps(rows[:1])}, {number(entropies[-1])} in {steps(recent)}'
    if worsened(rows[:1], recent):
        return Sign('the policy is certain, and worse than it was', f'{evidence}; {change("reward", rows[:1], recent)}')
    dead, right = average(recent, 'dead_groups'), average(recent, 'groups_all_right') or 0.0
    if context.samples and dead is not None and dead >= options.dead_share and dead - right >= WRONG:
        return Sign(
            'the policy is certain, and what it gets wrong it always gets wrong',
            f'{evidence}, groups dead {dead:.2f} and all right {right:.2f}',
        )
    return None


def kl_runaway(rows: Rows, context: Context) -> Sign | None:
    """The policy is far from the reference, has come there lately, and is no better for it."""
    options = context.options
    for name, limit, unit in (
        ('kl_ref_sequence', options.kl_sequence, 'a completion'),
        ('kl_ref', options.kl_token, 'a token'),
    ):
        known = until_known(rows, name)
        for before, now in spans(known, options.window, options.patience):
            old, new = average(before, name), average(now, name)
            if old is None or new is None or new < max(limit, FARTHER * old) or improved(before, now, context):
                continue
            return Sign(
                f'{new:.3g} nats {unit} from the reference, and no better for the last of it',
                f'{change(name, before, now)}; {change("reward", before, now)}',
                'free' if context.kl == 'none' else '',
            )
    return None


def likelihood_displacement(rows: Rows, context: Context) -> Sign | None:
    """Right completions lose likelihood while accuracy does not grow (arXiv 2410.08847, 2505.18830, 2512.04220).

    On the fixed probe set, else between the updates of a step: with one update a rollout that is 0.
    """
    options = context.options
    name = 'probe_logprob_change'
    known = until_known(rows, name)
    for before, now in spans(known, options.window):
        old, newest = average(before, name), known[-1][name]
        if newest > -options.displacement or old is None or newest > min(2 * old, old - options.displacement):
            continue
        if not improved(before, now, context):
            evidence = f'{name} {number(old)} in {steps(before)}, {number(newest)} in {steps(known[-1:])}'
            accuracy = context.accuracy if context.accuracy in known[-1] else 'reward'
            return Sign(
                'right completions become less likely, and no others that are right take their place',
                f'{evidence}; {change(accuracy, before, now)}',
            )
    if known:
        return None
    changes = last(rows, 'logprob_change_better', options.window)
    if context.updates > 1 and changes and max(changes) < 0 and sum(changes) <= -options.displacement:
        return Sign(
            'the updates of a step take likelihood from completions that are better than their group',
            f'logprob_change_better {sum(changes):.2g} nats a token in all of {steps(rows[-options.window :])}',
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
                'the steps are too large, and nothing holds the distribution open; the policy that is left explores '
                'nothing, so the run must begin again',
                '--workdir=NEW --config.optimizer.learning_rate={lower_rate}',
            )
        },
    ),
    Monitor(
        'kl_runaway',
        'the policy drifts away from the one that it began as, and is paid nothing for it',
        ('kl_ref_sequence', 'kl_ref', 'reward', 'reward_std'),
        kl_runaway,
        {
            '': Answer(
                'the pull to the reference is too weak for this learning rate',
                '--amend --config.algorithm.kl_coef={more_kl}',
            ),
            'free': Answer(
                'nothing holds the policy near the reference; a penalty would',
                '--branch=DIR --config.algorithm.kl=k3 --config.algorithm.kl_coef={more_kl}',
            ),
        },
    ),
    Monitor(
        'likelihood_displacement',
        'answers that were right become rarer, and then the run collapses',
        ('probe_logprob_change', 'logprob_change_better', 'reward'),
        likelihood_displacement,
        {
            '': Answer(
                'gradients of wrong completions push down the tokens that they share with right ones',
                '--branch=DIR --config.algorithm.regularizers="(\'positive_nll\',)"',
            ),
            'within': Answer(
                'gradients of wrong completions push down the tokens that they share with right ones, within a step',
                '--branch=DIR --config.algorithm.regularizers="(\'llds\',)"',
            ),
        },
    ),
)
