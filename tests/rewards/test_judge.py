"""A judge over HTTP: what a service that fails costs, what is stored, and what is refused before a run."""

import json

import numpy as np
import pytest
from test_scoring import make

from grpo_jax import rewards
from grpo_jax.rewards import remote
from grpo_jax.types import Example
from tests.fake_service import serving

RUBRIC = 'Grade it.\nProblem: {prompt}\nSolution: {completion}'
QUESTION = Example('What is 2+2?', '4', 7, {'hint': 'sum', 'level': 3})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, 'FIRST_PAUSE', 0.02)
    monkeypatch.setenv('JUDGE_KEY', 'sk-secret')
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')


def build(service, folder, name='judge', part=None, **options):
    section = {'url': service.url, 'model': 'small', 'key': 'JUDGE_KEY', 'timeout': 1.0} | options
    section |= {'rubric': RUBRIC} if name == 'judge' and 'rubric' not in options else {}
    section = {key: value for key, value in section.items() if value is not None}
    part = {'deadline': 0.001, 'failed': -0.25} | (part or {})
    return make((name, 1.0), options={name: section}, workdir=str(folder), **part)


def ask(functions, texts, step=3, examples=None):
    none = np.zeros(len(texts), bool)
    return rewards.compute_rewards(functions._replace(step=step), examples or [QUESTION], texts, none, none * 1)


def counts(functions):
    return {name.partition('/')[2]: value for name, value in rewards.service_counts(functions).items()}


def test_64_are_asked_at_once_and_equal_ones_once(tmp_path):
    texts = [f'{n % 11} {n}' for n in range(256)]
    with serving(seconds=0.1) as service, build(service, tmp_path, prices=(2.0, 4.0)) as functions:
        rewarded = ask(functions, [*texts, *texts])
        assert counts(functions) == {'calls': 256, 'stored': 0, 'retries': 0, 'cost': pytest.approx(256 * 4e-3)}
    np.testing.assert_allclose(rewarded.rewards, [n % 11 / 10 for n in range(256)] * 2)
    assert service.most == 64 and set(service.asked.values()) == {1}
    assert service.keys == {'Bearer sk-secret'}
    body = service.bodies[0]
    assert body['model'] == 'small' and body['temperature'] == 0 and body['max_tokens'] == 512
    assert body['messages'][0]['content'].startswith('Grade it.\nProblem: What is 2+2?\nSolution: ')


# way of a server -> (missing, refused), asked how often
FAILURES = {
    'hang': (True, False, 3),
    'drop': (True, False, 3),
    'die': (True, False, 3),
    'drip': (True, False, 3),
    'drip_headers': (True, False, 3),
    'flood': (False, True, 1),
    'status 500': (True, False, 3),
    'status 429': (True, False, 3),
    'status 429 0': (True, False, 3),
    'status 429 9999': (True, False, 1),
    'status 503 Fri, 31 Dec 2100 23:59:59 GMT': (True, False, 1),
    'status 401': (True, False, 1),
    'status 404': (True, False, 1),
    'redirect': (True, False, 1),
    'status 400': (False, True, 1),
    'status 413': (False, True, 1),
    'raw rubbish': (False, True, 1),
    'raw []': (False, True, 1),
    'raw {"choices": []}': (False, True, 1),
    'raw {"choices": [{"message": {"content": null}}]}': (False, True, 1),
    'raw {"choices": [{"message": {"content": "7"}, "finish_reason": "length"}]}': (False, True, 1),
    f'raw {"[" * 100_000}': (False, True, 1),
    'says no number': (False, True, 1),
    'says 11': (False, True, 1),
    'says I give 7 as step 3 is wrong': (False, True, 1),
}


def test_a_server_that_fails_is_counted_and_bounded_and_the_rest_is_judged(tmp_path):
    ways = {f'{n % 10} {way[:30]}': [way] * 9 for n, way in enumerate(FAILURES)}
    texts = [*ways, '5']
    with serving(ways) as service, build(service, tmp_path, retries=2, timeout=0.5, deadline=20.0) as functions:
        rewarded = ask(functions, texts)
        retried = counts(functions)['retries']
    missing, refused, asked = zip(*FAILURES.values(), strict=True)
    assert rewarded.failures['missing'].tolist() == [*missing, False]
    assert rewarded.failures['refused'].tolist() == [*refused, False]
    assert not rewarded.failures['expired'].any() and not rewarded.retried.any()
    expected = [np.nan if gone else -0.25 for gone in missing]
    np.testing.assert_array_equal(rewarded.rewards, [*expected, 0.5])
    assert [service.asked[text] for text in texts] == [*asked, 1] and retried == sum(asked) - len(asked)
    assert service.flooded < 32 * 2**20 and service.paths == {'/v1/chat/completions'}
    assert 'sk-secret' not in ' '.join(rewarded.errors) + (tmp_path / 'verdicts.jsonl').read_text()
    assert 'gave no answer in 0.5 s' in rewarded.errors[0] and 'status 500' in rewarded.errors[6]


def test_a_server_that_comes_back_costs_time_alone(tmp_path):
    ways = {'1': ['drop'], '2': ['hang', 'status 500'], '3': ['status 429 0.2'], '4': ['die', 'drip']}
    with serving(ways) as service, build(service, tmp_path, timeout=0.5) as functions:
        rewarded = ask(functions, [*ways])
    np.testing.assert_allclose(rewarded.rewards, [0.1, 0.2, 0.3, 0.4])
    assert not rewarded.failures['missing'].any() and service.asked == {'1': 2, '2': 3, '3': 2, '4': 3}


def test_no_completion_waits_longer_than_the_deadline(tmp_path):
    import time

    began = time.monotonic()
    with (
        serving(default='hang') as service,
        build(service, tmp_path, at_once=4, timeout=60.0, deadline=1.0) as functions,
    ):
        rewarded = ask(functions, [f'{n}' for n in range(40)])
    assert rewarded.failures['missing'].all() and time.monotonic() - began < 10
    assert service.most <= 4 and 'gave no answer within 1 s' in rewarded.errors[0]
