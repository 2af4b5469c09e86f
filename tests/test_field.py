"""The cases that strangers' inputs showed keep running: tests/field/repro.py, which prints what is seen."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize('case', ['files'])
def test_a_case_is_as_its_user_expects(case):
    run([case])


def test_a_run_on_other_contents_is_as_its_user_expects(long):
    run(['resumed'])


def test_cases_of_rewards_run():
    run(['golds', 'unknown', 'needs', 'language'])


def run(cases):
    command = [sys.executable, 'tests/field/repro.py', *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    headings = [line.split(':')[0] for line in done.stdout.splitlines() if line.startswith('== ')]
    assert headings == [f'== {name}' for name in cases]
