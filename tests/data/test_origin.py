"""Which folder or commit a data set is read from, what is said when there is none, and what a run keeps of it."""

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import huggingface_hub.constants as constants
import pytest

from grpo_jax import data, evaluate, supervised, train
from grpo_jax.collect import demonstrations
from grpo_jax.configs import gsm8k
from grpo_jax.errors import BadInput
from grpo_jax.models import hf
from grpo_jax.run.open import open_config, open_split
from grpo_jax.tools import iterate, sweep
from tests import hub_cache as cache
from tests import small_model, tiny_run
from tests.hub_cache import HALVES, NEW, OLD, REPOSITORIES, options, read

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cache.encode('x.jsonl', rows))


MINE = [{'question': 'mine?', 'answer': '#### 1'}]


@pytest.fixture
def gsm8k_hub(hub_cache):
    """A hub whose openai/gsm8k has had two commits; the older one has a tag."""
    files = REPOSITORIES['openai/gsm8k']
    cache.write(hub_cache, 'openai/gsm8k', OLD, files, refs=('v1',))
    cache.write(hub_cache, 'openai/gsm8k', NEW, {name: files[name] for name in files if 'test' in name})
    write = hub_cache / 'datasets--openai--gsm8k' / 'snapshots' / NEW / 'main' / 'train-00000-of-00001.parquet'
    write.write_bytes(cache.encode(write.name, MINE))
    return hub_cache


@pytest.mark.parametrize('name', ['gsm8k_train.jsonl', 'train.jsonl', 'data/train.parquet', 'main/train.jsonl'])
def test_the_users_files_come_first(gsm8k_hub, tmp_path, capfd, name):
    (tmp_path / 'mine' / name).parent.mkdir(parents=True)
    (tmp_path / 'mine' / name).write_bytes(cache.encode(name, MINE))
    located = data.locate(options('gsm8k', 'openai/gsm8k', folder=str(tmp_path / 'mine')))
    assert located.origins == (data.Origin('openai/gsm8k', '', '', str(tmp_path / 'mine')),)
    assert [e.prompt for e in read(located)] == ['mine?']
    line = f'data set gsm8k: files of {tmp_path / "mine"}, and not openai/gsm8k of the hub\n'
    assert capfd.readouterr().err == line


@pytest.mark.parametrize('name', ['', 'math_train.jsonl', 'notes.txt', 'gsm8k'])
def test_a_folder_without_a_file_of_the_data_set_gives_way_to_the_hub_in_one_line(gsm8k_hub, tmp_path, capfd, name):
    folder = tmp_path / 'mine'
    if name:
        folder.mkdir()
        (folder / name).write_text('{}')
    for _ in range(2):
        assert data.locate(options('gsm8k', 'openai/gsm8k', folder=str(folder))).origins[0].commit == NEW
    assert capfd.readouterr().err == (f'data set gsm8k: commit {NEW} of openai/gsm8k, {folder} has no file of it\n')


def test_a_folder_that_lacks_a_split_is_refused_and_not_replaced(gsm8k_hub, tmp_path):
    write_jsonl(tmp_path / 'mine' / 'gsm8k_train.jsonl', MINE)
    located = data.locate(options('gsm8k', 'openai/gsm8k', folder=str(tmp_path / 'mine')))
    with pytest.raises(BadInput, match=r'mine.: holds no gsm8k_test.jsonl .*fetch all of it again'):
        read(located, 'test')


def test_a_damaged_file_of_the_user_is_refused_and_not_replaced(gsm8k_hub, tmp_path):
    (tmp_path / 'train.parquet').write_bytes(b'PAR1 no more')
    with pytest.raises(BadInput, match=r'data file.*train.parquet.*is damaged at row 0'):
        read(data.locate(options('gsm8k', 'openai/gsm8k', folder=str(tmp_path))))


@pytest.mark.parametrize('revision, commit', [('', NEW), ('main', NEW), ('v1', OLD), (OLD, OLD), (NEW, NEW)])
def test_a_revision_is_a_commit_a_tag_or_the_newest(gsm8k_hub, revision, commit):
    located = data.locate(options('gsm8k', 'openai/gsm8k', revision))
    assert located.origins == (data.Origin('openai/gsm8k', revision, commit, ''),)
    assert [e.prompt for e in read(located)] == (['mine?'] if commit == NEW else ['48/2?', '1,000+1?'])


