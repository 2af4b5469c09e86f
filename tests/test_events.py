"""events.jsonl: what happened to a run beside its steps."""

import os

from grpo_jax.run.rows import EVENTS, append_event, drop_events, recorded_events


def test_steps_that_are_taken_again_leave_their_events_once(tmp_path):
    append_event(tmp_path, 3, 'rewards', part='numeric')
    append_event(tmp_path, 5, 'amended', key='optimizer.learning_rate', old=1.0, new=0.5)
    append_event(tmp_path, 5, 'rewards', part='again')
    append_event(tmp_path, 6, 'rewards', part='format')
    drop_events(tmp_path, 5)
    assert [(row['step'], row['event']) for row in recorded_events(tmp_path)] == [(3, 'rewards'), (5, 'amended')]
    assert recorded_events(tmp_path)[1] == {
        'step': 5,
        'event': 'amended',
        'key': 'optimizer.learning_rate',
        'old': 1.0,
        'new': 0.5,
    }


def test_half_a_row_of_a_killed_run_is_not_read(tmp_path):
    append_event(tmp_path, 1, 'rewards')
    with open(os.path.join(tmp_path, EVENTS), 'a', encoding='utf8') as file:
        file.write('{"step": 2, "ev')
    assert [row['step'] for row in recorded_events(tmp_path)] == [1]
    drop_events(tmp_path, 9)
    append_event(tmp_path, 9, 'rewards')
    assert [row['step'] for row in recorded_events(tmp_path)] == [1, 9]


def test_a_run_without_events_has_no_file(tmp_path):
    drop_events(tmp_path, 0)
    assert recorded_events(tmp_path) == [] and not os.listdir(tmp_path)
