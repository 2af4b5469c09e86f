"""Monitors of groups without advantage: what the whole run, or most of a step, can learn nothing from."""

from grpo_jax.diagnose.signs import Answer, Context, Monitor, Rows, Sign, steps


def dead_run(rows: Rows, context: Context) -> Sign | None:
    """Every group is dead, some steps in a row, and they are not all right: the run learns nothing any longer."""
    count = context.options.patience
    recent = rows[-count:]
    if not context.samples or len(recent) < count or not all(map(_dead, recent)):
        return None
    if all((row.get('groups_all_right') or 0) > 0.5 for row in recent):
        return None
    newest = recent[-1]
    truncated, unparsed = newest.get('truncated') or 0, newest.get('unparsed') or 0
    answer = 'truncated' if truncated >= 0.5 else 'unparsed' if unparsed >= 0.5 else ''
    reward = newest.get('reward')
    evidence = f'dead_groups 1 in {steps(recent)}, reward {"none" if reward is None else f"{reward:.3g}"}'
    evidence += f', truncated {truncated:.2f}' if answer == 'truncated' else ''
    evidence += f', unparsed {unparsed:.2f}' if answer == 'unparsed' else ''
    return Sign('all completions of every prompt have the same reward: nothing is learned', evidence, answer)


def _dead(row):
    return row.get('dead_groups') == 1 or row.get('advantage_abs') == 0


MONITORS = (
    Monitor(
        'dead_run',
        'the reward stays at one value, like 0, to the end of the run',
        ('dead_groups', 'advantage_abs', 'groups_all_right', 'reward', 'truncated', 'unparsed'),
        dead_run,
        {
            '': Answer(
                'the policy never succeeds on these prompts, or an update has broken it',
                'a run that begins higher: --config.supervised.updates=200 in a new workdir, easier data, or, if it '
                'was better before, a checkpoint from before with --config.optimizer.learning_rate={lower_rate}',
            ),
            'truncated': Answer(
                'no completion comes to its end within the budget, so no answer is there to be judged',
                '--amend --config.rollout.max_tokens={longer}; if completions became endless, the update broke the '
                'policy: --config.optimizer.learning_rate={lower_rate} in a new workdir',
            ),
            'unparsed': Answer(
                'the verifier finds no answer in the completions: prompt, template and verifier do not fit',
                'python -m grpo_jax.show, then another --config.data.template or --config.reward.verifier in a new '
                'workdir',
            ),
        },
        'dead_run',
    ),
)
