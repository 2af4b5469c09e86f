"""Diagnoses of a run that goes on: printed, recorded, and the run is saved or stopped."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_jax import diagnose, train
from grpo_jax.diagnose import Context
from grpo_jax.errors import Diagnosed
from grpo_jax.hosts import processes
from grpo_jax.run import checkpoint, loop
from grpo_jax.run.rows import recorded_events
from tests import tiny_run
from tests.diagnose import streams

EVENT_KEYS = ['step', 'event', 'monitor', 'seen', 'evidence', 'cause', 'remedy', 'command']


def collapsing(**changes):
    """A tiny run whose first update, at a learning rate of 1, breaks the policy."""
    return tiny_run.config(
        model__path=tiny_run.DEMO,
        steps=6,
        supervised__updates=25,
        optimizer__learning_rate=1.0,
        checkpoint__every=100,
        **changes,
    )


def diagnosed(workdir):
    """(step, monitor) of each diagnosis in a run's events."""
    rows = [row for row in recorded_events(workdir) if row['event'] == 'diagnosis']
    assert all(list(row) == EVENT_KEYS for row in rows)
    return [(row['step'], row['monitor']) for row in rows]


@pytest.fixture(scope='module')
def collapsed(tmp_path_factory):
    """The workdir of a run that collapsed, and was saved at its diagnosis."""
    workdir = tmp_path_factory.mktemp('runs') / 'collapsed'
    train.run(collapsing(diagnose__on='save'), str(workdir))
    return workdir


def test_a_run_at_learning_rate_1_is_named_within_three_steps(collapsed):
    first = [(step, monitor) for step, monitor in diagnosed(collapsed) if step <= 3]
    assert first
    assert {'large_updates', 'dead_run', 'entropy_collapse'} & {monitor for _, monitor in first}


def test_what_was_told_stands_beside_the_curves(collapsed):
    (path,) = (collapsed / 'tensorboard').iterdir()
    events_of_board, (step, monitor) = path.read_bytes(), diagnosed(collapsed)[0]
    assert f'diagnosis/{monitor}/text_summary'.encode() in events_of_board
    (event,) = [row for row in recorded_events(collapsed) if (row['step'], row['monitor']) == (step, monitor)]
    assert event['evidence'].encode() in events_of_board


def test_what_was_told_is_what_the_files_of_the_run_say(collapsed):
    rows = tiny_run.rows(collapsed)
    context = Context.from_config(collapsing(), tiny_run.rows(collapsed, 'evaluations.jsonl'))
    assert diagnosed(collapsed) == [(d.step, d.monitor) for d in diagnose.history(rows, context)]


def test_a_diagnosis_stops_the_run_which_goes_on_and_says_the_same(collapsed, tmp_path, capsys):
    config = collapsing(diagnose__on='stop')
    with pytest.raises(Diagnosed, match=r'stopped after \d of \d+ steps by a diagnosis'):
        train.run(config, str(tmp_path))
    (step, monitor), *_ = diagnosed(tmp_path)
    assert len(tiny_run.rows(tmp_path)) == step + 1 and checkpoint.steps(str(tmp_path)) == [step + 1]
    assert f'diagnosis at step {step}: {monitor}: ' in capsys.readouterr().err
    config.diagnose.on = 'save'
    train.run(config, str(tmp_path))
    assert [row | {'command': ''} for row in recorded_events(tmp_path)] == [
        row | {'command': ''}
        for row in recorded_events(collapsed)  # which has the folder
    ]
    assert set(checkpoint.steps(str(tmp_path))) == set(checkpoint.steps(str(collapsed))) == {step + 1, config.steps}


def judged(workdir, on, table):
    """(the texts that Monitors showed, at which rows they asked to stop)."""
    shown, asked = [], []
    context = Context.from_config(tiny_run.config(steps=6, diagnose__on=on), optimizer='optimizer')
    writer = SimpleNamespace(text=lambda *text: shown.append(text))
    monitors = loop.Monitors(str(workdir), context, on, writer)
    for row in table:
        monitors.step(row['step'], {name: value for name, value in row.items() if name != 'step'})
        if monitors.asks('stop', 'here'):
            asked.append(row['step'])
    return shown, asked


