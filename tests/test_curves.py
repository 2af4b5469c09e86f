"""The curve of a run, from rows that were written by hand."""

import io
import json
import math
import os
import sys

from matplotlib.figure import Figure
import numpy as np
import pytest

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.run import console


@pytest.fixture(autouse=True)
def each_is_drawn(monkeypatch):
    monkeypatch.setattr(console, 'draw_curve', console.draw_curve.__wrapped__)


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, in order."""
    drawn, save = [], Figure.savefig

    def keep(figure, *arguments, **options):
        drawn.append(figure)
        return save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, 'savefig', keep)
    return drawn


def write(folder, rows, evaluations=None):
    """A run's files in a folder, whose path is returned."""
    for name, lines in {'metrics': rows, 'evaluations': evaluations}.items():
        if lines is not None:
            text = ''.join(json.dumps(line) + '\n' for line in lines)
            (folder / f'{name}.jsonl').write_text(text, encoding='utf8')
    return str(folder)


def rows(rewards, lengths):
    return [{'step': i, 'reward': r, 'length': n} for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]


def lines_of(figure):
    """The lines of each panel, as lists of (steps, numbers)."""
    return [[(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines] for panel in figure.axes]


def is_png(path):
    with open(path, 'rb') as file:
        return file.read(8) == b'\x89PNG\r\n\x1a\n'


def test_the_picture_shows_the_rows(tmp_path, figures):
    evaluations = [{'step': 0, 'greedy': 0.25, 'pass@1': 0.5, 'reward': 9}, {'step': 2, 'greedy': 1.0, 'pass@1': 0.75}]
    path = console.draw_curve(write(tmp_path, rows([0.5, 1.0], [3, 5]), evaluations))
    assert path == os.path.join(str(tmp_path), 'curve.png') and is_png(path)
    reward, held_out, length = lines_of(figures[0])
    assert reward == [([0, 1], [0.5, 1.0])] and length == [([0, 1], [3, 5])]
    assert held_out == [([0, 2], [0.25, 1.0]), ([0, 2], [0.5, 0.75])]


def test_without_a_verifier_the_held_out_reward_is_shown(tmp_path, figures):
    console.draw_curve(write(tmp_path, rows([0.5], [3]), [{'step': 0, 'reward': -1.0}, {'step': 1, 'reward': 2.0}]))
    assert lines_of(figures[0])[1] == [([0, 1], [-1.0, 2.0])]


def test_numbers_that_are_missing_or_not_finite_are_gaps(tmp_path, figures):
    # null is how metrics.jsonl writes NaN; evaluations of another writer may hold the word
    written = [
        {'step': 0, 'reward': None, 'length': 1},
        {'step': 1, 'length': 2},
        {'step': 2, 'reward': 1, 'length': 3},
    ]
    console.draw_curve(write(tmp_path, written, [{'step': 0, 'greedy': math.nan}, {'step': 3, 'greedy': 0.5}]))
    reward, held_out, _ = lines_of(figures[0])
    np.testing.assert_array_equal(reward[0][1], [math.nan, math.nan, 1.0])
    np.testing.assert_array_equal(held_out[0][1], [math.nan, 0.5])
    assert [panel.lines[0].get_marker() for panel in figures[0].axes] == ['o', 'o', 'None']  # one number is a point
    assert [panel.get_xlabel() for panel in figures[0].axes] == ['step'] * 3


@pytest.mark.parametrize('evaluations', [None, []], ids=['no file', 'no row'])
def test_a_single_step_without_evaluations_is_drawn(tmp_path, figures, evaluations):
    assert is_png(console.draw_curve(write(tmp_path, rows([0.5], [3]), evaluations)))
    assert figures[0].axes[0].lines[0].get_marker() == 'o' and not figures[0].axes[1].lines


def test_a_run_without_any_finite_number_is_drawn(tmp_path, capsys):
    console.print_outcome(write(tmp_path, rows([None] * 3, [None] * 3), []))
    assert is_png(tmp_path / 'curve.png')
    assert capsys.readouterr().out.count('no finite number') == 2


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match='holds no metrics'):
        console.draw_curve(str(tmp_path))
    assert not os.listdir(tmp_path)


def test_text_goes_from_the_first_number_to_the_last():
    # eight heights between 0 and 1: 1/7 is in the second eighth, 6/7 in the seventh
    assert console.text_curve(np.arange(8) / 7) == '0 ▁▂▃▄▅▆▇█ 1'
    assert console.text_curve(np.array([2.0, 2.0])) == '2 ▁▁ 2'
    assert console.text_curve(np.array([math.nan, -1.0, math.inf, 3.0])) == '-1  ▁ █ 3'
    assert console.text_curve(np.array([])) == 'no finite number'


