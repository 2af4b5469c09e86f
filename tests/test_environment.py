"""What a run was begun and went on with is recorded, and a change of code or jax is named."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import jax
import pytest

import grpo_jax
from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.run import steering


def entries(workdir):
    return json.loads((workdir / 'environment.json').read_text(encoding='utf8'))


def test_each_beginning_of_a_run_is_an_entry_and_the_first_stays(tmp_path, caplog):
    steering.record_environment(str(tmp_path))
    (first,) = entries(tmp_path)
    steering.record_environment(str(tmp_path))
    assert entries(tmp_path)[0] == first and len(entries(tmp_path)) == 2
    assert caplog.messages == []  # nothing has changed
    assert first['packages']['jax'] == jax.__version__
    assert {'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'transformers', 'numpy'} <= first['packages'].keys()
    assert first['devices'] == {'platform': 'cpu', 'kind': 'cpu', 'count': 8, 'processes': 1}
    assert first['python'] == '.'.join(map(str, sys.version_info[:3]))
    assert 'pytest' in first['command'] or 'xdist' in first['command'] or '-c' in first['command']
    assert re.fullmatch(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00', first['begun'])


def test_a_run_that_goes_on_with_another_jax_or_code_says_so(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(steering, '_describe_clone', lambda _: {'commit': '1' * 40, 'edited': False})
    steering.record_environment(str(tmp_path))
    monkeypatch.setattr(steering, '_describe_clone', lambda _: {'commit': '1' * 40, 'edited': True})
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, 'version', lambda name: '9.9.9' if name == 'jax' else installed(name))
    steering.record_environment(str(tmp_path))
    version = grpo_jax.__version__
    assert caplog.messages == [
        f'{tmp_path} was begun with grpo_jax {version} at commit 111111111111, '
        f'and goes on with {version} at commit 111111111111 with edits',
        f'{tmp_path} was begun with jax {jax.__version__}, and goes on with 9.9.9',
    ]


@pytest.mark.parametrize('text', ['', '{', '{"begun": 1}', '[1]', 'null'])
def test_a_file_that_is_no_record_is_refused_and_left_alone(tmp_path, text):
    (tmp_path / 'environment.json').write_text(text, encoding='utf8')
    with pytest.raises(BadInput, match=r'environment\.json.*move the file away'):
        steering.record_environment(str(tmp_path))
    assert (tmp_path / 'environment.json').read_text(encoding='utf8') == text


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, 'is_first', lambda: False)
    steering.record_environment(str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def clone(tmp_path):
    """A clone of one commit, with a package and configs."""
    for name in ('grpo_jax/a.py', 'configs/b.py'):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('1\n')

    def git(*words):
        who = ['-c', 'user.name=a', '-c', 'user.email=a@b']
        done = subprocess.run(['git', '-C', tmp_path, *who, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git('init', '-q')
    git('add', '.')
    git('commit', '-qm', 'first')
    return tmp_path, git('rev-parse', 'HEAD')


def test_a_clone_has_a_commit_and_a_mark_for_edits(clone):
    root, commit = clone
    assert steering._describe_clone(str(root)) == {'commit': commit, 'edited': False}
    (root / 'notes.txt').write_text('of the user')  # what lies beside the code changes no run
    assert steering._describe_clone(str(root)) == {'commit': commit, 'edited': False}
    (root / 'configs' / 'mine.py').write_text('2\n')
    assert steering._describe_clone(str(root)) == {'commit': commit, 'edited': True}


def test_an_installed_package_in_a_clone_of_something_else_has_none(clone):
    root, _ = clone
    assert steering._describe_clone(str(root / 'grpo_jax')) == {}


@pytest.mark.parametrize('harm', ['no git', 'no commit'])
def test_without_git_or_a_commit_the_version_is_all(tmp_path, monkeypatch, harm):
    (tmp_path / '.git').mkdir()
    if harm == 'no git':
        monkeypatch.setenv('PATH', str(tmp_path))
    assert steering._describe_clone(str(tmp_path)) == {}


def test_the_version_is_that_of_the_clone_or_of_what_is_installed():
    root = os.path.dirname(grpo_jax.PACKAGE)
    with open(os.path.join(root, 'pyproject.toml'), encoding='utf8') as file:
        assert f'\nversion = "{grpo_jax.__version__}"\n' in file.read()


def test_an_installed_package_has_the_version_of_its_metadata(tmp_path):
    # a package that lies alone in a folder, as in site-packages
    os.symlink(grpo_jax.PACKAGE, tmp_path / 'grpo_jax')
    (tmp_path / 'grpo_jax-7.8.9.dist-info').mkdir()
    metadata = 'Metadata-Version: 2.1\nName: grpo_jax\nVersion: 7.8.9\n'
    (tmp_path / 'grpo_jax-7.8.9.dist-info' / 'METADATA').write_text(metadata)
    command = [sys.executable, '-c', 'import grpo_jax; print(grpo_jax.__version__)']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == '7.8.9\n'