def test_a_pinned_revision_is_read_whatever_the_folder_holds(gsm8k_hub, tmp_path):
    write_jsonl(tmp_path / 'gsm8k_train.jsonl', MINE)
    located = data.locate(options('gsm8k', 'openai/gsm8k', 'v1', folder=str(tmp_path)))
    assert located.origins[0].commit == OLD and read(located)[0].prompt == '48/2?'


def test_what_a_run_began_with_is_read_again_whatever_came_since(gsm8k_hub, tmp_path):
    asked = options('gsm8k', 'openai/gsm8k', folder=str(tmp_path))
    began = [data.Origin('openai/gsm8k', '', OLD, '')]
    assert data.locate(asked, began).origins == tuple(began)  # main is NEW
    write_jsonl(tmp_path / 'gsm8k_train.jsonl', MINE)
    assert data.locate(asked, began).origins == tuple(began)  # and now the folder has files
    local = data.locate(asked).origins
    assert local[0].folder == str(tmp_path) and data.locate(asked, local).origins == local
    (tmp_path / 'gsm8k_train.jsonl').unlink()
    with pytest.raises(BadInput, match='has lost the data that the run began with; bring them back'):
        data.locate(asked, local)
    with pytest.raises(BadInput, match=f'the run began with its commit {"c" * 40}, but .*--revision {"c" * 40}`'):
        data.locate(asked, [data.Origin('openai/gsm8k', '', 'c' * 40, '')])
    # of another path or revision it says nothing
    assert data.locate(asked, [data.Origin('other/gsm8k', '', OLD, '')]).origins[0].commit == NEW


def test_sources_of_a_mixture_have_ids_of_their_own(gsm8k_hub):
    cache.write(gsm8k_hub, 'ChilleD/SVAMP', OLD, REPOSITORIES['ChilleD/SVAMP'])
    sources = [
        {'name': 'gsm8k', 'weight': 1.0, 'options': {}, 'path': 'openai/gsm8k', 'revision': 'v1'},
        {'name': 'svamp', 'weight': 2.0, 'options': {}, 'path': 'ChilleD/SVAMP'},
        {'name': 'tinystories', 'weight': 1.0, 'options': {}},
    ]
    located = data.locate(options('mixture', '', sources=sources))
    assert [(origin.path, origin.commit) for origin in located.origins] == [
        *[('openai/gsm8k', OLD), ('ChilleD/SVAMP', OLD), ('', '')]
    ]
    assert {e.meta['source'] for e in read(located)} == {'gsm8k', 'svamp', 'tinystories'}
    began = [located.origins[0]._replace(commit=NEW), *located.origins[1:]]
    assert data.locate(options('mixture', '', sources=sources), began).origins == tuple(began)
    with pytest.raises(BadInput, match=r'data.path, data.revision = .*: each source of a mixture has its own; leave'):
        data.locate(options('mixture', 'openai/gsm8k', sources=sources))


# what is said


@pytest.mark.parametrize(
    'name, path, revision, changes, words',
    [
        (
            'gsm8k',
            'openai/gsm8k',
            '',
            {},
            ['`hf download openai/gsm8k --repo-type dataset`', 'data.options.folder', 'GRPO_JAX_DATA'],
        ),
        (
            'gsm8k',
            'openai/gsm8k',
            '',
            {'folder': 'no/where'},
            ['no/where has no file', '`hf download openai/gsm8k --repo-type dataset`'],
        ),
        (
            'gsm8k',
            'openai/gsm8k',
            'v1',
            {},
            ['revision v1', '`hf download openai/gsm8k --repo-type dataset --revision v1`'],
        ),
        ('gsm8k', 'gsm8k', '', {}, ["data.path = 'gsm8k'", 'is no id of a data set on the hub', 'data.options.folder']),
        ('gsm8k', '../openai/gsm8k', '', {}, ['is no id of a data set on the hub']),
        ('gsm8k', '', 'v1', {}, ["data.revision = 'v1'", 'data.path']),
        ('arithmetic', 'openai/gsm8k', '', {}, ['arithmetic reads no files']),
        ('gsm9k', 'openai/gsm8k', '', {}, ['data.name', 'gsm9k']),
    ],
)
def test_what_cannot_be_located_is_refused_in_one_line(hub_cache, name, path, revision, changes, words):
    with pytest.raises(BadInput) as error:
        data.locate(options(name, path, revision, **changes))
    message = str(error.value)
    assert all(word in message for word in words) and '\n' not in message, message


