"""What a downloaded run names is not run, and what others wrote is shown on the terminal and not obeyed."""

import json
import os
import subprocess
import sys

import pytest

from grpo_jax import evaluate
from grpo_jax.errors import BadInput
from grpo_jax.hosts import files
from grpo_jax.run import cli, config_file, console
from grpo_jax.run.open import open_config
from grpo_jax.text import Activity, escape
from grpo_jax.tools import export, show
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CODE = "open({!r}, 'w').close()\ndef reward(completion, example): return 1.0\ndef examples(split): return []\n"


@pytest.fixture
def run(tmp_path):
    """(workdir of a run that was begun, the file that its own code writes when it runs, path of that code)."""
    workdir, trace, file = tmp_path / 'run', tmp_path / 'has run', tmp_path / 'theirs.py'
    tiny_run.record(open_config(tiny_run.config(), str(workdir)))
    file.write_text(CODE.format(str(trace)))
    return workdir, trace, str(file)


def change(workdir, change):
    path = workdir / 'config.json'
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


NAMED = {
    'a reward': lambda c, file: c['reward']['parts'].append([f'{file}:reward', 0.5]),
    'rewards of steps': lambda c, file: c['reward'].update(step_rewards=f'{file}:reward'),
    'a data set': lambda c, file: c['data'].update(name=file),
    'a source of a mixture': lambda c, file: c['data'].update(
        name='mixture', options={'sources': [{'name': file, 'options': {}, 'weight': 1.0}]}
    ),
}


@pytest.mark.parametrize('place', NAMED)
def test_code_that_a_workdir_names_is_not_run(run, tmp_path, place):
    workdir, trace, file = run
    change(workdir, lambda config: NAMED[place](config, file))
    for attempt in (
        lambda: evaluate.open_recorded(str(workdir)),
        lambda: evaluate.run(None, str(workdir), None, 1, 'test'),
        lambda: export.export(str(workdir), str(tmp_path / 'out'), 'float32'),
    ):
        with pytest.raises(BadInput, match=r'names code that would run: .*theirs\.py.*--trust'):
            attempt()
    assert not trace.exists() and not (tmp_path / 'out').exists()


def test_code_of_another_ending_is_code_too(run):
    workdir, _, file = run
    change(workdir, lambda config: config['reward']['parts'].append([f'{file}c:reward', 0.5]))
    with pytest.raises(BadInput, match=r'theirs\.pyc:reward'):
        evaluate.open_recorded(str(workdir))


def test_a_service_that_a_workdir_names_is_not_asked(run):
    workdir, _, _ = run
    judge = {'url': 'http://127.0.0.1:9/v1', 'key': 'HOME', 'rubric': '{completion}'}
    change(workdir, lambda config: config['reward']['options'].update(judge=judge))
    change(workdir, lambda config: config['reward']['parts'].append(['judge', 0.5]))
    with pytest.raises(BadInput, match=r'names services that would be asked: http://127.0.0.1:9/v1, .*--trust'):
        evaluate.open_recorded(str(workdir))
    assert 'judge' in evaluate.open_recorded(str(workdir), trust=True).rewards.parts


def test_a_workdir_that_is_trusted_runs_its_code(run):
    workdir, trace, file = run
    change(workdir, lambda config: NAMED['a reward'](config, file))
    opened = evaluate.open_recorded(str(workdir), trust=True)
    assert trace.exists() and 'reward' in opened.rewards.parts


def test_a_workdir_that_names_the_packages_own_pieces_needs_no_trust(run):
    assert evaluate.open_recorded(str(run[0])).rewards.verifier == 'numeric'


