"""What a run was made from, and whether its files are whole."""

import os
import shutil
import subprocess
import sys

import pytest

from grpo_jax import provenance, train
from grpo_jax.errors import BadInput
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('made') / 'run'
    train.run(tiny_run.config(steps=2, supervised__updates=2, evaluation__prompts=2, log__rollouts=1), str(workdir))
    return workdir


@pytest.fixture
def workdir(made, tmp_path):
    return shutil.copytree(made, tmp_path / 'run')


def test_a_whole_run_is_verified(made):
    assert list(provenance.verify(str(made))) == []


def test_the_description_has_code_devices_programs_and_events(made):
    text = '\n'.join(provenance.describe_run(str(made)))
    for words in ('seed 0, 2 steps', 'by grpo_jax', 'of 1 processes', 'jax', 'program update: ', 'checkpoints: 2'):
        assert words in text


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(bytes(content))


def largest(folder):
    return max((path for path in folder.rglob('*') if path.is_file()), key=lambda path: path.stat().st_size)


DAMAGE = {
    'an array': (lambda w: flip(largest(w / 'checkpoints' / '2')), 'checkpoints/2'),
    "the cold start's array": (
        lambda w: flip(largest(w / 'cold_start' / 'checkpoints' / '2')),
        'cold_start/checkpoints/2',
    ),
    'an empty checkpoint': (lambda w: (w / 'checkpoints' / '9').mkdir(), 'checkpoints/9'),
    'config.json': (lambda w: (w / 'config.json').write_text('{'), 'config.json'),
    'no environment.json': (lambda w: (w / 'environment.json').unlink(), 'environment.json'),
    'a row of no sense': (lambda w: (w / 'metrics.jsonl').write_text('{"step": 0}\nx\n'), 'metrics.jsonl, line 2'),
    'a missing row': (lambda w: (w / 'metrics.jsonl').write_text('{"step": 0}\n'), 'has 1 rows'),
    'a repeated row': (
        lambda w: (w / 'timings.jsonl').write_text('{"step": 0}\n' * 2),
        'line 2: has step 0 in place of 1',
    ),
    'half a row': (lambda w: (w / 'evaluations.jsonl').write_text('{"step": 0}'), 'line 1: has no end'),
    'a dump': (lambda w: (w / 'rollouts' / '000001.jsonl').write_bytes(b'\xff\n'), 'rollouts/000001.jsonl, line 1'),
}


@pytest.mark.parametrize('damage, words', DAMAGE.values(), ids=DAMAGE)
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # of arrays that came too late
def test_what_is_damaged_is_named(workdir, damage, words):
    damage(workdir)
    problems = list(provenance.verify(str(workdir)))
    assert problems and all('\n' not in problem for problem in problems)
    assert any(words in problem for problem in problems)


def test_the_command_ends_with_status_1_for_damage(workdir):
    (workdir / 'metrics.jsonl').write_text('x\n')
    done = subprocess.run(
        [sys.executable, '-m', 'grpo_jax.provenance', f'--workdir={workdir}', '--verify'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and 'damaged: ' in done.stdout and 'Traceback' not in done.stderr


def test_two_runs_differ_in_settings_and_programs(long, made, tmp_path):
    other = tmp_path / 'other'
    train.run(tiny_run.config(steps=1, supervised__updates=0, evaluation__prompts=2, rollout__group_size=2), str(other))
    lines = list(provenance.differences(str(made), str(other)))
    assert 'config rollout.group_size: 4, 2' in lines
    assert any(line.startswith('programs update: ') for line in lines)
    assert list(provenance.differences(str(made), str(made))) == []


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match='holds no run'):
        list(provenance.verify(str(tmp_path)))