def test_a_folder_that_is_not_there_is_refused_without_an_id(hub_cache):
    remedy = 'set data.options.folder or GRPO_JAX_DATA, or data.path'
    with pytest.raises(BadInput, match=rf'no such folder in {os.getcwd()}; go where it is, or {remedy}'):
        read(data.locate(options('gsm8k', '', folder='no/where')))
    with pytest.raises(BadInput, match=rf'no such folder; {remedy}'):
        read(data.locate(options('gsm8k', '', folder='/no/where')))


@pytest.mark.parametrize(
    'name, path, changes, files, split, words',
    [
        ('gsm8k', 'openai/gsm8k', {'subset': 'mian'}, {}, 'train', ['data.options.subset', "'mian'", 'main, socratic']),
        ('gsm8k', 'openai/gsm8k', {}, {}, 'validation', ['holds no gsm8k_validation.jsonl', 'fetch all of it again']),
        ('code', 'openai/openai_humaneval', {'name': 'mbpp'}, {}, 'train', ['holds no mbpp.jsonl', 'openai_humaneval']),
        ('math', 'HuggingFaceH4/MATH-500', {}, {}, 'train', ['holds no math_train.jsonl']),
        ('files', 'openai/gsm8k', {'subset': 'all'}, {}, 'train', ['main, socratic']),
        (
            *('gsm8k', 'openai/gsm8k', {}, {'main/train-00000-of-00001.parquet': b'PAR1 cut'}, 'train'),
            ['main/train-00000-of-00001.parquet', 'is damaged at row 0', 'fetch it again'],
        ),
        (
            *('gsm8k', 'openai/gsm8k', {}, {'main/train-00000-of-00002.parquet': HALVES}, 'train'),
            ['is one of 2 shards, but 1 are there'],
        ),
    ],
)  # fmt: skip
def test_a_snapshot_that_cannot_be_read_is_refused(hub_cache, name, path, changes, files, split, words):
    cache.write(hub_cache, path, OLD, files or REPOSITORIES[path])
    located = data.locate(options(name, path, **changes))
    with pytest.raises(BadInput) as error:
        read(located, split)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_math_without_one_of_its_subjects_is_refused(hub_cache):
    # as `datasets` leaves the cache when it has loaded one configuration
    files = {name: rows for name, rows in REPOSITORIES['EleutherAI/hendrycks_math'].items() if 'geometry' not in name}
    cache.write(hub_cache, 'EleutherAI/hendrycks_math', OLD, files)
    with pytest.raises(BadInput, match=r'geometry.: no such folder'):
        read(data.locate(options('math', 'EleutherAI/hendrycks_math')))


