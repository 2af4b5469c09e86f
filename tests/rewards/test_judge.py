"""A judge over HTTP: what a service that fails costs, what is stored, and what is refused before a run."""

import http.server
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_scoring import make

from grpo_jax import rewards
from grpo_jax.configs import gsm8k_judge
from grpo_jax.errors import BadInput
from grpo_jax.rewards import gold, judge, remote, scoring
from grpo_jax.rewards.scoring import Refused
from grpo_jax.rewards.verdicts import Store
from grpo_jax.types import Example
from tests import doc_examples
from tests.fake_service import serving

RUBRIC = 'Grade it.\nProblem: {prompt}\nSolution: {completion}'
QUESTION = Example('What is 2+2?', '4', 7, {'hint': 'sum', 'level': 3})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(scoring, 'FIRST_PAUSE', 0.02)
    monkeypatch.setenv('JUDGE_KEY', 'sk-secret')
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')


def build(service, folder, name='judge', part=None, **options):
    section = {'url': service.url, 'model': 'small', 'key': 'JUDGE_KEY', 'timeout': 30.0} | options
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
    with serving(together=64) as service, build(service, tmp_path, timeout=60.0, prices=(2.0, 4.0)) as functions:
        rewarded = ask(functions, [*texts, *texts])
        told = counts(functions)
        assert (told['calls'], told['retries'], told['cost']) == (256, 0, pytest.approx(256 * 4e-3))
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
    'break': (True, False, 3),
    'drip': (True, False, 3),
    'drip_headers': (True, False, 3),
    'flood': (False, True, 1),
    'status 500': (True, False, 3),
    'status 429': (True, False, 3),
    'status 429 0': (True, False, 3),
    'status 429 9999': (True, False, 1),
    'status 503 Fri, 31 Dec 2100 23:59:59 GMT': (True, False, 3),
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
    with serving(ways) as service, build(service, tmp_path, retries=2, timeout=1.0, deadline=60.0) as functions:
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
    assert 'gave no answer in 1 s' in rewarded.errors[0] and 'status 500' in rewarded.errors[7]


def test_a_server_that_comes_back_costs_time_alone(tmp_path):
    ways = {'1': ['drop'], '2': ['hang', 'status 500'], '3': ['status 429 0.2'], '4': ['die', 'drip']}
    with serving(ways) as service, build(service, tmp_path, timeout=2.0) as functions:
        rewarded = ask(functions, [*ways])
    np.testing.assert_allclose(rewarded.rewards, [0.1, 0.2, 0.3, 0.4])
    assert not rewarded.failures['missing'].any() and service.asked == {'1': 2, '2': 3, '3': 2, '4': 3}


def test_no_completion_waits_longer_than_the_deadline(tmp_path):
    began = time.monotonic()
    with (
        serving(default='hang') as service,
        build(service, tmp_path, at_once=4, timeout=60.0, deadline=1.0) as functions,
    ):
        rewarded = ask(functions, [f'{n}' for n in range(40)])
    assert rewarded.failures['missing'].all() and time.monotonic() - began < 10
    assert 'gave no answer within 1 s' in rewarded.errors[0]


# how a verdict is read

READ = [
    ('number', '7', 0.7),
    ('number', 'It adds well.\n\n**Score: 7/10**', 0.7),
    ('number', '<think>surely 9</think>Rating = 3.5.', 0.35),
    ('number', '\\boxed{10}', 1.0),
    ('number', '[[4]]', 0.4),
    ('number', '7/20', None),
    ('number', '-1', None),
    ('number', '10.5', None),
    ('number', 'nan', None),
    ('number', 'yes', None),
    ('number', '7\nBut step 3 is wrong.', None),
    ('number', 'Score: 7 or 8', None),
    ('number', '', None),
    ('yes_no', 'Correct: yes', 1.0),
    ('yes_no', 'It is not.\nNo.', 0.0),
    ('yes_no', 'yes and no', None),
    ('yes_no', '1', None),
    ('json', 'Here:\n```json\n{"why": "{}", "score": 7}\n```', 0.7),
    ('json', '{"score": true}', 1.0),
    ('json', '{"score": "7"}', None),
    ('json', '{"score": NaN}', None),
    ('json', '{"score": 1' + '0' * 400 + '}', None),
    ('json', '{"grade": 7}', None),
    ('json', '[7]', None),
    ('json', '{"score": 7} {"score": 8}', None),
]


