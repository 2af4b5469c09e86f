"""What a run writes down: files that are closed whatever happens, and the writer of the other processes."""

import inspect

import numpy as np
import pytest

from grpo_jax.hosts import processes
from grpo_jax.rewards import Rewards
from grpo_jax.run import metrics, tables
from grpo_jax.types import Example, Experience
from tests import tiny_run


def public(kind):
    return {
        name: inspect.signature(function)
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith('_')
    }


def test_the_silent_writer_has_the_methods_of_the_writer_and_no_others():
    assert public(metrics.SilentWriter) == public(metrics.Writer)


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, 'is_first', lambda: False)
    with metrics.open_writer(str(tmp_path), 0, 2, 'train') as writer:
        writer.step(0, {'reward': 1.0}, {'sample': 1.0})
    assert not list(tmp_path.iterdir())
    with pytest.raises(AttributeError):
        writer.stepp(0, {}, {})


def test_an_exception_closes_the_files_with_all_rows_written(tmp_path):
    with pytest.raises(FloatingPointError), metrics.open_writer(str(tmp_path), 0, 2, 'train') as writer:
        writer.step(0, {'reward': 1.0, 'loss': float('nan')}, {'sample': 1.0})
        raise FloatingPointError
    assert tiny_run.rows(tmp_path) == [{'step': 0, 'loss': None, 'reward': 1.0}]
    with pytest.raises(ValueError, match='closed file'):
        writer.step(1, {'reward': 1.0}, {'sample': 1.0})
    writer.close()  # once more does nothing


def test_a_table_in_a_pipe_is_wide_enough_for_its_cells(capsys):
    tables.show('words', tables.make_table(['name', 'mean'], [['reward', '0.500'], ['x' * 90, '']], title='title'))
    printed = capsys.readouterr().out
    assert 'words' in printed and '0.500' in printed and 'x' * 90 in printed


@pytest.mark.parametrize(
    'advantages, dumped',
    [
        ([[0.5], [-0.5]], [0.5, -0.5]),
        ([[0.5, 0.25, 9.0], [-0.5, 9.0, 9.0]], [[0.5, 0.25], [-0.5]]),  # 2 and 1 tokens; 9 stands behind the end
        ([[float('nan')], [-0.5]], [None, -0.5]),
    ],
)
def test_a_dump_has_the_advantage_of_each_token_where_they_differ(advantages, dumped):
    texts, numbers, flags = np.array(['ab', 'c'], object), np.array([1.0, 0.0]), np.zeros(2, bool)
    rewarded = Rewards(texts, flags, np.array([2, 1]), numbers, numbers, {'numeric': numbers}, {'expired': flags})
    experience = Experience(None, np.array(advantages, np.float32), None, None, None, None)
    chat = ({'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'p'})
    rows = metrics.rollout_rows([Example('p', '1', 7, {}, chat)], rewarded, experience)
    assert [row['advantage'] for row in rows] == dumped
    assert [row['messages'] for row in rows] == [chat] * 2
    (plain, _) = metrics.rollout_rows([Example('p', '1', 7, {})], rewarded, experience)
    assert 'messages' not in plain
