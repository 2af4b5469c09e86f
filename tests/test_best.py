"""The checkpoint of the best evaluation is kept beside the newest ones; and a run's length by passes over its data."""

import dataclasses
import json
from typing import Any
from unittest import mock

import jax.numpy as jnp
import pytest

from grpo_jax import evaluate, train
from grpo_jax.errors import BadInput
from grpo_jax.run import checkpoint, steering
from grpo_jax.run.loop import Loop, Shell
from grpo_jax.run.rows import recorded_events
from grpo_jax.types import TrainState
from tests import tiny_run

GREEDY = {0: 0.5, 2: 0.1, 4: 0.4, 6: 0.7, 8: 0.6, 10: 0.7, 12: 0.3}  # before each of these steps


def state_of(step):
    return TrainState(jnp.int32(step), {'w': jnp.full(3, float(step))}, (), None, {})


def run_steps(workdir, steps, best='greedy'):
    """Evaluates before, and saves after, every second step, as a run with keep=1 does."""
    with Shell(str(workdir), 1, best) as shell:
        for step in steps:
            with (workdir / 'evaluations.jsonl').open('a') as file:
                file.write(json.dumps({'step': step, 'greedy': GREEDY[step]}) + '\n')
            shell.save_if_best(state_of(step), {'greedy': GREEDY[step]})
            if step + 2 in GREEDY and step != 4:  # the checkpoint of step 6 is not due
                shell.save(state_of(step + 2))


def test_the_best_evaluations_checkpoint_stays_until_a_better_one_comes(tmp_path):
    run_steps(tmp_path, [0, 2, 4])
    # the first policy is the best so far, and is not saved; 4 is the newest
    assert checkpoint.steps(str(tmp_path)) == [4] and not recorded_events(str(tmp_path))[1:]
    run_steps(tmp_path, [4, 6, 8])  # goes on; 6 is saved because it is better than 0
    assert checkpoint.steps(str(tmp_path)) == [10, 6]
    run_steps(tmp_path, [10, 12])  # an equal one is no better
    assert checkpoint.steps(str(tmp_path)) == [12, 6]
    assert [row['step'] for row in recorded_events(str(tmp_path)) if row['event'] == 'best'][-1] == 6


def test_without_the_key_only_the_newest_stay(tmp_path):
    run_steps(tmp_path, [0, 2, 4, 6, 8], best='')
    assert checkpoint.steps(str(tmp_path)) == [10]


def test_a_best_evaluation_whose_checkpoint_was_lost_is_saved_when_it_is_repeated(tmp_path):
    (tmp_path / 'evaluations.jsonl').write_text('{"step": 0, "greedy": 0.5}\n{"step": 6, "greedy": 0.7}\n')
    with Shell(str(tmp_path), 1) as shell:
        shell.save(state_of(4))
    with Shell(str(tmp_path), 1, 'greedy') as shell:
        shell.save_if_best(state_of(6), {'greedy': 0.7})
        shell.save(state_of(8))
        shell.save(state_of(10))
    assert checkpoint.steps(str(tmp_path)) == [10, 6]


def test_the_evaluation_of_the_last_policy_may_be_the_best(tmp_path):
    run_steps(tmp_path, [0, 2, 4, 6, 8])
    with Shell(str(tmp_path), 1, 'greedy') as shell:
        values: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Loop))
        values |= {'shell': shell, 'numbers': range(8, 10), 'seconds': {}, 'monitors': mock.Mock()}
        Loop(**values).evaluate(10, lambda params: {'greedy': 0.8}, state_of(10))
    values['monitors'].evaluation.assert_called_once_with(10, {'greedy': 0.8}, last=True)
    assert [(row['step'], row['value']) for row in recorded_events(str(tmp_path))[-2:]] == [(6, 0.7), (10, 0.8)]
    assert checkpoint.steps(str(tmp_path)) == [10, 6]  # 10 is the newest, and was saved after the last step


def test_a_figure_that_evaluations_lack_is_refused_before_the_first_step(tmp_path):
    with Shell(str(tmp_path), 1, 'gredy') as shell, pytest.raises(BadInput, match='did you mean greedy'):
        shell.save_if_best(state_of(0), {'greedy': 0.1, 'reward': 0.2})


@pytest.mark.parametrize(
    'changes, steps',
    [
        ({'data__epochs': 3.0}, 30),  # 40 prompts by 4
        ({'data__epochs': 0.01}, 1),
        ({'data__epochs': 1.0, 'data__prompts_per_step': 12}, 4),  # 40 by 12, and the last step begins the next pass
        ({'data__epochs': 2.0, 'preset': 'sft', 'collection__source': 'demonstrations'}, 5),  # 16 demonstrations a step
        ({'steps': 6}, 6),
    ],
)
def test_epochs_are_so_many_steps(tmp_path, changes, steps):
    run, splits = train.check(tiny_run.config(**changes), str(tmp_path / 'run'))
    assert len(splits.train.examples) == 40
    assert run.settings.steps == steps == run.settings.config.steps == run.settings.recorded['steps']


def test_a_run_of_epochs_goes_on_without_a_change_and_with_more_epochs(tmp_path):
    config = tiny_run.config(data__epochs=1.0)
    run, _ = train.check(config, str(tmp_path))
    (tmp_path / 'config.json').write_text(json.dumps(run.settings.recorded))
    assert run.settings.steps == 10
    assert not steering.changes(tmp_path, run.settings.recorded)
    assert [change.key for change in steering.changes(tmp_path, tiny_run.config(data__epochs=2.0).to_dict())] != []
    longer = tiny_run.config(data__epochs=2.0)
    assert train.check(longer, str(tmp_path))[0].settings.steps == 20
    for name, rows in [('metrics', range(10)), ('evaluations', [0, 10])]:
        (tmp_path / f'{name}.jsonl').write_text(''.join(f'{{"step": {row}}}\n' for row in rows))
    assert train.is_finished(config, str(tmp_path)) and not train.is_finished(longer, str(tmp_path))


def test_the_best_policy_of_a_run_is_evaluated_by_its_step(tmp_path, long):
    changes = {'evaluation__every': 1, 'checkpoint__best': 'reward', 'checkpoint__keep': 1, 'data__epochs': 0.6}
    workdir = str(tmp_path / 'run')
    train.run(tiny_run.config(optimizer__learning_rate=0.01, **changes), workdir)
    rows = tiny_run.rows(workdir, 'evaluations.jsonl')
    assert [row['step'] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    best = max(rows[:-1], key=lambda row: row['reward'])
    assert checkpoint.steps(workdir) == sorted({6, best['step']} - {0}, reverse=True)
    evaluate.run(None, workdir, str(tmp_path / 'out'), 0, 'test', step=checkpoint.steps(workdir)[-1])
    figures = json.loads((tmp_path / 'out' / 'evaluation.json').read_text())['figures']
    assert figures['reward']['mean'] == next(r for r in rows if r['step'] == checkpoint.steps(workdir)[-1])['reward']