@pytest.mark.parametrize('kind, answer, expected', READ)
def test_a_verdict_is_read_or_refused(kind, answer, expected):
    if expected is None:
        with pytest.raises(Refused, match='no verdict'):
            judge.read_verdict(answer, judge.Judging(verdict=kind))
    else:
        assert judge.read_verdict(answer, judge.Judging(verdict=kind)) == pytest.approx(expected)


def test_a_rubric_gets_texts_and_columns_and_nothing_in_them_is_a_place():
    example = QUESTION._replace(messages=({'role': 'user', 'content': 'Hi {answer}'}, {'role': 'user', 'content': 'x'}))
    text = judge.fill('{prompt}|{completion}|{answer}|{level}|{"a": 1}', '{hint}', example)
    assert text == 'user: Hi {answer}\n\nuser: x|{hint}|4|3|{"a": 1}'
    with pytest.raises(BadInput, match=r'names promt, and example 7 has answer, completion, hint, level, prompt'):
        judge.fill('{promt}', '', example)


def test_the_request_has_a_system_message_and_the_users_fields(tmp_path):
    changes = {'system': 'Be strict.', 'body': '{"max_tokens": null, "max_completion_tokens": 9, "seed": 1}'}
    with serving() as service, build(service, tmp_path, temperature=0.5, key=None, **changes) as functions:
        assert ask(functions, ['5']).rewards.tolist() == [0.5]
    (body,) = service.bodies
    assert body['messages'][0] == {'role': 'system', 'content': 'Be strict.'} and service.keys == {None}
    assert {name: value for name, value in body.items() if name != 'messages'} == {
        **{'model': 'small', 'temperature': 0.5, 'max_completion_tokens': 9, 'seed': 1}
    }


# what is stored


def test_an_answered_request_is_asked_by_no_run_again(tmp_path):
    store, first, second = tmp_path / 'shared.jsonl', tmp_path / 'a', tmp_path / 'b'
    ways = {'6': ['status 400'], '7': ['says perhaps']}
    with serving(ways) as service:
        for folder in (first, second, tmp_path / 'absent'):
            if folder.name != 'absent':
                folder.mkdir()
            with build(service, folder, store=str(store)) as functions:
                rewarded = ask(functions, ['5', '6', '7'])
                np.testing.assert_array_equal(rewarded.rewards, [0.5, -0.25, -0.25])
                assert counts(functions)['stored'] == (0 if folder == first else 3)
        assert set(service.asked.values()) == {1}
        with build(service, first, store=str(store), temperature=0.1) as functions:  # another request
            assert ask(functions, ['5', '6']).rewards.tolist() == [0.5, 0.6]
    records = [json.loads(line) for line in store.read_text().splitlines()]
    assert len({record['key'] for record in records}) == len(records) == 5
    first_answer = next(record for record in records if 'Score: 5' in record.get('answer', ''))
    assert first_answer == {
        **{'key': first_answer['key'], 'service': 'small', 'rubric': first_answer['rubric'], 'temperature': 0.0},
        **{'id': 7, 'answer': 'Reasoned.\nScore: 5', 'cost': 0.0},
    }
    assert len(records[0]['rubric']) == 16 and not os.listdir(second)


def test_what_a_step_has_missed_is_missed_again_and_no_other_step_misses_it(tmp_path):
    with serving(default='status 500') as service:
        with build(service, tmp_path, retries=0, part={'most_missing': 0.9}) as functions:
            rewarded = ask(functions, ['5', '6'])
            assert rewarded.failures['missing'].all()
            with pytest.raises(rewards.RewardsMissing, match='step 3: 2 of 2 completions lack a part'):
                rewards.check_missing(functions, 3, rewarded)
        service.default = 'grade'
        with build(service, tmp_path) as functions:  # the step was not learned from
            rewarded = ask(functions, ['5', '6'])
            assert rewarded.rewards.tolist() == [0.5, 0.6]
        service.default = 'status 500'
        with build(service, tmp_path, retries=0, part={'most_missing': 0.9}) as functions:
            rewarded = ask(functions, ['5', '8'])
            rewards.check_missing(functions, 3, rewarded)
        service.default = 'grade'
        with build(service, tmp_path, retries=0) as functions:
            again = ask(functions, ['5', '8'])
            np.testing.assert_array_equal(again.rewards, rewarded.rewards)
            assert again.errors.tolist() == rewarded.errors.tolist() and 'status 500' in again.errors[1]
            assert ask(functions, ['8'], step=4).rewards.tolist() == [0.8]


