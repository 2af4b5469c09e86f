"""A whole run with a judge over HTTP: a server that fails and kill -9 change nothing, and no verdict is paid twice."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from grpo_jax import evaluate, train
from grpo_jax.errors import BadInput
from tests import tiny_run
from tests.fake_service import serving

STEPS = 6
CHILD = """
import sys
from grpo_jax import train
from tests import test_judged_run
train.run(test_judged_run.config(sys.argv[1]), sys.argv[2])
"""


def config(url, **judge):
    small = tiny_run.config(steps=STEPS, checkpoint__every=3)
    small.reward.parts, small.reward.verifier = (('numeric', 1.0), ('judge', 0.5)), 'numeric'
    small.reward.most_missing = 0.9
    options = {'url': url, 'model': 'small', 'rubric': '{prompt} Solution: {completion}', 'retries': 0, 'timeout': 30.0}
    small.reward.options.judge.update(options | {'verdict': 'number', 'key': 'JUDGE_KEY'} | judge)
    return small


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv('JUDGE_KEY', 'sk-secret')
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')


def key_of(body):
    """The key of a request in the store."""
    return hashlib.sha256(json.dumps(['judge', 'small', body], sort_keys=True).encode()).hexdigest()[:32]


def start(workdir, service):
    """The run in a process of its own: it compiles the last bits of a metric as no other process does."""
    command = [sys.executable, '-c', CHILD, service.url, str(workdir)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(workdir, service):
    process = start(workdir, service)
    errors = process.communicate(timeout=600)[1]
    assert process.returncode == 0, errors


def kill_when_rows(workdir, service, count):
    """kill -9 in the step after `count` rows, of a run whose service fails at times once a row is there."""
    process, path = start(workdir, service), workdir / 'metrics.jsonl'
    while process.poll() is None:
        done = path.read_text(encoding='utf8').count('\n') if path.exists() else 0
        if done:
            service.default = 'flaky'
        if done >= count:
            time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    errors = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, errors


def test_a_killed_run_goes_on_bit_for_bit_and_asks_nothing_that_was_answered(long, tmp_path):
    workdir, straight = tmp_path / 'run', tmp_path / 'straight'
    with serving(default='hash', seconds=0.02) as service:
        kill_when_rows(workdir, service, 4)
        before = tiny_run.rows(workdir)
        stored = {json.loads(line)['key'] for line in (workdir / 'verdicts.jsonl').read_text().splitlines()}
        asked, service.default = len(service.bodies), 'hash'  # the service is well again
        finish(workdir, service)
        after = tiny_run.rows(workdir)
        again = {key_of(body) for body in service.bodies[asked:]}
        assert stored and not again & stored
        lost = {key_of(body) for body in service.bodies[:asked]} & again
        assert len(lost) <= 64  # those under way when the run was killed, or that the service failed in its last step
    for old, new in zip(before, after, strict=False):
        assert {k: (v, new[k]) for k, v in old.items() if v != new[k]} == {}
    assert any(row['reward_missing'] for row in before[1:]) and not any(row['reward_missing'] for row in after[5:])
    assert all(row['reward_refused'] == 0 for row in after)
    timings = tiny_run.rows(workdir, 'timings.jsonl')
    assert all({'judge/calls', 'judge/stored', 'judge/retries', 'judge/cost'} <= set(row) for row in timings)
    assert timings[-1]['judge/calls'] and timings[3]['judge/calls'] == 0 < timings[3]['judge/stored']

    take_verdicts(workdir, straight)
    finish(straight, service)
    assert_equal(workdir, straight)
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            with open(os.path.join(folder, name), 'rb') as file:
                assert b'sk-secret' not in file.read(), name


def take_verdicts(workdir, other):
    """Makes a workdir with the verdicts of another, so that its run needs no service."""
    other.mkdir()
    for name in ('verdicts.jsonl', 'unanswered.jsonl'):
        shutil.copy(workdir / name, other / name)


def assert_equal(workdir, other):
    for name in ('metrics.jsonl', 'evaluations.jsonl'):
        assert (workdir / name).read_bytes() == (other / name).read_bytes()
    policies = [evaluate.open_policy(evaluate.open_recorded(str(folder), trust=True))[0] for folder in (workdir, other)]
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, policies))


def test_a_run_is_made_again_from_its_verdicts_without_the_service(tmp_path):
    def fail(step, row):
        service.default = 'flaky' if step < STEPS - 1 else 'hash'

    with serving(default='hash') as service:
        train.run(config(service.url, prices=(1.0, 2.0)), str(tmp_path / 'run'), on_step=fail)
    missing = [row['reward_missing'] for row in tiny_run.rows(tmp_path / 'run')]
    assert missing[0] == 0 and all(0 < share < 0.9 for share in missing[1:])
    take_verdicts(tmp_path / 'run', tmp_path / 'again')
    train.run(config(service.url, prices=(1.0, 2.0)), str(tmp_path / 'again'))
    assert_equal(tmp_path / 'run', tmp_path / 'again')
    assert not any(row['judge/calls'] for row in tiny_run.rows(tmp_path / 'again', 'timings.jsonl'))


def contents_of(folder):
    """{path: content} of all files below a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


@pytest.mark.parametrize('store', ['', 'shared.jsonl'])
def test_a_check_of_a_begun_run_reads_its_verdicts_and_stores_none(store, tmp_path):
    (tmp_path / 'graded.jsonl').write_text('{"prompt": "2+2?", "completion": "5", "label": 0}\n', encoding='utf8')
    options = {'store': store and str(tmp_path / store)}
    with serving(default='hash') as service:
        small = config(service.url, **options)
        small.steps = 1
        train.run(small, str(tmp_path / 'run'))
        before, asked = contents_of(tmp_path), len(service.bodies)
        train.check(small, str(tmp_path / 'run'))
        assert len(service.bodies) == asked  # the run has stored what is asked of it
        small.reward.options.judge.update({'labels': str(tmp_path / 'graded.jsonl'), 'agreement': 0.0})
        train.check(small, str(tmp_path / 'run'))
        assert len(service.bodies) == asked + 1 and contents_of(tmp_path) == before


def test_a_check_writes_nothing_and_says_what_is_wrong(tmp_path, monkeypatch):
    with serving(default='hash') as service:
        train.check(config(service.url), str(tmp_path / 'run'))
        assert len(service.bodies) == 1 and not (tmp_path / 'run').exists()
        service.default = 'status 401'
        with pytest.raises(BadInput, match=r"judge.url = 'http://127.*status 401"):
            train.check(config(service.url), str(tmp_path / 'run'))
        monkeypatch.delenv('JUDGE_KEY')
        with pytest.raises(BadInput, match=r'judge\.key names no variable'):
            train.check(config(service.url), str(tmp_path / 'run'))
