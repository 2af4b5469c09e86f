"""Monitors of the policy's distribution and of its updates."""

from grpo_jax.diagnose.signs import Answer, Context, Monitor, Rows, Sign, last, mean, steps


def entropy_collapse(rows: Rows, context: Context) -> Sign | None:
    """Entropy near 0 while there is still something to learn.

    A policy that becomes sure of right answers loses entropy too, which is no collapse: so the reward must have fallen
    below what it began with, or nearly all groups must be dead without being right.
    """
    options = context.options
    first, recent = rows[0].get('entropy'), rows[-2:]
    entropies = last(rows, 'entropy', 2)
    if first is None or entropies is None or len(rows) < 3:
        return None
    if max(entropies) > max(options.entropy_floor, options.entropy_share * first):
        return None
    evidence = f'entropy {first:.3g} in step {rows[0]["step"]}, {entropies[-1]:.2g} in {steps(recent)}'
    rewards, spread = last(rows, 'reward', 2), rows[0].get('reward_std')
    began = rows[0].get('reward')
    if rewards and spread and began is not None and mean(rewards) < began - spread / 2:
        return Sign('the policy has become certain, and worse', f'{evidence}; reward {began:.3g} to {rewards[-1]:.3g}')
    dead = last(rows, 'dead_groups', 2)
    wrong = [1 - (row.get('groups_all_right') or 0) for row in recent]
    if dead and min(dead) >= options.dead_share and context.samples and min(wrong) >= 0.25:
        return Sign(
            'the policy has become certain, and what it gets wrong it always gets wrong',
            f'{evidence}; dead_groups {dead[-1]:.2f}, of which all right {1 - wrong[-1]:.2f}',
        )
    return None


MONITORS = (
    Monitor(
        'entropy_collapse',
        'all completions of a prompt become the same, before the policy is right',
        ('entropy', 'reward', 'reward_std', 'dead_groups', 'groups_all_right'),
        entropy_collapse,
        {
            '': Answer(
                'the updates are too large, or nothing holds the distribution open',
                'a checkpoint from before with --amend --config.optimizer.learning_rate={lower_rate}, and '
                '--config.algorithm.clip_high=0.28',
            )
        },
        'entropy_collapse',
    ),
)