def test_outside_of_later_steps_nothing_may_be_missing(tmp_path):
    with serving(default='status 503') as service, build(service, tmp_path, retries=0) as functions:
        for step in (None, 0):
            with pytest.raises(remote.Outage, match=r'^reward.options.judge.url = .*status 503.*the same command goes'):
                ask(functions, ['5'], step=step)


def test_a_store_outlives_torn_lines_and_keeps_the_first_of_a_key(tmp_path):
    path = tmp_path / 'verdicts.jsonl'
    first, second = Store(str(path)), Store(str(path))
    assert first.put('a', {'answer': 1, 'cost': 2.0}) == first.get('a') == second.get('a')
    assert second.put('a', {'answer': 9})['answer'] == 1
    with open(path, 'ab') as file:
        file.write(b'{"key": "torn", "ans')  # killed here
    assert first.get('torn') is None and second.put('b', {'answer': 2, 'cost': 0.5})['answer'] == 2
    assert first.get('b')['answer'] == 2 and first.get('torn') is None and first.count == 2 and first.cost == 2.5
    path.write_bytes(path.read_bytes() + b'[]\n{"key": 1}\n\xff\n{"key": "c", "cost": "x"}\n')
    assert first.count == 2 and first.get('c') is None and Store(str(path)).get('b')['answer'] == 2
    path.unlink()
    assert first.get('a') is None and first.put('a', {'answer': 3})['answer'] == 3 == second.get('a')['answer']


def test_a_store_without_a_folder_waits_for_it(tmp_path):
    path = tmp_path / 'run' / 'verdicts.jsonl'
    store = Store(str(path))
    store.put('a', {'answer': 1, 'cost': 1.0})
    assert store.get('a') == {'answer': 1, 'cost': 1.0} and store.cost == store.count == 1 and not path.exists()
    path.parent.mkdir()
    store.put('b', {'answer': 2})
    assert [Store(str(path)).get(key)['answer'] for key in 'ab'] == [1, 2]


WRITER = """
import sys
from grpo_jax.rewards.verdicts import Store
store, process = Store(sys.argv[1]), int(sys.argv[2])
print('begun', flush=True)
for n in range(10**6):
    record = store.put(f'{n}', {'answer': [process, 'x' * (n % 5000)]})
    print(n, record['answer'][0], flush=True)
"""


def test_processes_that_share_a_store_and_are_killed_have_one_verdict_for_a_key(tmp_path):
    path = str(tmp_path / 'verdicts.jsonl')
    command = [sys.executable, '-c', WRITER, path]
    for life in range(2):
        writers = [
            subprocess.Popen([*command, f'{life}{n}'], stdout=subprocess.PIPE, text=True, env=os.environ)
            for n in (1, 2)
        ]
        for writer in writers:
            assert writer.stdout.readline() == 'begun\n'
        time.sleep(0.7)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
        seen = [dict(map(str.split, writer.communicate()[0].splitlines()[:-1])) for writer in writers]
        store, common = Store(path), set(seen[0]) & set(seen[1])
        assert len(common) > 50
        for each in seen:
            assert all(str(store.get(n)['answer'][0]) == process for n, process in each.items())


# budgets


def test_a_budget_of_calls_is_never_exceeded_and_the_verdicts_remain(tmp_path):
    with serving(seconds=0.02) as service:
        with build(service, tmp_path, most_calls=20) as functions, pytest.raises(BadInput) as error:
            ask(functions, [f'{n}' for n in range(10)] * 3 + [f'{n % 10} {n}' for n in range(40)])
        assert str(error.value).startswith('reward.options.judge.most_calls = 20: is spent by the verdicts in ')
        assert sum(service.asked.values()) <= 20 and not isinstance(error.value, rewards.RewardError)
        with build(service, tmp_path, most_calls=20) as functions:
            assert ask(functions, [f'{n}' for n in range(10)]).rewards.tolist() == [n / 10 for n in range(10)]
            assert counts(functions)['calls'] == 0


def test_a_budget_of_cost_ends_the_run_when_it_is_spent(tmp_path):
    with serving() as service:
        prices = {'prices': (1.0, 2.0), 'most_cost': 0.0055, 'at_once': 1}  # 0.002 a verdict
        with build(service, tmp_path, **prices) as functions, pytest.raises(BadInput, match=r'most_cost = 0\.0055'):
            ask(functions, [f'{n}' for n in range(10)])
    assert sum(service.asked.values()) == 3


# what is refused before a run