CUT_OFF = streams.rows(6, truncated=streams.from_step(3, 0.4, 0.0))


def test_the_step_at_which_a_diagnosis_sets_in_stops_the_run_and_no_other(tmp_path, capsys):
    shown, asked = judged(tmp_path, 'stop', CUT_OFF)
    assert asked == [4]
    (event,) = recorded_events(tmp_path)
    assert list(event) == EVENT_KEYS
    assert event['remedy'] == '--amend --config.rollout.max_tokens=24'  # of 12
    ((step, name, text),) = shown
    assert (step, name) == (4, 'diagnosis/truncation')
    assert text == (
        'truncation: 40% of the completions are cut off by the budget (truncated 0.40 to 0.40 in steps 3 to 4, at 12 '
        'tokens); the budget is too small for this task; try from grpo_jax.run.steering import Steering; '
        'config.rollout.max_tokens = 24; '
        f'train.run(config, {str(tmp_path)!r}, steering=Steering(amend=True))'
    )
    assert capsys.readouterr().err == f'diagnosis at step 4: {text}\n'


def test_off_says_nothing_and_records_nothing(tmp_path, capsys):
    assert judged(tmp_path, 'off', CUT_OFF) == ([], [])
    assert not os.listdir(tmp_path) and capsys.readouterr().err == ''


def test_a_note_informs_and_stops_nothing(tmp_path, capsys):
    shown, asked = judged(tmp_path, 'stop', streams.rows(3, loss=1e-7))
    assert [name for _, name, _ in shown] == ['diagnosis/loss_is_zero'] and asked == []
    err = capsys.readouterr().err
    assert err.startswith('note at step 2: loss_is_zero: ') and '; try' not in err


def test_a_resumed_judge_reads_the_rows_that_were_written_and_is_silent_about_what_it_said(tmp_path):
    with open(tmp_path / 'metrics.jsonl', 'w', encoding='utf8') as file:
        file.writelines(json.dumps(row) + '\n' for row in CUT_OFF[:5])
    assert judged(tmp_path, 'stop', CUT_OFF[5:]) == ([], [])
    with open(tmp_path / 'metrics.jsonl', 'w', encoding='utf8') as file:
        file.writelines(json.dumps(row) + '\n' for row in CUT_OFF[:4])
    assert judged(tmp_path, 'stop', CUT_OFF[4:])[1] == [4]


class CountedRow(dict):
    """A row that counts how often it is read."""

    reads = 0

    def get(self, *arguments):
        """The value."""
        CountedRow.reads += 1
        return super().get(*arguments)

    def __getitem__(self, name):
        CountedRow.reads += 1
        return super().__getitem__(name)


def reads_of(count):
    """How many values of rows are read at the last of so many steps."""
    table = [CountedRow(row) for row in streams.rows(count, truncated=streams.from_step(3, 0.4, 0.0))]
    CountedRow.reads = 0
    diagnose.new_diagnoses(table, streams.RUN)
    return CountedRow.reads


def test_what_is_read_at_a_step_hardly_grows_with_the_run():
    assert (
        reads_of(4000) < 1.5 * reads_of(400) < 30_000
    )  # of 120 000 values, with a symptom whose causes are looked for


def test_another_process_learns_from_the_first_that_the_run_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, 'is_first', lambda: False)
    monkeypatch.setattr(processes, 'exchange_stop', lambda where, values, stop: not stop)  # the first one wants to
    shown, asked = judged(tmp_path, 'stop', CUT_OFF[:1])
    assert shown == [] and asked == [0]
    assert judged(tmp_path, 'say', CUT_OFF[:1]) == ([], [])  # nobody is asked


def test_a_row_holds_what_is_a_number_and_later_names_are_not_in_it():
    first = loop._monitored_row({'step': 3.0, 'reward': np.float32(0.1), 'kl': None, 'entropy': np.nan}, 3)
    second = loop._monitored_row({'step': 4, 'script/han': 0.5}, 4)
    assert first == {'step': 3, 'reward': float(np.float32(0.1))} and isinstance(first['step'], int)
    assert second == {'step': 4, 'script/han': 0.5} and first.get('script/han') is None and 'reward' not in second
