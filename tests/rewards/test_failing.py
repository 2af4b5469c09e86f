"""A part of the user's that raises exceptions is called again, then is missing, then ends the run; all is told."""

import asyncio
from collections import Counter
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_scoring import Letters, example, make

from grpo_jax import rewards
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold, resources, scoring
from grpo_jax.run import loop

TEXTS = ['good', 'bad', 'good']
FILE = """

def of_file(completion, example, *, log=''):
    with open(log, 'a') as calls:
        calls.write(completion + '\\n')
    with open(log) as calls:
        if completion == 'bad' and calls.read().split().count('bad') <= {failing}:
            raise ConnectionError('status 500')
    return 1.0
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(scoring, 'FIRST_PAUSE', 0.01)


class Service:
    """A judge of 'good' and 'bad' whose first `failing` calls on 'bad' raise an exception."""

    def __init__(self, failing, error=ConnectionError):
        self.failing, self.error, self.calls, self.lock = failing, error, Counter(), threading.Lock()

    def ask(self, completion):
        with self.lock:
            self.calls[completion] += 1
            if completion == 'bad' and self.calls['bad'] <= self.failing:
                raise self.error('status 500')
        return 1.0

    def functions(self):
        """The service as a plain part, an asynchronous one, and one that takes all completions."""

        async def later(completion, example):
            await asyncio.sleep(0)
            return self.ask(completion)

        return {
            'plain': lambda completion, example: self.ask(completion),
            'later': later,
            'at_once': lambda completions, examples: [self.ask(text) for text in completions],
        }


def judge(functions, texts, tolerant=True):
    none = np.zeros(len(texts), bool)
    return rewards.compute_rewards(functions._replace(step=int(tolerant)), [example('1')], texts, none, none * 1)


KINDS = ['plain', 'later', 'at_once', 'of_file']


def compute(kind, failing, folder, tolerant=True, **changes):
    """(Rewards of TEXTS by a service that fails, how often it was asked about 'bad')."""
    service, log = Service(failing), folder / 'log'
    (folder / 'mine.py').write_text(FILE.replace('{failing}', str(failing)))
    name = f'{folder}/mine.py:of_file' if kind == 'of_file' else kind
    options = {'options': {'of_file': {'log': str(log)}}} if kind == 'of_file' else {}
    with make((name, 1.0), functions=service.functions(), **{'retries': 2} | changes | options) as functions:
        rewarded = judge(functions, TEXTS, tolerant)
    return rewarded, log.read_text().split().count('bad') if kind == 'of_file' else service.calls['bad']


@pytest.mark.parametrize('kind', KINDS)
def test_an_exception_that_passes_costs_a_call_and_nothing_else(kind, tmp_path):
    rewarded, calls = compute(kind, 2, tmp_path)
    assert rewarded.rewards.tolist() == [1.0] * 3 and calls == 3
    assert rewarded.retried.tolist() == [kind == 'at_once', True, kind == 'at_once']
    assert not rewarded.failures['missing'].any() and set(rewarded.errors) == {''}


@pytest.mark.parametrize('kind', KINDS)
def test_a_part_that_raises_in_every_call_is_unknown(kind, tmp_path):
    rewarded, calls = compute(kind, 9, tmp_path, verifier=kind)
    missing = [kind == 'at_once', True, kind == 'at_once']  # one call is for all of them
    expected = [np.nan if gone else 1.0 for gone in missing]
    assert calls == 3 and rewarded.failures['missing'].tolist() == missing
    for values in (rewarded.rewards, rewarded.correct, rewarded.parts[kind]):
        np.testing.assert_array_equal(values, expected)
    assert 'ConnectionError: status 500' in rewarded.errors[1] and rewarded.errors[1].startswith(f'{kind}: ')
    assert not rewarded.failures['expired'].any() and not rewarded.failures['died'].any()


@pytest.mark.parametrize('kind', KINDS)
def test_where_nothing_may_be_missing_the_exception_is_raised_after_the_retries(kind, tmp_path):
    with pytest.raises(Exception, match='status 500') as error:
        compute(kind, 9, tmp_path, tolerant=False)
    if kind == 'of_file':
        assert isinstance(error.value, BadInput) and error.value.status == 2
    else:
        assert isinstance(error.value, ConnectionError)
    assert compute(kind, 0, tmp_path, tolerant=False, retries=0)[0].rewards.tolist() == [1.0] * 3


def test_a_stream_may_lack_parts_too():
    service = Service(9)
    with make(('plain', 1.0), functions=service.functions(), retries=1) as functions:
        stream = rewards.RewardStream(functions._replace(step=1), [example('1')], 2, Words())
        for row in range(2):
            stream.add(row, [100 + row], False)
        rewarded = stream.results()
    assert rewarded.failures['missing'].tolist() == [False, True] and service.calls['bad'] == 2


class Words(Letters):
    """A tokenizer of one word a token."""

    def decode(self, tokens, **options):
        return ' '.join(('good', 'bad')[token - 100] for token in tokens)


def test_other_parts_still_pay_where_the_config_counts_a_missing_one_as_0():
    parts = {'style': lambda completion, example: 0.25, **Service(9).functions()}
    with make(('plain', 1.0), ('style', 1.0), functions=parts, retries=0, missing='zero') as functions:
        rewarded = judge(functions, TEXTS)
    assert rewarded.rewards.tolist() == [1.25, 0.25, 1.25]


def test_a_mistake_of_this_package_is_raised_at_once(monkeypatch):
    service = Service(9)
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', service.functions()['plain'])
    with make(('numeric', 1.0), retries=5) as functions, pytest.raises(ConnectionError):
        judge(functions, ['bad'])
    assert service.calls['bad'] == 1


@pytest.mark.parametrize('kind', ['plain', 'later', 'at_once'])
def test_a_timeout_of_a_judge_is_asked_again_and_then_counts_as_ever(kind):
    service = Service(9, TimeoutError)
    with make((kind, 1.0), functions=service.functions(), retries=2, failed=-0.5) as functions:
        rewarded = judge(functions, ['bad'])
    assert rewarded.rewards.tolist() == [-0.5] and rewarded.failures['expired'].all()
    assert service.calls['bad'] == 3 and rewarded.retried.all() and not rewarded.failures['missing'].any()


def test_a_completion_at_its_deadline_is_not_tried_again():
    calls = []

    async def slow(completion, example):
        calls.append(completion)
        await asyncio.sleep(60)

    with make(('slow', 1.0), functions={'slow': slow}, deadline=0.1, retries=5) as functions:
        rewarded = judge(functions, ['a'])
    assert calls == ['a'] and rewarded.failures['expired'].all()


def test_pauses_grow_to_a_minute(monkeypatch):
    monkeypatch.setattr(scoring, 'FIRST_PAUSE', 1.0)
    assert [scoring.pause_before(retry) for retry in (0, 1, 2, 5, 6, 99)] == [1, 2, 4, 32, 60, 60]


def test_the_gold_self_test_asks_again_and_then_refuses():
    class Judge(Service):
        def ask(self, completion):
            super().ask('bad')
            return float(completion == '1')

    for failing in (2, 9):
        with make(('plain', 1.0), verifier='plain', functions=Judge(failing).functions(), retries=2) as functions:
            if failing == 2:
                gold.check(functions, [example('1')])
            else:
                with pytest.raises(ConnectionError):
                    gold.check(functions, [example('1')])


# what a run makes of it


def step_of(missing, count=20):
    """Rewards of a step in which some completions lack a part."""
    errors = np.array(['judge: HTTPError: 500'] * missing + [''] * (count - missing), object)
    none = np.zeros(count)
    return rewards.Rewards(none, none, none, none, none, {}, {'missing': errors != ''}, none > 0, errors)


def test_some_missing_parts_are_said_and_more_end_the_run(caplog):
    options = make(('numeric', 1.0), most_missing=0.1)
    rewards.check_missing(options, 7, step_of(0))
    assert not caplog.text
    rewards.check_missing(options, 7, step_of(2))
    assert 'step 7: 2 of 20 completions lack a part' in caplog.text and 'judge: HTTPError: 500' in caplog.text
    with pytest.raises(rewards.RewardsMissing, match=r'reward.most_missing = 0.1: step 7: 3 of 20 .*HTTPError: 500'):
        rewards.check_missing(options, 7, step_of(3))


@pytest.mark.parametrize('newest, status', [(None, 2), (3, 47)])
def test_what_fails_in_mid_run_is_no_bad_input(tmp_path, monkeypatch, newest, status):
    monkeypatch.setattr(loop.Shell, 'newest', property(lambda _: newest))
    with pytest.raises(rewards.RewardError) as error, loop.Shell(str(tmp_path), 1):
        raise rewards.RewardError('reward', 'mine.py:judge', 'mine.py, line 3: HTTPError: 500; mend the file')
    assert error.value.status == status


# what hangs


def test_an_event_loop_that_hangs_is_left_behind(monkeypatch):
    monkeypatch.setattr(resources, 'LEAVE_SECONDS', 0.1)
    release, events = threading.Event(), resources.EventLoop()

    async def blocks():
        release.wait(60)

    events.submit(blocks())
    began = time.monotonic()
    events.close()
    assert time.monotonic() - began < 30
    release.set()


@pytest.mark.parametrize('main, status', [('0', 0), ("raise BadInput('a', 'b', 'c')", 2)])
def test_a_command_ends_though_a_thread_hangs(main, status, tmp_path):
    script = f"""
import sys, threading
sys.path[:0] = {sys.path!r}
from absl import flags
from grpo_jax.errors import BadInput
from grpo_jax.run import cli
cli.LEAVE_SECONDS = 0.5
threading.Thread(target=threading.Event().wait).start()
def main():
    {main}
cli.run(main)
"""
    done = subprocess.run([sys.executable, '-c', script], timeout=120, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert 'still runs; the command ends without it' in done.stderr