REFUSED = {
    'url': ({'url': ''}, r"judge.url = '': is no address of a service"),
    'scheme': ({'url': 'ftp://a/b'}, r"judge.url = 'ftp://a/b': is no address"),
    'port': ({'url': 'http://a:port/b'}, r'judge.url = .*is no address'),
    'password': ({'url': 'https://me:hunter2@host/v1'}, r'judge.url has a password; put it in a variable'),
    'key': ({'key': 'sk-secret'}, r'judge.key is no name; name the variable'),
    'rubric': ({'rubric': 'Grade {prompt}'}, r'judge.rubric = .*must have \{completion\}'),
    'store': ({'store': '/nowhere/at/all.jsonl'}, r'judge.store = .*lies in a folder that does not exist'),
    'labels': ({'labels': '/nowhere.jsonl'}, r'judge.labels = .*is no file'),
    'range': ({'low': 10.0}, r'judge.low = 10.0: must be below high'),
    'body': ({'body': '[]'}, r'judge.body = .*must be a JSON object'),
    'kind': ({'verdict': 'words'}, r'judge.verdict = .*number, json or yes_no'),
    'unknown': ({'modle': 'x'}, r"judge.modle = 'x': is no key; did you mean model\?"),
}


@pytest.mark.parametrize('name', REFUSED)
def test_options_that_cannot_work_are_refused_when_the_rewards_are_built(name, tmp_path):
    options, message = REFUSED[name]
    with serving() as service, pytest.raises(BadInput, match=message) as error:
        build(service, tmp_path, **options)
    assert 'hunter2' not in str(error.value) and 'sk-secret' not in str(error.value)


@pytest.mark.parametrize('value', [None, '', ' ', 'two\nlines', 'schlüssel'])
def test_a_run_without_the_key_is_refused_and_says_no_key(value, tmp_path, monkeypatch):
    if value is None:
        monkeypatch.delenv('JUDGE_KEY')
    else:
        monkeypatch.setenv('JUDGE_KEY', value)
    with serving() as service, build(service, tmp_path) as functions:
        with pytest.raises(BadInput, match=r'^reward.options.judge.key names no variable') as error:
            gold.try_out(functions, [QUESTION])
    assert not service.asked and not (value and value.strip() and value in str(error.value))


def test_a_whole_header_may_stand_in_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv('JUDGE_KEY', 'Basic bWU6aHVudGVyMg==')
    with serving({'5': ['status 401']}) as service, build(service, tmp_path) as functions:
        with pytest.raises(remote.Outage) as error:
            gold.try_out(functions, [QUESTION._replace(answer='5')])
    assert service.keys == {'Basic bWU6aHVudGVyMg=='} and 'bWU6' not in str(error.value)
    assert 'status 401' in str(error.value)


@pytest.mark.parametrize('way', ['status 400', 'says well done', 'status 404', 'redirect', 'status 500'])
def test_the_first_call_before_a_run_must_give_a_verdict(way, tmp_path):
    with serving(default=way) as service, build(service, tmp_path, retries=0) as functions:
        with pytest.raises(BadInput, match='judge'):
            gold.try_out(functions, [QUESTION])
    with serving() as service, build(service, tmp_path / 'other') as functions:
        assert gold.try_out(functions, [QUESTION]) and service.asked == {'4': 1}


def test_no_service_is_refused_before_a_run(tmp_path):
    with serving() as service:
        pass
    with build(service, tmp_path, retries=0) as functions, pytest.raises(BadInput, match=r'cannot be asked .*Connect'):
        gold.try_out(functions, [QUESTION])


# labelled rows


