"""The page's judge over HTTP, against a server that fails at times."""

import gc
import http.server
import json
import threading
import time

import numpy as np
import pytest
from test_scoring import make

from grpo_jax import rewards
from grpo_jax.rewards import scoring
from grpo_jax.types import Example
from tests import doc_examples

# urllib's HTTPError holds its socket until it is collected
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


class Server(http.server.BaseHTTPRequestHandler):
    """Grades a solution by the number in it; each solution's first `failing[solution]` requests fail in some way."""

    failing, asked, keys, lock = {}, [], set(), threading.Lock()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        text = body['messages'][0]['content']
        solution = text.rpartition('Solution: ')[2]
        assert 'What is 2+2?' in text and body['model'] == 'small'
        with self.lock:
            self.asked.append(solution)
            self.keys.add(self.headers['Authorization'])
            way, times = self.failing.get(solution, ('', 0))
            if self.asked.count(solution) > times:
                way = ''
        if way == 'hangs':
            time.sleep(3)
        if way in ('drops', 'hangs'):
            return
        answer = json.dumps({'choices': [{'message': {'content': solution}}]} if way != 'nonsense' else []).encode()
        self.send_response(500 if way == 'refuses' else 200)
        self.send_header('Content-Length', str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """(FILE.py:NAME of the page's judge, its options for the server)."""
    block = next(b for b in doc_examples.blocks('docs/rewards.md', 'python') if b.mark == 'file: judge.py')
    (tmp_path / 'judge.py').write_text(block.text, encoding='utf8')
    monkeypatch.setenv('JUDGE_KEY', 'secret')
    monkeypatch.setattr(Server, 'asked', [])
    monkeypatch.setattr(scoring, 'FIRST_PAUSE', 0.05)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f'http://127.0.0.1:{server.server_port}/v1/chat/completions'
        yield f'{tmp_path}/judge.py:judge', {'judge': {'url': url, 'model': 'small', 'seconds': 1.0}}
        server.shutdown()
    gc.collect()


def compute(judge, solutions, **changes):
    part, options = judge
    section = {'deadline': 30.0, 'retries': 2} | changes
    with make((part, 1.0), options=options, **section) as functions:
        functions = functions._replace(tolerant=True)
        question, count = Example('What is 2+2?', '4', 0, {}), len(solutions)
        return rewards.compute_rewards(functions, [question], solutions, [False] * count, [1] * count)


def test_a_judge_that_fails_at_times_grades_all(judge, monkeypatch):
    ways = ('refuses', 'drops', 'nonsense', 'hangs')
    monkeypatch.setattr(Server, 'failing', {f'{n} {way}': (way, 1 + n % 2) for n, way in enumerate(ways)})
    solutions = [*Server.failing, *(f'{n}' for n in range(4, 11)), '99', 'none']
    rewarded = compute(judge, solutions)
    np.testing.assert_array_equal(rewarded.rewards, [*np.arange(11) / 10, 1.0, np.nan])
    assert rewarded.retried.tolist() == [True] * 4 + [False] * 9 and not rewarded.failures['missing'].any()
    assert Server.asked.count('0 refuses') == 2 and Server.asked.count('1 drops') == 3
    assert Server.keys == {'Bearer secret'}


def test_what_it_never_grades_is_unknown_and_none_of_the_completions_fault(judge, monkeypatch):
    ways = ('refuses', 'drops', 'nonsense', 'hangs')
    monkeypatch.setattr(Server, 'failing', {f'{n} {way}': (way, 99) for n, way in enumerate(ways)})
    rewarded = compute(judge, [*Server.failing, '5'], retries=1)
    assert rewarded.failures['missing'].tolist() == [True] * 4 + [False]
    np.testing.assert_array_equal(rewarded.rewards, [np.nan] * 4 + [0.5])
    assert not rewarded.failures['expired'].any() and 'HTTP Error 500' in rewarded.errors[0]
    assert all('judge.py, line' in text for text in rewarded.errors[:4])
