"""The card of an exported model, and its upload to a hub that stands in for the real one."""

import json
import os

import huggingface_hub
import huggingface_hub.constants as constants
import pytest
import yaml

from grpo_jax.configs import arithmetic, gsm8k
from grpo_jax.errors import BadInput
from grpo_jax.hosts import hub
from grpo_jax.tools import export

COMMIT = 'c' * 40


@pytest.fixture
def workdir(tmp_path):
    """The files of a run on GSM8K, written by hand."""
    folder = tmp_path / 'run'
    folder.mkdir()
    config = gsm8k.get_config()
    config.model.path, config.optimizer.learning_rate, config.seed = 'Qwen/Qwen3-0.6B', 0.25, 7
    config.data.options.folder = '/home/me/secret/math'
    config.reward.parts = (('/home/me/secret/mine.py', 1.0),)
    write(folder / 'config.json', json.loads(config.to_json()))
    origin = {'path': 'openai/gsm8k', 'revision': '', 'commit': COMMIT, 'folder': '', 'digest': ''}
    write(folder / 'data.json', [origin])
    write(folder / 'programs.json', {'update': '0123456789abcdef'})
    environment = {'command': 'python /home/me/secret/x', 'python': '3.11.7', 'packages': {'jax': '0.10.2'}}
    devices = {'count': 8, 'kind': 'TPU v5e'}
    write(folder / 'environment.json', [{}, environment | {'code': {'version': '0.1.0'}, 'devices': devices}])
    rows = [{'step': step, 'pass@1': step / 100, 'greedy/length': 3.0} for step in (0, 10, 20)]
    (folder / 'evaluations.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n{"step": 30, "pa', encoding='utf8')
    figures = {'pass@1': {'mean': 0.25, 'low': 0.2, 'high': 0.31}}
    content = {'prompts': 100, 'split': 'test', 'samples': 4, 'model': {'step': 10}, 'figures': figures}
    write(folder / 'evaluation.json', content)
    return folder


def write(path, value):
    path.write_text(json.dumps(value), encoding='utf8')


def card(workdir, tmp_path, step=10, name='me/mine', adapter=False):
    """(the YAML at the head, the text) of the card."""
    export.write_card(str(tmp_path), str(workdir), step, name, adapter)
    text = (tmp_path / 'README.md').read_text(encoding='utf8')
    _, head, body = text.split('---\n', 2)
    return yaml.safe_load(head), body


def test_the_head_of_a_card_is_what_the_hub_reads(workdir, tmp_path):
    head, _ = card(workdir, tmp_path)
    assert head == {
        'base_model': 'Qwen/Qwen3-0.6B',
        'library_name': 'transformers',
        'pipeline_tag': 'text-generation',
        'tags': ['grpo', 'reinforcement-learning', 'grpo_jax'],
        'datasets': ['openai/gsm8k'],
    }
    assert huggingface_hub.ModelCard.load(tmp_path / 'README.md').data.base_model == 'Qwen/Qwen3-0.6B'


@pytest.mark.parametrize(('path', 'whole'), [('Qwen/Qwen3-0.6B', 'Qwen/Qwen3-0.6B'), ('/home/me/secret/base', 'base')])
def test_a_card_of_adapters_loads_them_onto_their_model(workdir, tmp_path, path, whole):
    config = json.loads((workdir / 'config.json').read_text())
    write(workdir / 'config.json', config | {'model': config['model'] | {'path': path}})
    head, body = card(workdir, tmp_path, adapter=True)
    assert head['library_name'] == 'peft' and head.get('base_model', 'base') == whole
    code = body.split('```python\n')[1].split('```')[0]
    assert 'the adapters of step 10' in body and 'secret' not in body
    assert f'AutoModelForCausalLM.from_pretrained({whole!r})' in code
    assert f'AutoTokenizer.from_pretrained({whole!r})' in code and "PeftModel.from_pretrained(model, 'me/mine')" in code


def test_a_card_has_the_runs_data_curve_figures_settings_hashes_and_versions(workdir, tmp_path):
    _, body = card(workdir, tmp_path)
    lines = body.splitlines()
    assert '# me/mine' in lines and 'the weights of step 10.' in body
    assert f'- path `openai/gsm8k`, commit `{COMMIT}`' in lines
    assert lines[lines.index('| step | pass@1 |') + 2 :][:3] == ['| `0` | 0 |', '| `10` | 0.1 |', '']  # not of step 20
    assert '| `pass@1` | 0.25 | 0.2 | 0.31 |' in lines and 'step `10`; intervals of 95 %:' in body
    assert '| `optimizer.learning_rate` | 0.25 |' in lines and '| `seed` | `7` |' in lines
    assert '- update `0123456789abcdef`' in lines
    assert '- grpo_jax `0.1.0`, Python `3.11.7`' in lines and '- jax `0.10.2`' in lines
    assert '- `8` devices `TPU v5e`' in lines


def test_a_card_names_no_folder_of_this_machine(workdir, tmp_path):
    _, body = card(workdir, tmp_path)
    assert 'secret' not in body and '| `reward.parts` | `[["mine.py", 1.0]]` |' in body.splitlines()


@pytest.mark.parametrize('path, random_init', [('configs/models/characters', True), ('/home/me/model', False)])
def test_a_model_that_is_not_from_the_hub_has_no_base_there(workdir, tmp_path, path, random_init):
    config = json.loads((workdir / 'config.json').read_text(encoding='utf8'))
    config['model'] |= {'path': path, 'random_init': random_init}
    write(workdir / 'config.json', config)
    head, body = card(workdir, tmp_path)
    assert 'base_model' not in head and ('from random weights:' if random_init else 'from a model of a folder:') in body


