"""The cases that strangers' inputs showed keep running: tests/field/repro.py, which prints what is seen."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(cases):
    """Runs the cases in one process; fails where one fails."""
    command = [sys.executable, 'tests/field/repro.py', *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    headings = [line.split(':')[0] for line in done.stdout.splitlines() if line.startswith('== ')]
    assert headings == [f'== {name}' for name in cases]


def test_cases_of_rewards_run():
    run(['golds', 'unknown', 'language'])


def test_cases_of_data_run():
    run(['plus', 'pipe'])


@pytest.mark.usefixtures('long')
def test_cases_of_splits_and_prompts_run():
    run(['splits', 'solved'])