def test_long_runs_are_averaged_into_forty_blocks():
    text = console.text_curve(np.repeat([0.0, 1.0], 1000))
    assert text == f'0 {"▁" * 20}{"█" * 20} 1'


def test_a_terminal_without_blocks_gets_the_ends(monkeypatch):
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(io.BytesIO(), encoding='ascii'))
    assert console.text_curve(np.array([0.25, 1.0])) == '0.25 to 1'


def test_the_end_of_a_run_prints_changes_curves_and_paths(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))  # where no python is
    workdir = write(tmp_path, rows([0.0, 1.0], [3, 5]), [{'step': 0, 'greedy': 0.5}, {'step': 2, 'greedy': 0.75}])
    console.print_outcome(workdir)
    lines = capsys.readouterr().out.splitlines()
    assert '│ greedy │  0.500 │  0.750 │ +0.250 │' in lines
    assert lines[-6:] == [
        'reward           0 ▁█ 1',
        'length           3 ▁█ 5',
        'held-out greedy  0.5 ▁█ 0.75',
        f'curve: {tmp_path / "curve.png"}',
        f'report: {sys.executable} -m grpo_jax report --workdir={tmp_path}',
        f'everything the run wrote: {tmp_path}',
    ]


def test_prompts_that_were_learned_from_are_not_called_held_out(tmp_path, capsys, figures):
    workdir = write(tmp_path, rows([0.0, 1.0], [3, 5]), [{'step': 0, 'greedy': 0.5}, {'step': 2, 'greedy': 0.75}])
    (tmp_path / 'contents.json').write_text('{"splits": {"train": {"rows": 2}, "test": {"rows": 2}}}')
    for share, words in (0.0, 'training'), (0.3, 'held-out'):
        (tmp_path / 'config.json').write_text(f'{{"data": {{"held_out": {share}}}}}')
        console.print_outcome(workdir)
        out, title = capsys.readouterr().out, figures[-1].axes[1].get_title(loc='left')
        assert f'{words} prompts' in out and f'{words} greedy ' in out and title == f'{words} prompts'


def test_the_final_table_is_short_and_the_command_for_the_rest_can_be_pasted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('PATH', os.path.dirname(sys.executable))  # in a virtual environment that is activated
    folder = tmp_path / 'my run'
    folder.mkdir()
    names = ['greedy', 'pass@1', 'pass@2', 'pass@8', 'maj@8', 'reward', 'length', 'truncated', 'failed', 'unparsed']
    names += ['greedy/reward', 'strict/greedy']
    for reward, shown in ((0.5, ['greedy', 'pass@1', 'pass@8', 'length', 'truncated']), (0.25, ['reward'])):
        figures = dict.fromkeys(names, 0.5) | {'reward': reward}
        console.print_outcome(write(folder, rows([0.0], [3]), [{'step': 0} | figures, {'step': 1} | figures]))
        out = capsys.readouterr().out
        cells = [line.split('│')[1].strip() for line in out.splitlines() if line.startswith('│')]
        assert set(shown) <= set(cells) and len(cells) <= 6
    assert cells == ['greedy', 'pass@1', 'pass@8', 'reward', 'length', 'truncated']
    assert f"report: python -m grpo_jax report --workdir='{folder}'" in out


def test_rewards_before_and_behind_an_amended_one_are_not_compared(tmp_path, capsys):
    figures = [{'step': step, 'greedy': 0.5, 'reward': reward} for step, reward in ((0, 2.0), (4, 0.5))]
    workdir = write(tmp_path, rows([2.0, 2.0, 0.25, 0.5], [3, 3, 3, 3]), figures)
    amended = {'step': 2, 'event': 'amended', 'key': 'reward.parts', 'old': 1, 'new': 2}
    (tmp_path / 'events.jsonl').write_text(json.dumps(amended) + '\n')
    console.print_outcome(workdir)
    out = capsys.readouterr().out
    assert '│ reward' not in out and '│ greedy' in out
    assert 'reward from step 2, amended  0.25' in out


def test_only_the_first_process_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(processes, 'is_first', lambda: False)
    console.print_outcome(write(tmp_path, rows([0.5], [3])))
    assert not (tmp_path / 'curve.png').exists() and not capsys.readouterr().out