# the hub itself


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The three answers of the hub that its client asks for: the commit of a revision, its files, a file."""

    protocol_version = 'HTTP/1.1'
    repository, revisions, commits, asked = '', {}, {}, []  # of the server at hand, see `online`
    refusal = 404, 'RepoNotFound'

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition('?')[0]
        self.asked.append(path)
        if match := re.fullmatch(f'/api/datasets/{self.repository}/revision/(.+)', path):
            commit = self.revisions.get(match[1])
            return self.answer(commit and json.dumps({'id': self.repository, 'sha': commit, 'siblings': []}).encode())
        if match := re.fullmatch(f'/api/datasets/{self.repository}/tree/(.+)', path):
            tree = [
                {'type': 'file', 'path': name, 'size': len(content), 'oid': hashlib.sha1(content).hexdigest()}
                for name, content in self.commits[match[1]].items()
            ]
            return self.answer(json.dumps(tree).encode())
        if match := re.fullmatch(f'/datasets/{self.repository}/resolve/([a-z]+)/(.+)', path):
            return self.answer(self.commits[match[1]][match[2]], commit=match[1])
        return self.answer(None)

    def answer(self, content, commit=''):
        self.send_response(200 if content else self.refusal[0])
        content = content or b''
        self.send_header('Content-Length', str(len(content)))
        self.send_header('ETag', f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header('X-Error-Code', self.refusal[1])
        self.send_header('X-Repo-Commit', commit)
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def online(hub_cache, monkeypatch):
    """FakeHub with openai/gsm8k, whose main is at OLD, which the hub's client asks."""
    files = {name: cache.encode(name, rows) for name, rows in REPOSITORIES['openai/gsm8k'].items()}
    monkeypatch.setattr(FakeHub, 'repository', 'openai/gsm8k')
    monkeypatch.setattr(FakeHub, 'revisions', {'main': OLD})
    monkeypatch.setattr(
        FakeHub,
        'commits',
        {OLD: files, NEW: files | {'main/train-00000-of-00001.parquet': cache.encode('.parquet', MINE)}},
    )
    monkeypatch.setattr(FakeHub, 'asked', [])
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), FakeHub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f'http://127.0.0.1:{server.server_port}'
        monkeypatch.setattr(constants, 'ENDPOINT', address)
        monkeypatch.setattr(
            constants, 'HUGGINGFACE_CO_URL_TEMPLATE', f'{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}'
        )
        monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
        yield FakeHub
        server.shutdown()


def test_a_data_set_is_fetched_once_and_then_read_without_network(online, hub_cache, monkeypatch, capfd):
    asked = options('gsm8k', 'openai/gsm8k')
    located = data.locate(asked)
    assert capfd.readouterr().err == f'data set gsm8k: commit {OLD} of openai/gsm8k\n'
    assert located.origins[0].commit == OLD and [e.prompt for e in read(located)] == ['48/2?', '1,000+1?']
    snapshot = hub_cache / 'datasets--openai--gsm8k' / 'snapshots' / OLD
    assert sorted(path.name for path in snapshot.iterdir()) == ['main', 'socratic']  # no README.md
    online.asked.clear()
    assert data.locate(options('gsm8k', 'openai/gsm8k', OLD)).options == located.options
    assert online.asked == []
    monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')  # nobody listens there
    assert data.locate(asked) == located


def test_the_newest_is_what_the_hub_says_now_and_the_recorded_one_stays(online):
    asked = options('gsm8k', 'openai/gsm8k')
    began = data.locate(asked).origins
    online.revisions['main'] = NEW
    assert data.locate(asked).origins[0].commit == NEW
    assert data.locate(asked, began).origins == began


def test_a_data_set_that_the_hub_does_not_have_is_refused(online):
    with pytest.raises(BadInput, match='the hub gave RepositoryNotFoundError: get it with `hf download openai/gsm9k '):
        data.locate(options('gsm8k', 'openai/gsm9k'))


@pytest.mark.parametrize('refusal', [(401, 'GatedRepo'), (403, 'GatedRepo'), (401, 'RepoNotFound')])
def test_what_wants_a_token_is_refused_with_where_to_set_it(online, monkeypatch, refusal):
    monkeypatch.setattr(FakeHub, 'refusal', refusal)
    told = 'then set HF_TOKEN to a token that may read it, or run `hf auth login` (on pods launch with --env=HF_TOKEN)'
    for thing, look in [
        ('data.path', lambda: data.locate(options('gsm8k', 'openai/gsm9k'))),
        ('model.path', lambda: hf.find('meta-llama/Llama-9')),
    ]:
        with pytest.raises(BadInput) as error:
            look()
        assert str(error.value).startswith(thing) and told in str(error.value), str(error.value)
    assert 'accept its terms at https://huggingface.co/meta-llama/Llama-9,' in str(error.value)


def test_a_repository_without_data_files_is_refused(online, monkeypatch):
    monkeypatch.setattr(FakeHub, 'commits', {OLD: {'README.md': b'#', 'train.txt': b'q,a'}})
    with pytest.raises(BadInput, match=r'has none of \*.parquet, .* try data.revision=refs/convert/parquet'):
        data.locate(options('gsm8k', 'openai/gsm8k'))


