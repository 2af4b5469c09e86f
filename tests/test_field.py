"""The cases of tests/field/repro.py keep running: what strangers' inputs showed, asserted or printed."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAST = ['spaces', 'tags', 'prefilled', 'ends', 'tied', 'unknown', 'needs', 'golds', 'language', 'choice']
OF_DATA = ['plus', 'pipe', 'files']
OF_SPLITS = ['splits', 'solved']


def test_a_run_on_other_contents_is_as_its_user_expects(long):
    run(['resumed'])


def run(cases):
    """Runs the cases in one process; fails where one fails."""
    command = [sys.executable, 'tests/field/repro.py', *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    headings = [line.split(':')[0] for line in done.stdout.splitlines() if line.startswith('== ')]
    assert headings == [f'== {name}' for name in cases]


def test_cases_of_rewards_and_models_run():
    run(FAST)


def test_cases_of_data_run():
    run(OF_DATA)


@pytest.mark.usefixtures('long')
def test_cases_that_train_run():
    run(['budget'])


@pytest.mark.usefixtures('long')
def test_cases_of_splits_and_prompts_run():
    run(OF_SPLITS)


def test_every_case_is_run_by_a_test():
    cases = re.findall(r'^@case\ndef (\w+)', (ROOT / 'tests' / 'field' / 'repro.py').read_text('utf8'), re.MULTILINE)
    assert sorted(cases) == sorted([*FAST, *OF_DATA, *OF_SPLITS, 'budget', 'resumed'])
