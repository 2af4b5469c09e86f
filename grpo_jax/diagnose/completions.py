"""Monitors of the completions: their lengths, ends, repetitions and languages."""

from grpo_jax.diagnose.signs import Answer, Context, Monitor, Rows, Sign, last, steps


def truncation(rows: Rows, context: Context) -> Sign | None:
    """A large share of the completions ends with the budget, two steps in a row."""
    shares = last(rows, 'truncated', 2)
    if shares is None or min(shares) < context.options.truncated:
        return None
    lengths = last(rows, 'length', 2)
    grown = lengths and rows[0].get('length') and lengths[-1] > 1.5 * rows[0]['length']
    return Sign(
        'completions end with the budget, not with a stop',
        f'truncated {shares[0]:.2f} and {shares[1]:.2f} in {steps(rows[-2:])}, of {context.max_tokens} tokens at most',
        'grown' if grown else '',
    )


MONITORS = (
    Monitor(
        'truncation',
        'completions are cut off in the middle',
        ('truncated', 'length'),
        truncation,
        {
            '': Answer('the budget is too small for this task', '--amend --config.rollout.max_tokens={longer}'),
            'grown': Answer(
                'completions have become longer while the policy learned, or it no longer stops',
                '--amend --config.reward.truncated_reward=-0.5, or --amend --config.rollout.max_tokens={longer}',
            ),
        },
        'truncation',
    ),
)