# what a run keeps


SUMS = [{'q': f'{i}+{i}=', 'a': str(2 * i)} for i in range(8)]


def sums(**changes):
    """The tiny run on a data set of the hub."""
    named = {'data__name': 'files', 'data__options': {'prompt_field': 'q', 'answer_field': 'a'}}
    return tiny_run.config(**{'supervised__updates': 0, 'data__path': 'me/sums'} | named | changes)


def publish(folder, commit, rows):
    held_out = [row | {'q': f'0+{row["q"]}'} for row in rows]
    cache.write(folder, 'me/sums', commit, {'train.jsonl': rows, 'test.jsonl': held_out})


def test_a_run_reads_the_commit_that_it_began_with(hub_cache, tmp_path):
    workdir = str(tmp_path / 'run')
    publish(hub_cache, OLD, SUMS)
    tiny_run.record(open_config(sums(), workdir))
    origin = {'path': 'me/sums', 'revision': '', 'commit': OLD, 'folder': ''}
    assert json.loads((tmp_path / 'run' / 'data.json').read_text()) == [origin]
    publish(hub_cache, NEW, SUMS[:3])  # main moves
    assert len(open_split(open_config(sums(), str(tmp_path / 'another')), 'train').examples) == 3
    for run in (open_config(sums(), workdir), evaluate.open_recorded(workdir)):
        assert len(open_split(run, 'train').examples) == len(open_split(run, 'test').examples) == 8
    # another one that is to read the same
    told = open_config(sums(), str(tmp_path / 'cold'), origins=[data.Origin(**origin)])
    assert told.settings.data.origins == (data.Origin(**origin),)
    with pytest.raises(BadInput, match=r"data.revision is '' and not 'main'"):
        tiny_run.read(open_config(sums(data__revision='main'), workdir))


def test_a_run_whose_commit_is_gone_is_refused_and_left_alone(hub_cache, tmp_path):
    workdir = str(tmp_path / 'run')
    publish(hub_cache, OLD, SUMS)
    tiny_run.record(open_config(sums(), workdir))
    before = {path: path.read_bytes() for path in (tmp_path / 'run').rglob('*') if path.is_file()}
    (hub_cache / 'datasets--me--sums' / 'snapshots' / OLD).rename(tmp_path / 'gone')
    publish(hub_cache, NEW, SUMS)
    for again in (lambda: open_config(sums(), workdir), lambda: evaluate.open_recorded(workdir)):
        with pytest.raises(BadInput, match=f'began with its commit {OLD}, .*--repo-type dataset --revision {OLD}`$'):
            again()
    assert before == {path: path.read_bytes() for path in (tmp_path / 'run').rglob('*') if path.is_file()}


def test_pairs_of_the_hub_are_what_dpo_learns_from(hub_cache, tmp_path):
    path = 'trl-lib/ultrafeedback_binarized'
    cache.write(hub_cache, path, OLD, REPOSITORIES[path])
    changes = {'collection__source': 'pairs', 'data__name': 'preferences', 'data__path': path, 'data__options': {}}
    run = open_config(tiny_run.config(preset='dpo', **changes), str(tmp_path / 'run'))
    fields, tokenizer = ('demonstration', 'rejected'), run.model.tokenizer
    dataset, ((chosen, rejected),) = demonstrations.find(
        open_split(run, 'train'), tokenizer, fields, run.settings.data, run.settings.sampling
    )
    assert dataset.examples[0].prompt == 'Why?'
    assert [tokenizer.decode(ids[:-1]) for ids in (chosen, rejected)] == ['So.', 'No.']


def test_a_run_on_made_data_has_no_data_json(tmp_path):
    tiny_run.record(open_config(tiny_run.config(), str(tmp_path)))
    assert not (tmp_path / 'data.json').exists()


def test_a_cold_start_reads_what_its_run_reads(hub_cache, tmp_path, monkeypatch):
    publish(hub_cache, OLD, SUMS)
    run = open_config(sums(supervised__updates=1), str(tmp_path / 'run'))
    train_split, arguments = open_split(run, 'train'), []
    monkeypatch.setattr(supervised, 'run', lambda *given: arguments.append(given) or SimpleNamespace(params=None))
    supervised.cold_start(run, train_split)
    cold_start = str(tmp_path / 'run' / 'cold_start')
    settings = run.settings
    assert arguments == [(settings.config, cold_start, settings.data.origins, None, None, train_split, None)]


