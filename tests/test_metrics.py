"""What a run writes down: files that are closed whatever happens, and the writer of the other processes."""

import inspect

import pytest

from grpo_jax.hosts import processes
from grpo_jax.run import metrics, tables
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
