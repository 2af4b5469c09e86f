"""Steps of which no completion has a reward: events, and after a few the end, also over a resume."""

import os

import numpy as np
import pytest

from grpo_jax import rewards, train
from grpo_jax.errors import BadInput
from grpo_jax.run.loop import check_rewarded
from grpo_jax.run.rows import drop_events, recorded_events
from tests import tiny_run


def rewarded(*values):
    """Rewards of completions by two parts, of which the second gives a number to none."""
    values = np.array(values, np.float64)
    zeros, none = np.zeros(len(values)), np.full(len(values), np.nan)
    return rewards.Rewards(zeros, zeros, zeros, values, none, {'first': values, 'second': none}, {})


NONE = rewarded(np.nan, np.inf)


def test_a_step_without_a_reward_is_an_event_that_names_the_parts(tmp_path, caplog):
    check_rewarded(tmp_path, 4, NONE)
    assert recorded_events(tmp_path) == [
        {'step': 4, 'event': 'rewards', 'completions': 2, 'without_reward': {'first': 2, 'second': 2}}
    ]
    assert 'step 4: none of 2 completions has a finite reward: first gives 2 times None or NaN' in caplog.text


def test_a_step_with_one_reward_is_none(tmp_path):
    check_rewarded(tmp_path, 4, rewarded(np.nan, 0.0))
    assert not os.listdir(tmp_path)


def test_three_steps_in_a_row_end_the_run(tmp_path):
    for step in (0, 1, 3, 4):
        check_rewarded(tmp_path, step, NONE)
    with pytest.raises(BadInput, match=r"'first', 'second'\].* 3 steps in a row \(steps 3 to 5\): first gives 2"):
        check_rewarded(tmp_path, 5, NONE)


def test_the_count_goes_on_where_a_run_was_stopped(tmp_path):
    for step in (3, 4):
        check_rewarded(tmp_path, step, NONE)
    drop_events(tmp_path, 4)  # what a resume from the checkpoint of step 4 does
    check_rewarded(tmp_path, 4, NONE)
    with pytest.raises(BadInput, match='steps 3 to 5'):
        check_rewarded(tmp_path, 5, NONE)


def test_a_run_whose_reward_breaks_ends_in_one_line_also_when_it_is_resumed(tmp_path):
    config = tiny_run.config(
        steps=6, reward__parts=(('mine', 1.0),), reward__verifier='', checkpoint__every=1, supervised__updates=0
    )
    config.evaluation.every = 0
    judged = []

    def mine(completions, examples):
        judged.append(len(completions) == 16)  # a step's, and not those of an evaluation
        return [1.0 if sum(judged) <= 1 or not judged[-1] else None] * len(completions)

    with pytest.raises(BadInput, match=r'3 steps in a row \(steps 1 to 3\): mine gives 16 times None or NaN'):
        train.run(config, str(tmp_path), functions={'mine': mine})
    assert [row['step'] for row in recorded_events(tmp_path) if row['event'] != 'diagnosis'] == [1, 2, 3]
    assert [row['step'] for row in tiny_run.rows(tmp_path)] == [0, 1, 2]
    # again: from the checkpoint of step 3, with two such steps behind it
    with pytest.raises(BadInput, match=r'steps 1 to 3'):
        train.run(config, str(tmp_path), functions={'mine': mine})
    assert [row['step'] for row in recorded_events(tmp_path) if row['event'] != 'diagnosis'] == [1, 2, 3]