def labelled(path, rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(path)


def test_a_judge_is_tested_on_labelled_rows_before_a_run(tmp_path, capsys):
    rows = [{'prompt': 'p', 'completion': f'{9 if n % 2 else 1} {n}', 'label': n % 2 == 1} for n in range(20)]
    wrong = [{'prompt': 'p', 'completion': f'2 wrong {n}', 'label': 1, 'level': 2} for n in range(4)]
    mute = [{'prompt': 'p', 'completion': '5 mute', 'label': 0.5}]
    path = labelled(tmp_path / 'labels.jsonl', rows + wrong + mute)
    options = {'labels': path, 'prices': (1.0, 0.0)}
    with serving({'5 mute': ['says nothing']}) as service:
        with build(service, tmp_path, agreement=0.7, **options) as functions:
            gold.check(functions, [QUESTION])
            assert (
                'self-test of judge: agrees with 80.0% of 25 labelled rows (59.4% to 91.6% at 95 %), mean error 0.217, '
                '1 without a verdict; it has cost 0.025, and 1,000 verdicts cost 1\n'
            ) in capsys.readouterr().out
        with build(service, tmp_path, **{**options, 'agreement': 0.9}) as functions:
            with pytest.raises(
                BadInput, match=r'judge.agreement = 0.9: is more than the 80.0% of .*line 25 is 0.5, and'
            ):
                gold.check(functions, [QUESTION])
    assert set(service.asked.values()) == {1}


def test_labelled_rows_that_cannot_be_read_are_refused(tmp_path):
    path = labelled(tmp_path / 'labels.jsonl', [{'prompt': 'p', 'completion': '1', 'label': 0}, {'prompt': 'p'}])
    with serving() as service, build(service, tmp_path, labels=path) as functions:
        with pytest.raises(BadInput, match='line 2 has no prompt, completion and label'):
            gold.check(functions, [QUESTION])
        labelled(tmp_path / 'labels.jsonl', [])
        with pytest.raises(BadInput, match=r'labels\.jsonl.*has no rows'):
            gold.check(functions, [QUESTION])


# a service of rewards


def test_a_service_of_rewards_gets_batches_with_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, 'GATHERING_SECONDS', 1.0)
    texts = [f'{n}' for n in range(10)] + ['null']
    with serving() as service, build(service, tmp_path, 'http', batch=4, price=0.5, model=None) as functions:
        rewarded = ask(functions, texts)
        told = counts(functions)
    np.testing.assert_array_equal(rewarded.rewards, [*range(10), np.nan])
    assert sorted(len(body['ids']) for body in service.bodies) == [3, 4, 4]
    assert told == {'calls': 3, 'stored': 0, 'retries': 0, 'cost': 5.5}
    body = service.bodies[0]
    assert body == {
        **{'prompts': ['What is 2+2?'] * 4, 'answers': ['4'] * 4, 'ids': [7] * 4, 'hint': ['sum'] * 4},
        **{'level': [3] * 4, 'completions': body['completions']},
    }


def test_of_a_refused_batch_each_is_asked_alone(tmp_path):
    ways = {
        '3': ['status 400', 'status 400'],
        '6': ['raw {"rewards": [1, 2]}'] * 3,
        '8': ['raw {"rewards": [NaN]}'] * 9,
    }
    with serving(ways) as service, build(service, tmp_path, 'http', batch=4, retries=0) as functions:
        rewarded = ask(functions, [f'{n}' for n in range(10)])
    refused = [3, 6, 8]
    assert np.flatnonzero(rewarded.failures['refused']).tolist() == refused
    assert rewarded.rewards.tolist() == [-0.25 if n in refused else n for n in range(10)]


def test_two_services_of_rewards_do_not_share_verdicts(tmp_path):
    for way, expected in ((None, 5.0), ('raw {"rewards": [2]}', 2.0)):
        with serving(default=way or 'grade') as service:
            with build(service, tmp_path, 'http', model=None, store=str(tmp_path / 's.jsonl')) as functions:
                assert ask(functions, ['5']).rewards.tolist() == [expected]


def test_the_pages_service_of_rewards_is_asked(tmp_path):
    block = next(b for b in doc_examples.blocks('docs/rewards.md', 'python') if b.mark == 'file: reward_server.py')
    (tmp_path / 'reward_server.py').write_text(block.text, encoding='utf8')
    handler = runpy.run_path(str(tmp_path / 'reward_server.py'))['Rewards']
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as service:
        threading.Thread(target=service.serve_forever, args=[0.02], daemon=True).start()
        service.url = f'http://127.0.0.1:{service.server_port}/'
        with build(service, tmp_path, 'http', key=None) as functions:
            assert ask(functions, ['it is 4', 'it is 5']).rewards.tolist() == [1.0, 0.0]
        service.shutdown()


def test_the_recipe_judges_by_its_rubric(tmp_path):
    config = gsm8k_judge.get_config()
    options = dict(config.reward.options.judge) | {'key': 'JUDGE_KEY'}
    for way, expected in (('says Step 2 is wrong.\n\nScore: 5', 0.5), ('says Score: 0', 0.0)):
        with serving(default=way) as service:
            with build(service, tmp_path / way, **options | {'url': service.url}) as functions:
                assert ask(functions, ['2+2=4\n#### 4']).rewards.tolist() == [expected]
    (body,) = service.bodies
    text = body['messages'][0]['content']
    assert 'Problem:\nWhat is 2+2?\n' in text and 'solution begins\n2+2=4\n#### 4\n----' in text and '{' not in text