def test_every_run_of_a_sweep_reads_one_commit(hub_cache, tmp_path, monkeypatch):
    publish(hub_cache, OLD, SUMS)
    commits = []

    def run(config, workdir):
        commits.append(open_config(config, workdir).settings.data.origins[0].commit)
        if len(commits) == 1:
            publish(hub_cache, NEW, SUMS)
        raise BadInput('steps', 0, 'enough is known')

    monkeypatch.setattr(train, 'run', run)
    for _ in range(2):
        sweep.run(lambda preset: sums(preset=preset), ['grpo', 'dr_grpo'], 1, str(tmp_path / 'sweep'))
    assert commits == [OLD] * 4


def test_the_reward_model_of_an_iteration_reads_rollouts_alone():
    config = iterate.reward_model_config(sums(), 0, 'model', ['rollouts'])
    assert (config.data.name, config.data.path, config.data.revision) == ('mixture', '', '')


# by id in an empty folder


def small():
    """configs/gsm8k.py:dapo, a step of it, for a tiny model."""
    config = gsm8k.get_config('dapo')
    config.steps, config.evaluation.every, config.evaluation.prompts, config.evaluation.samples = 1, 0, 2, 2
    config.model.random_init, config.model.dtype = True, 'float32'
    config.data.options.folder, config.data.max_prompt_tokens = 'data/math', 16
    config.data.chat, config.data.template = False, '{prompt}'
    config.data.prompts_per_step, config.rollout.group_size, config.rollout.max_tokens = 2, 2, 8
    config.learner.microbatches, config.learner.remat, config.reward.self_test = 1, 'none', 0.0
    config.collection.max_draws = 1
    return config


def test_an_experiment_runs_on_nothing_but_the_cache_of_the_hub(hub_cache, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = small_model.write(tmp_path / 'model')
    held_out = [row | {'question': f'Now: {row["question"]}'} for row in HALVES]
    rows = {'main/train-00000-of-00001.parquet': HALVES, 'main/test-00000-of-00001.parquet': held_out}
    cache.write(hub_cache, 'openai/gsm8k', OLD, rows)
    files = {name: (tmp_path / 'model' / name).read_bytes() for name in os.listdir(model)}
    cache.write(hub_cache, 'Qwen/Qwen3-0.6B', NEW, files, kind='model')
    train.run(small(), 'run')
    lines = capfd.readouterr().err.splitlines()
    assert f'data set gsm8k: commit {OLD} of openai/gsm8k, data/math has no file of it' in lines
    assert f'model Qwen/Qwen3-0.6B: commit {NEW} of the hub' in lines
    content, _ = evaluate.open_report(evaluate.open_subject(None, 'run'), 1, 'test')
    assert [origin['commit'] for origin in content['origins']] == [OLD]


def test_without_hub_or_folder_a_command_says_in_one_line_how_to_get_the_data(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != 'GRPO_JAX_DATA'}
    done = subprocess.run(
        [sys.executable, '-m', 'grpo_jax.train', f'--config={ROOT}/configs/gsm8k.py:dapo', '--workdir=run'],
        cwd=tmp_path,
        env=environment | {'HF_HOME': str(tmp_path / 'hf'), 'HF_HUB_OFFLINE': '1', 'PYTHONPATH': ROOT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ''
    line, *others = done.stderr.splitlines()  # the model is not there either
    assert all(other.startswith('error: model.path') for other in others), done.stderr
    assert line.startswith("error: data.path = 'openai/gsm8k': data/math has no file of the data set gsm8k, ")
    assert '`hf download openai/gsm8k --repo-type dataset`' in line
    assert os.listdir(tmp_path) == []


def test_a_model_that_the_hub_does_not_give_is_refused_with_its_command(hub_cache):
    with pytest.raises(
        BadInput, match=r'no such folder, and the hub.s cache .* `hf download Qwen/Qwen3-0.6B`, or give'
    ):
        hf.find('Qwen/Qwen3-0.6B')