def test_a_long_curve_is_thinned_and_keeps_its_end(workdir, tmp_path):
    rows = [{'step': step, 'reward': float(step)} for step in range(0, 1001)]
    (workdir / 'evaluations.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n', encoding='utf8')
    _, body = card(workdir, tmp_path, step=1000)
    steps = [line for line in body.split('## Curve')[1].split('##')[0].splitlines() if line.startswith('| `')]
    assert len(steps) <= 20 and steps[0] == '| `0` | 0 |' and steps[-1] == '| `1000` | 1000 |'


@pytest.mark.parametrize('content', ['', '{', '[]', '[1, null]', '{"model": 3, "figures": {"a": 1}}', 'null'])
@pytest.mark.parametrize('name', ['data.json', 'environment.json', 'programs.json', 'evaluation.json'])
def test_a_damaged_file_of_a_run_is_left_out_of_the_card(workdir, tmp_path, name, content):
    (workdir / name).write_text(content, encoding='utf8')
    assert card(workdir, tmp_path)[0]['library_name'] == 'transformers'


def test_texts_of_others_stay_texts(workdir, tmp_path):
    config = json.loads((workdir / 'config.json').read_text(encoding='utf8'))
    config['data']['template'] = 'a | b\n# `{prompt}`\x1b[31m'
    write(workdir / 'config.json', config)
    _, body = card(workdir, tmp_path)
    assert "| `data.template` | `a \\| b\\n# '{prompt}'\\x1b[31m` |" in body.splitlines()


# the upload


class Api:
    """The client of a hub that knows one person, and keeps what it gets."""

    uploads, fails = [], None

    def whoami(self):
        if Api.fails == 'whoami':
            raise ConnectionError('no network')
        role = 'read' if Api.fails == 'role' else 'write'
        return {'name': 'me', 'orgs': [{'name': 'ours'}], 'auth': {'accessToken': {'role': role}}}

    def create_repo(self, name, private, exist_ok):
        assert private and exist_ok
        Api.uploads.append(name)

    def upload_folder(self, repo_id, folder_path, commit_message):
        if Api.fails == 'upload':
            raise TimeoutError('the hub is slow')
        Api.uploads.append((repo_id, sorted(os.listdir(folder_path)), commit_message))


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(huggingface_hub, 'HfApi', Api)
    monkeypatch.setattr(huggingface_hub, 'get_token', lambda: 'hf_x')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(Api, 'uploads', [])
    monkeypatch.setattr(Api, 'fails', None)
    return Api


@pytest.mark.parametrize('name', ['me/mine', 'ours/mine'])
def test_a_folder_is_uploaded_as_one_commit_to_a_model_that_is_private_if_new(api, tmp_path, name):
    (tmp_path / 'README.md').write_text('')
    hub.check_upload('--push', name)
    assert not api.uploads
    hub.upload('--push', name, str(tmp_path), 'run, step 3')
    assert api.uploads == [name, (name, ['README.md'], 'run, step 3')]


def refused_push(tmp_path, name, message):
    """export ends with this line before it has looked for a run or written anything."""
    with pytest.raises(BadInput, match=f'^--push = .{name}.: {message}'):
        export.export(str(tmp_path / 'absent'), str(tmp_path / 'out'), 'float32', push=name)
    assert not (tmp_path / 'out').exists() and not Api.uploads


@pytest.mark.parametrize('name', ['mine', 'me/mine/3', '/mine', 'me/', '../mine', 'me/a b'])
def test_a_name_that_is_none_is_refused(api, tmp_path, name):
    refused_push(tmp_path, name, 'is no name of a model on the hub; write ORG/NAME')


def test_without_a_token_nothing_begins(api, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, 'get_token', lambda: None)
    refused_push(tmp_path, 'me/mine', 'needs a token that may write; run `hf auth login`, or leave')


def test_with_a_token_that_only_reads_nothing_begins(api, tmp_path):
    api.fails = 'role'
    refused_push(tmp_path, 'me/mine', 'the token may only read; run `hf auth login` with one that may write')


def test_without_network_nothing_begins(api, tmp_path, monkeypatch):
    api.fails = 'whoami'
    refused_push(tmp_path, 'me/mine', 'the hub gave ConnectionError; check the network and the token')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    refused_push(tmp_path, 'me/mine', 'needs the hub, which HF_HUB_OFFLINE=1 forbids')


def test_a_model_of_others_is_refused(api, tmp_path):
    refused_push(tmp_path, 'theirs/mine', 'the token may not write there; choose an owner from me, ours')


def test_an_upload_that_fails_leaves_the_folder_and_names_the_command(api, tmp_path):
    api.fails = 'upload'
    with pytest.raises(
        BadInput, match=r'TimeoutError: the hub is slow; .* is whole, upload it with `hf upload me/mine /'
    ):
        hub.upload('--push', 'me/mine', str(tmp_path), 'x')


def test_a_run_without_evaluations_was_supervised(tmp_path):
    write(tmp_path / 'config.json', json.loads(arithmetic.get_config().to_json()))
    head, body = card(tmp_path, tmp_path, 60, 'sums')
    assert 'datasets' not in head and 'data set `arithmetic`' in body and '## Curve' not in body
    assert head['tags'] == ['grpo_jax'] and 'by supervised training, from random weights:' in body
