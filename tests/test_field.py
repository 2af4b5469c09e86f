"""The cases that strangers' inputs showed keep running: tests/field/repro.py, which prints what is seen."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_cases_of_rewards_run():
    cases = ['golds', 'unknown', 'needs', 'language']
    command = [sys.executable, 'tests/field/repro.py', *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    headings = [line.split(':')[0] for line in done.stdout.splitlines() if line.startswith('== ')]
    assert headings == [f'== {name}' for name in cases]