@pytest.mark.parametrize('command', ['evaluate', 'export'])
def test_the_commands_refuse_in_one_line_that_names_file_and_flag(run, tmp_path, command):
    workdir, trace, file = run
    change(workdir, lambda config: NAMED['a reward'](config, file))
    flags = [f'--workdir={workdir}', f'--out={tmp_path / "out"}']
    done = subprocess.run(
        [sys.executable, '-m', 'grpo_jax', command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert 'theirs.py:reward' in done.stderr and '--trust' in done.stderr and not trace.exists()


@pytest.mark.parametrize(
    'damage',
    [
        lambda c: c.pop('rollout'),
        lambda c: c.update(rollout=[]),
        lambda c: c['rollout'].update(group_size='4'),
        lambda c: c['rollout'].update(group_size=True),
        lambda c: c['reward'].update(parts='numeric'),
        lambda c: c['reward'].update(step_rewards=None),
        lambda c: c['data'].update(name=['x.py']),
        lambda c: c.update(seed=1.5),
    ],
)
def test_a_workdir_with_a_config_of_wrong_types_is_refused(run, damage):
    change(run[0], damage)
    with pytest.raises(BadInput, match=r'bring back|was begun by'):
        config_file.read_recorded(str(run[0]), trust=True)


@pytest.mark.parametrize('name', ['config.json', 'model'])
def test_a_workdir_is_read_in_its_own_place(run, name):
    workdir, elsewhere = run[0], run[0].parent / 'elsewhere'
    (workdir / name).rename(elsewhere)
    (workdir / name).symlink_to(elsewhere)
    with pytest.raises(BadInput, match='lies outside'):
        evaluate.open_recorded(str(workdir))


@pytest.mark.parametrize('ending', ['', '.writing'])
def test_a_file_is_written_in_the_place_of_a_link_and_not_through_it(tmp_path, ending):
    (tmp_path / 'mine').write_text('mine')
    path = tmp_path / 'completions.jsonl'
    (tmp_path / f'completions.jsonl{ending}').symlink_to('mine')
    with files.atomic_write(path) as file:
        file.write('theirs')
    assert (tmp_path / 'mine').read_text() == 'mine' and path.read_text() == 'theirs' and not path.is_symlink()


# the terminal

HOSTILE = '[red]x[/red] :smile: \x1b[31mred\x1b]0;title\x07 \x9b2J \u202eback \u200b \x00 \r over \ud800 [/]'
SHOWN = r'[red]x[/red] :smile: \x1b[31mred\x1b]0;title\x07 \x9b2J \u202eback \u200b \x00 \r over \ud800 [/]'


def test_what_cannot_be_seen_is_written_out():
    assert escape(HOSTILE) == SHOWN == escape(SHOWN)
    assert escape('a\nb\tc') == r'a\nb\tc'
    assert escape('Größe → 数 é 🙂 \\x1b') == 'Größe → 数 é 🙂 \\x1b'


def test_bad_input_is_one_line_that_can_be_shown():
    line = str(BadInput(HOSTILE, HOSTILE, HOSTILE))
    assert line.isprintable() and line.count('[red]x[/red]') == 3 and line.count(r'\x1b[31m') == 3


def test_bad_input_of_a_novel_is_no_novel():
    assert len(str(BadInput('x' * 10**6, ['y' * 10**6], 'z' * 10**6))) < 5000


def test_a_warning_and_an_activity_are_escaped(capsys):
    console._handler.handle(console.logging.LogRecord('grpo_jax', 30, '', 0, '%s', (HOSTILE,), None))
    console.console.print(HOSTILE)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 2 and all(line.isprintable() for line in printed)
    assert printed[1] == SHOWN


def test_a_line_about_an_activity_is_escaped():
    assert console.describe(Activity(HOSTILE, 10, 1, True, True), 400).startswith(SHOWN)


def test_a_table_shows_markup(capsys):
    console.show_tables(console.make_table(['', 'n'], [[HOSTILE, ':x:']], title=HOSTILE), HOSTILE, width=300)
    text = capsys.readouterr().out
    assert text.count(SHOWN) == 3 and ':x:' in text and '\x1b' not in text


def test_a_traceback_is_escaped(capsys):
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        console.print_exception(type(error), error, error.__traceback__)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith('Traceback') and lines[-1].startswith('ValueError: [red]x[/red] :smile: \\x1b[31m')
    assert all(line.isprintable() for line in lines)


def test_show_prints_what_the_data_say(tmp_path, capsys):
    row = {'prompt': f'1+1= {HOSTILE[:-8]}', 'answer': '\x1b[2J2'}
    for split in ('train', 'test'):
        (tmp_path / f'{split}.jsonl').write_text(json.dumps(row | {'prompt': row['prompt'] + split}) + '\n')
    changes = {'reward__parts': (('format', 1.0),), 'reward__verifier': '', 'collection__gate': 'reward'}
    config = tiny_run.config(data__name='files', data__max_prompt_tokens=400, **changes)
    config.data.options = {'folder': str(tmp_path)}
    text = '\n'.join(show.lines(config, 1))
    assert '\x1b' not in text and r'\x1b[2J2' in text and '[red]x[/red]' in text


def test_a_command_lines_own_text_is_escaped():
    done = subprocess.run(
        [sys.executable, '-m', 'grpo_jax.train', '--config=\x1b[31mx', '--workdir=/none'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and '\x1b' not in done.stderr and r'\x1b[31mx' in done.stderr
    assert cli.console.one_line('a\n\x1b') == r'a \x1b'
