"""Monitors of the updates: gradients, clipping, settings without effect, and the gap of sampler and learner."""

import math
import statistics

from grpo_jax.diagnose.signs import (
    AGE,
    HIGHEST_RATE,
    Answer,
    Context,
    Monitor,
    Rows,
    Sign,
    average,
    format_change,
    format_number,
    format_steps,
    has_worsened,
    last_values,
    least_reward,
)

SOON = 2  # steps in a row
# metrics that show how far a policy has moved -> factor, up or down, that a healthy one takes many steps for
MOVES = {'entropy': 2.0, 'length': 1.5, 'kl_ref': 10.0}
SHARES, RISE = ('truncated', 'unparsed', 'repetitive'), 0.25  # shares of completions that degenerate, and their rise
FAST = 3.0  # factor by which entropy falls; alone it is no fault: at 3e-4 labs/sums learns while it falls so in 4 steps
LESS = 0.2  # share of a step's prompts; a step has some dozens
SPIKES = 2  # so many spikes in a window are too many
TWICE = 2  # a max_grad_norm of so many usual gradients clips nothing but spikes
BOUNDED = 4  # a spike clipped to so many usual gradients does no harm; the usual gradient falls while a run learns
HUGE = 10  # a single spike is a sign if it is so many times the threshold


def large_updates(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the policy has become worse, or narrower, within a few steps, and has not recovered.

    Worse: the reward fell by half its standard deviation within config.diagnose.patience steps, and entropy, length or
    the KL to the reference changed by a factor for which a healthy run takes many steps, or the share of completions
    that are cut off, unreadable or repetitive rose by 0.25. Narrower: within config.diagnose.window steps the
    entropy fell to a third, and more prompts than before have no right completion: more groups are all wrong, or
    pass@k of held-out prompts fell, though greedy accuracy may rise.
    """
    return _find_break(rows, context) or _find_narrowing(rows, context)


def _find_break(rows, context):
    """A Sign if the policy has become worse, as large_updates says; else None."""
    count, now = context.options.patience, average(rows[-SOON:], 'reward')
    for place in range(max(len(rows) - AGE, 0), len(rows) - SOON):
        before, after = rows[place : place + 1], rows[place + 1 : place + 1 + count][-SOON:]
        least = least_reward(before, context)
        if least is None or now is None or now >= least or not has_worsened(before, after, context):
            continue
        moved = [name for name in (*MOVES, *SHARES) if _has_moved(name, MOVES.get(name, 1.0), before, after)]
        if moved:
            changes = [format_change(name, before, after) for name in ('reward', *moved)]
            rate = after[-1].get('learning_rate', context.learning_rate)
            return Sign(
                'a few updates have broken the policy',
                f'{"; ".join(changes)}; learning_rate {rate:.3g}, grad_norm {_largest(before + after, "grad_norm")}',
            )
    return None


def _find_narrowing(rows, context):
    """A Sign if the policy has become narrower, as large_updates says; else None."""
    wrong, window = 'groups_all_wrong', context.options.window
    for place in range(max(len(rows) - AGE, 0), len(rows) - SOON):
        before, after = rows[place : place + 1], rows[place + 1 : place + 1 + window][-SOON:]
        first, soon = average(before, 'entropy'), average(after, 'entropy')
        if first is None or soon is None or soon > first / FAST:
            continue
        lost = _fall_of_pass_rate(context)
        old, new, newest = (average(some, wrong) for some in (before, after, rows[-SOON:]))
        if old is not None and new is not None and newest is not None and min(new, newest) >= old + LESS:
            lost = format_change(wrong, before, after)
        if lost:
            changes = f'{format_change("entropy", before, after)}; {lost}'
            return Sign('the policy grows certain faster than it learns, and solves fewer prompts', changes, 'narrow')
    return None


def _fall_of_pass_rate(context):
    """How pass@k, for the largest k, fell from the first evaluation to the newest, as text; '' if not beyond chance."""
    rates = [row for row in context.evaluations if row.get('greedy') is not None]
    names = [name for name in rates[-1] if name.startswith('pass@') and name != 'pass@1'] if len(rates) > 1 else []
    name = max(names, key=lambda name: int(name.removeprefix('pass@')), default='')
    if not name or rates[0].get(name) is None:
        return ''
    variances = [row[name] * (1 - row[name]) / context.evaluation_prompts for row in (rates[0], rates[-1])]
    if rates[0][name] - rates[-1][name] < max(context.options.gain, 2 * math.sqrt(sum(variances))):
        return ''
    ends = (f'{key} {rates[0][key]:.2f} at step {rates[0]["step"]}, {rates[-1][key]:.2f} at step {rates[-1]["step"]}'
            for key in (name, 'greedy'))  # fmt: skip
    return '; '.join(ends)


def _has_moved(name, factor, before, after):
    """Whether a metric changed by a factor, up or down, or a share rose by RISE; False where it is missing or 0."""
    old, new = average(before, name), average(after, name)
    if name in SHARES:
        return old is not None and new is not None and new >= old + RISE
    return bool(old and new) and not old / factor < new < old * factor


def _largest(rows, name):
    """The largest value of a metric in rows, as text."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return format_number(max(values)) if values else 'none'


def sampler_mismatch(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the sampler's and the learner's logprobs differ by more than rounding explains."""
    options, count = context.options, context.options.patience
    name = 'fresh_gap_mean' if context.stale else 'sampler_gap_mean'
    gaps, sizes = last_values(rows, name, count), [] if context.stale else last_values(rows, 'sampler_ess', count)
    if gaps is None:
        return None
    wide, poor = min(gaps) >= options.sampler_gap, bool(sizes) and max(sizes) <= options.sampler_ess
    if not wide and not poor:
        return None
    evidence = f'{name} {format_number(gaps[-1])} nats a token'
    evidence += f', sampler_ess {sizes[-1]:.2f}' if sizes else ''
    answer = '' if context.correction == 'none' else 'corrected'
    answer = 'int8' if context.quantized else 'exact' if context.exact else answer
    return Sign(
        'sampler and learner give the same tokens different probabilities',
        f'{evidence} in {format_steps(rows[-count:])}',
        answer,
    )


def stale_tokens(rows: Rows, context: Context) -> Sign | None:
    """A Sign if few of the tokens of earlier policies decide what is learned: their effective sample size is small."""
    recent = rows[-context.options.patience :]
    sizes = last_values(rows, 'stale_ess', context.options.patience)
    if sizes is None or max(sizes) > context.options.sampler_ess:
        return None
    seen = f'what earlier policies sampled is worth {sizes[-1]:.0%} of as many tokens of this one'
    return Sign(seen, f'stale_ess {sizes[-1]:.2f} in {format_steps(recent)}', _find_cause(context))


def _find_cause(context):
    """The key in STALE of the answer for a run: it says what makes the run's tokens too old."""
    return '' if context.learning_rate > HIGHEST_RATE else 'ahead' if context.staleness else 'carried'


def correction_at_bound(rows: Rows, context: Context) -> Sign | None:
    """A Sign if the correction bounds the weights of many tokens, so that it corrects no longer, or drops them."""
    recent = rows[-context.options.patience :]
    shares = last_values(rows, 'correction_bound', context.options.patience)
    if shares is None or min(shares) < context.options.correction_bound:
        return None
    cuts = context.correction.startswith('truncated')
    seen = f'algorithm.correction={context.correction} {"cuts" if cuts else "drops"} {shares[-1]:.0%} of the tokens'
    answer = _find_cause(context) if cuts else 'dropped'
    return Sign(seen, f'correction_bound {shares[-1]:.2f} in {format_steps(recent)}', answer)


def clip_saturation(rows: Rows, context: Context) -> Sign | None:
    """A Sign if a large share of the tokens is clipped, so that a step's later updates teach little."""
    count = context.options.patience
    lows, highs = last_values(rows, 'clip_low_share', count), last_values(rows, 'clip_high_share', count)
    if lows is None or highs is None:
        return None
    shares = [low + high for low, high in zip(lows, highs, strict=True)]
    if min(shares) < context.options.clip_share:
        return None
    return Sign(
        f'{shares[-1]:.0%} of the tokens are clipped, and have no gradient',
        f'clip_low_share {lows[-1]:.2f} and clip_high_share {highs[-1]:.2f} in {format_steps(rows[-count:])}',
    )


def inert_settings(rows: Rows, context: Context) -> Sign | None:
    """A Sign if all ratios are 1, so that settings that act on ratios do nothing, or updates do not move the policy.

    With one update a rollout, ratios are 1 by construction; the monitor speaks when such settings are set. With several
    updates, ratios of 1 mean that the updates change nothing.
    """
    count = context.options.patience
    first, recent = rows[:count], rows[-count:]
    if context.updates == 1:
        if context.inert and _all_one(first, count):
            seen = f'settings without effect: {"; ".join(context.inert)}'
            return Sign(seen, f'ratio_max 1 in {format_steps(first)}, 1 update a rollout')
        return None
    taught = recent[0]['step'] >= context.critic_warmup and all((row.get('advantage_abs') or 0) > 0 for row in recent)
    if taught and _all_one(recent, count):
        evidence = f'ratio_max 1 in {format_steps(recent)}, {context.updates} updates a rollout'
        return Sign('the updates do not move the policy', evidence, 'still')
    return None


def _all_one(rows, count):
    """Whether the largest ratio is 1 in each of the last `count` rows."""
    highest = last_values(rows, 'ratio_max', count)
    return highest is not None and all(abs(ratio - 1) < 1e-6 for ratio in highest)


def gradient_spikes(rows: Rows, context: Context) -> Sign | None:
    """A Sign if some gradients of the last window, or one enormous one, are many times as long as the median before.

    The monitor is silent where the optimizer clips gradients to a few times this median.
    """
    options = context.options
    recent, earlier = rows[-options.window :], rows[-3 * options.window : -options.window]
    norms = [row['grad_norm'] for row in earlier if row.get('grad_norm')]  # 0: all groups were dead
    if 2 * len(norms) < options.window:
        return None
    usual = statistics.median(norms)
    if context.max_grad_norm <= BOUNDED * usual:
        return None
    spikes = [row for row in recent if (row.get('grad_norm') or 0) >= options.gradient_spike * usual]
    if not spikes:
        return None
    longest = max(spikes, key=lambda row: row['grad_norm'])
    if len(spikes) < SPIKES and longest['grad_norm'] < HUGE * options.gradient_spike * usual:
        return None
    return Sign(
        f'gradients {longest["grad_norm"] / usual:.0f} times as long as before',
        f'grad_norm {format_number(longest["grad_norm"])} in step {longest["step"]}, median {format_number(usual)} '
        f'before {format_steps(recent)}; such steps: {len(spikes)}',
        numbers={'norm': f'{TWICE * usual:.2g}'},
    )


STALE = {
    # in the demo 1e-3 leaves 1 % of eight steps old, and 3e-4 90 % even of sixteen
    '': Answer(
        'the learning rate is too high for tokens of earlier policies, which each update leaves far behind',
        '--workdir=NEW --config.optimizer.learning_rate={third_rate}',
    ),
    'ahead': Answer(
        'the policy moves too far in the steps by which sampling is ahead',
        '--branch=DIR --config.collection.staleness={less_staleness}',
    ),
    'carried': Answer(
        'the policy moves too far while rows go on from step to step', '--amend --config.collection.max_age={less_age}'
    ),
}
MONITORS = (
    Monitor(
        'large_updates',
        'the reward falls within a few steps, and completions degenerate',
        ('reward', 'reward_std', 'entropy', 'length', 'kl_ref', *SHARES, 'groups_all_wrong', 'evaluation/pass@1'),
        large_updates,
        {
            # in the demo 1e-2 breaks the policy at once, 1e-3 narrows it, and 3e-4 teaches it
            '': Answer(
                'the updates are too large: the learning rate is far too high, and this policy must begin again',
                '--workdir=NEW --config.optimizer.learning_rate={far_lower_rate}',
            ),
            'narrow': Answer(
                'the updates are still too large: the learning rate is too high, and what is lost does not come back',
                '--workdir=NEW --config.optimizer.learning_rate={third_rate}',
            ),
        },
    ),
    Monitor(
        'sampler_mismatch',
        'the run degrades slowly although every other meter looks right',
        ('sampler_gap_mean', 'sampler_ess'),
        sampler_mismatch,
        {
            '': Answer(
                'bfloat16 rounds differently in sampler and learner; a correction removes the bias',
                '--branch=DIR --config.algorithm.correction=truncated',
            ),
            'corrected': Answer(
                'bfloat16 rounds differently in sampler and learner, by more than the correction can mend',
                '--amend --config.model.dtype=float32',
            ),
            'int8': Answer(
                'int8 is too coarse for these weights, or for this cache',
                '--amend --config.rollout.weights_dtype= --config.rollout.cache_dtype=',
            ),
            'exact': Answer(
                'both compute in float32, so this is no rounding: a kernel or a sharding computes wrongly',
                '--config.rollout.kernels=off',
            ),
        },
    ),
    Monitor(
        'stale_tokens',
        'the run learns slower than one that waits, or breaks',
        ('stale_ess',),
        stale_tokens,
        STALE,
        because=('large_updates',),
    ),
    Monitor(
        'correction_at_bound',
        'completions are sampled, and most of them teach nothing',
        ('correction_bound',),
        correction_at_bound,
        STALE
        | {
            'dropped': Answer(
                'the correction drops what is not nearly on-policy, and steps that do not wait have little else',
                '--branch=DIR --config.algorithm.correction=truncated',
            )
        },
        because=('large_updates', 'stale_tokens'),
    ),
    Monitor(
        'clip_saturation',
        'more updates a rollout, and no faster',
        ('clip_low_share', 'clip_high_share'),
        clip_saturation,
        {
            '': Answer(
                'the updates of a rollout take the policy out of the trust region: too many of them, or too large',
                '--amend --config.learner.epochs=1 --config.learner.minibatches={fewer_minibatches}',
            )
        },
        because=('large_updates', 'sampler_mismatch'),
    ),
    Monitor(
        'inert_settings',
        'a change of the config that changes nothing',
        ('ratio_max', 'advantage_abs'),
        inert_settings,
        {
            '': Answer(
                'with one update a rollout the policy is still the old one, so that all ratios are 1',
                '--amend --config.learner.minibatches={minibatches}',
            ),
            'still': Answer(
                'the learning rate is too low for the precision of the parameters, or 0',
                '--amend --config.optimizer.learning_rate={higher_rate}',
            ),
        },
        'note',
    ),
    Monitor(
        'gradient_spikes',
        'the reward falls from one step to the next',
        ('grad_norm',),
        gradient_spikes,
        {
            '': Answer(
                'single batches or completions weigh too much: clip their gradients more',
                '{go_on} --config.{optimizer}.max_grad_norm={norm}',
            )
        },
        because=('large_updates',),
    ),
)
