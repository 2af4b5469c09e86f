"""An option stands in one place: its field says values, kind, default and meaning, and all else is read from there."""

import importlib
import os
import shutil
import subprocess
import sys

import pytest

from grpo_jax.run import settings
from tests.doc_examples import ROOT

FIELD = '    clip_updates: Free[Count] = 7  # updates that are clipped\n'
# run in a copy of the repository that has FIELD besides
READ = """
import os, sys
sys.path[:0] = [os.getcwd(), 'docs', sys.argv[1]]
import grpo_jax, make_config
from grpo_jax.errors import BadInput
from grpo_jax.learner import Learning
from grpo_jax.run import settings
from tests.test_commands import config_of
assert grpo_jax.__file__ == os.path.join(os.getcwd(), 'grpo_jax', '__init__.py')
print(config_of('--config=arithmetic').learner.clip_updates, settings.kind_of('learner.clip_updates').value)
print(next(line for line in make_config.text().splitlines() if 'clip_updates' in line))
print(next(line[:12] for line in make_config.checkpoints().splitlines() if 'clip_updates' in line))
print(Learning.from_config(config_of('--config=arithmetic', '--config.learner.clip_updates=9').learner).clip_updates)
for flag in ('--config.learner.clip_updates=0', '--config.learner.clip_updats=9'):
    try:
        Learning.from_config(config_of('--config=arithmetic', flag).learner)
    except BadInput as error:
        print(error)
"""


@pytest.fixture
def make_config(monkeypatch):
    """The script that writes the pages of the keys."""
    monkeypatch.syspath_prepend(os.path.join(ROOT, 'docs'))
    return importlib.import_module('make_config')


def test_a_learner_option_is_one_line_and_its_use(tmp_path):
    for folder in ('grpo_jax', 'configs', 'docs'):
        shutil.copytree(f'{ROOT}/{folder}', tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns('*.pyc'))
    shutil.copy(f'{ROOT}/pyproject.toml', tmp_path)
    path = tmp_path / 'grpo_jax' / 'learner' / 'options.py'
    before, after = path.read_text(encoding='utf8').split('    max_bad_steps: ')
    path.write_text(f'{before}{FIELD}    max_bad_steps: {after}', encoding='utf8')
    done = subprocess.run([sys.executable, '-c', READ, ROOT], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        '7 free',
        '| `learner.clip_updates` | `7` | a whole number at least 1 | updates that are clipped |',
        '| **free** |',
        '9',
        'learner.clip_updates = 0: must be a whole number at least 1 and at most 2147483647',
        "--config.learner.clip_updats = '9': config.learner has no clip_updats; did you mean clip_updates?",
    ], done.stderr


def test_the_lines_of_the_default_config_say_what_the_fields_say(make_config):
    config, fields = make_config.defaults().to_dict(), settings.default_config()
    fields['reward']['options'] = config['reward']['options']  # which stand there alone
    assert config == fields
    meanings = {row[0].strip('`'): row[3] for row in make_config.rows_of(settings.Keys, config)}
    listed = make_config.listed_in_defaults()
    assert len(listed) > 80 and 'learner.epochs' in listed
    for path, comment in listed.items():
        meaning = meanings[path].replace('`', '').partition(' -> ')[0]
        assert meaning.startswith(comment.removesuffix(' ...')) if comment.endswith('...') else comment == meaning, path


def test_the_page_has_the_kinds_of_the_fields(make_config):
    with open(f'{ROOT}/docs/checkpoints.md', encoding='utf8') as file:
        assert file.read() == make_config.checkpoints(), 'run: python docs/make_config.py'


def test_each_key_has_the_kind_that_the_page_says(make_config):
    said = {name: kind for kind, names in make_config.kinds().items() for name in names}
    for path, _ in make_config.leaves(make_config.defaults().to_dict()):
        sections = [path.rsplit('.', depth)[0] + '.*' for depth in range(1, path.count('.') + 1)]
        fitting = [said[name] for name in (path, f'{path}.*', *sections) if name in said]
        assert fitting and settings.kind_of(path) == fitting[0], path
