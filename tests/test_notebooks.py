"""The notebooks: whole and clean as files, and run from their first cell to the last in folders without a clone."""

import importlib
import json
import os
import re

import numpy as np
import pytest

from grpo_jax.errors import BadInput
from grpo_jax.tools import notebook
from tests import quick_compile, small_model, tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, 'notebooks')
NAMES = sorted(name.removesuffix('.ipynb') for name in os.listdir(FOLDER) if name.endswith('.ipynb'))
HOSTILE = '<script>alert(1)</script>\x1b[2J\u202e"\'' + 'x' * 2**20


def read(name):
    with open(os.path.join(FOLDER, f'{name}.ipynb'), encoding='utf8') as file:
        return json.load(file)


def sources(name, kind='code'):
    return [''.join(cell['source']) for cell in read(name)['cells'] if cell['cell_type'] == kind]


# as files


def test_the_notebooks_are_those_that_the_page_lists():
    with open(os.path.join(ROOT, 'docs', 'notebooks.md'), encoding='utf8') as file:
        listed = re.findall(r'\(\.\./notebooks/(\w+)\.ipynb\)', file.read())
    assert sorted(listed) == NAMES and len(NAMES) == 6


@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_is_valid_and_clean(name):
    content = read(name)
    nbformat = pytest.importorskip('nbformat')
    nbformat.validate(nbformat.from_dict(content))
    assert (content['nbformat'], content['nbformat_minor']) == (4, 5)
    cells = content['cells']
    assert len({cell['id'] for cell in cells}) == len(cells)
    for cell in cells:
        assert cell['cell_type'] == 'markdown' or (cell['outputs'] == [] and cell['execution_count'] is None)
    text = '\n'.join(sources(name) + sources(name, 'markdown'))
    assert not re.search(r'/(home|root|tmp|work|Users|content|kaggle)/', text), 'a path of one machine'


@pytest.mark.parametrize('name', NAMES)
def test_a_notebook_begins_with_its_title_and_the_same_first_cell(name):
    cells = read(name)['cells']
    assert cells[0]['cell_type'] == 'markdown' and cells[0]['source'][0].startswith('# ')
    assert sources(name)[0] == sources('quickstart')[0]
    assert sources(name)[2].count('notebook.check_machine(') == 1
    assert [''.join(c['source']) for c in cells if c['metadata'].get('tags') == ['parameters']] == [sources(name)[1]]


@pytest.fixture
def make_address(monkeypatch):
    """The script that writes the address of the repository."""
    monkeypatch.syspath_prepend(os.path.join(ROOT, 'docs'))
    return importlib.import_module('make_address')


def test_the_tree_has_the_address_of_its_repository_that_pyproject_sets_and_no_other(make_address):
    for path, text in make_address.texts(make_address.address()).items():
        with open(os.path.join(ROOT, path), encoding='utf8') as file:
            assert file.read() == text, 'run: python docs/make_address.py'
    known = {'huggingface/peft', 'leeoniya/uPlot', 'OWNER/NAME', make_address.address().partition('.com/')[2]}
    strange = set()
    for folder, folders, files in os.walk(ROOT):
        inside = ('benchmarks', 'configs', 'docs', 'examples', 'grpo_jax', 'launch', 'notebooks')
        folders[:] = [name for name in folders if folder != ROOT or name in inside]
        for path in (os.path.join(folder, name) for name in files):
            with open(path, encoding='utf8', errors='ignore') as file:
                text = file.read()
            for repository in re.findall(r'(?:github|gitlab|bitbucket)(?:\.com|\.org)?/([\w-]+/[\w.-]*\w)', text):
                strange |= {(os.path.relpath(path, ROOT), repository)} if repository not in known else set()
    assert not strange


def test_an_address_that_is_set_comes_into_badges_links_and_citation_and_goes_again(make_address, monkeypatch):
    none, made = make_address.texts(''), make_address.texts('https://github.com/me/fork')
    for name in NAMES:
        cells = json.loads(made[f'notebooks/{name}.ipynb'])['cells']
        badge = f'](https://colab.research.google.com/github/me/fork/blob/main/notebooks/{name}.ipynb)\n'
        assert cells[0]['source'][2].endswith(badge) and "REPOSITORY = 'https://github.com/me/fork'" in str(cells)
    assert '](https://github.com/me/fork/blob/main/docs/pods.md)' in made['notebooks/tpu_one_host.ipynb']
    assert '](../docs/pods.md)' in none['notebooks/tpu_one_host.ipynb'] and 'Open in Colab' not in str(none)
    assert made['CITATION.cff'] == none['CITATION.cff'] + 'repository-code: https://github.com/me/fork\n'
    monkeypatch.setattr(make_address, 'read', made.get)
    assert make_address.texts('') == none


def test_the_first_cell_installs_what_the_machine_needs_and_only_where_it_is_missing(tmp_path, monkeypatch):
    calls, first = [], sources('quickstart')[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'grpo_jax').mkdir()  # a folder of the name is no package
    there = {'nvidia': None, 'tpu': False, 'package': None, 'driver': '580.65.06\n'}
    import importlib.util
    import shutil
    import subprocess

    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: there['package'])
    monkeypatch.setattr(shutil, 'which', lambda name: there['nvidia'])
    isfile, exists = os.path.isfile, os.path.exists
    monkeypatch.setattr(os.path, 'exists', lambda path: there['tpu'] if '/dev/' in path else exists(path))

    def run(command, **options):
        if command[0] == 'nvidia-smi':
            return subprocess.CompletedProcess(command, 0, there['driver'])
        calls.append(command[-1])

    monkeypatch.setattr(subprocess, 'run', run)
    with pytest.raises(RuntimeError, match='not installed: run this in a clone'):
        exec(re.sub("REPOSITORY = '.*?'", "REPOSITORY = ''", first), {})
    first = re.sub("REPOSITORY = '.*?'", "REPOSITORY = 'https://github.com/me/fork'", first)
    for change, package in [
        ({}, 'grpo_jax[] @ git+https://github.com/me/fork'),
        ({'nvidia': '/usr/bin/nvidia-smi'}, 'grpo_jax[cuda] @ git+https://'),
        ({'driver': '550.54.15\n550.54.15\n'}, 'grpo_jax[cuda12] @ git+https://'),
        ({'tpu': True}, 'grpo_jax[tpu] @ git+https://'),
    ]:
        there |= change
        exec(first, {})
        assert calls.pop().startswith(package)
    monkeypatch.setattr(os.path, 'isfile', lambda path: path == '../grpo_jax/train.py' or isfile(path))
    exec(first, {})  # in the notebooks' folder of a clone
    assert calls.pop() == f'grpo_jax[tpu] @ file://{tmp_path.parent}'
    there['package'] = type('Spec', (), {'origin': 'grpo_jax/__init__.py'})
    exec(first, {})
    assert not calls


# as they run

SMALL = {
    'supervised.updates': 4,
    'supervised.batch': 8,
    'data.prompts_per_step': 4,
    'rollout.group_size': 4,
    'rollout.max_tokens': 24,
    'evaluation.prompts': 4,
    'evaluation.samples': 4,  # as many as completions of a group: one sampler for both
    'checkpoint.every': 2,
    'log.rollouts': 1,
    'steps': 2,
}
SUMS = SMALL | {'data.options.digits': 1, 'data.options.count': 40}
PARAMETERS = {
    'quickstart': {'settings': SUMS},
    'inspect_rollouts': {'settings': SUMS},
    'ablate_variants': {
        'settings': SMALL | {'learner.minibatches': 1},
        'data_options': {'count': 40},
        'presets': ['grpo'],
        'seeds': 2,
    },
    'pathologies': {
        'settings': {name: value for name, value in SUMS.items() if name != 'steps'},
        'start': 1,
        'steps': 2,
        'more_steps': 1,
        'budget': 12,
        'small_budget': 4,
    },
    'tpu_one_host': {'models': [], 'workdir': 'runs/tpu'},
    'gsm8k_one_chip': {'changes': {'steps': 2}, 'workdir': 'runs/chip'},
}


@pytest.fixture(scope='module')
def outside(tmp_path_factory):
    """A folder that holds the package as an installation has it, and nothing else of the clone; and a small model."""
    folder = tmp_path_factory.mktemp('installed')
    (folder / 'site').mkdir()
    (folder / 'site' / 'grpo_jax').symlink_to(os.path.join(ROOT, 'grpo_jax'))
    return folder / 'site', small_model.write(folder / 'model')


def execute(name, folder, outside, twice=False):
    """The cells of a notebook with their outputs, run in a folder with small parameters; twice: each of them twice."""
    nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
    site, model = outside
    content = nbformat.reads(json.dumps(read(name)), as_version=4)
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in PARAMETERS[name].items()}
    if 'settings' in values:
        values['settings']['model.path'] = model
    position = next(i for i, cell in enumerate(content.cells) if 'parameters' in cell.metadata.get('tags', ()))
    injected = nbformat.v4.new_code_cell('\n'.join(f'{key} = {value!r}' for key, value in values.items()))
    content.cells.insert(position + 1, injected)
    if twice:
        cells = [copy for cell in content.cells for copy in (cell, cell.copy())]
        for number, cell in enumerate(cells):
            cell['id'] = f'cell{number}'
        content.cells = cells
    paths = os.pathsep.join([str(site), os.path.join(ROOT, 'tests', 'children')])
    environment = os.environ | {'PYTHONPATH': paths, 'XLA_FLAGS': quick_compile.FLAGS}
    environment['IPYTHONDIR'] = str(folder / '.ipython')
    environment |= {'MPLBACKEND': 'agg', 'JUPYTER_PLATFORM_DIRS': '1', 'PYDEVD_DISABLE_FILE_VALIDATION': '1'}
    client = nbclient.NotebookClient(
        content, timeout=240, kernel_name='python3', resources={'metadata': {'path': str(folder)}}
    )
    client.execute(env=environment)
    return content.cells


def texts(cells):
    """What the cells have printed."""
    return ''.join(
        output['text'] for cell in cells for output in cell.get('outputs', ()) if output['output_type'] == 'stream'
    )


def kinds(cells):
    """The kinds of data that the cells have shown."""
    return {kind for cell in cells for output in cell.get('outputs', ()) for kind in output.get('data', {})}


def test_quickstart_shows_a_step_and_trains_with_long_each_cell_twice(request, outside, tmp_path):
    cells = execute('quickstart', tmp_path, outside, twice=request.config.getoption('--long'))
    out = texts(cells)
    assert 'tokens         [P*G, Q+C] (32, 8)' in out and 'advantages     [P*G, 1]   (32, 1)' in out
    # 1 - 0.625 over sqrt(15)/8, over sqrt(15/56), and alone; RLOO: 8/7 of it
    assert 'GRPO, divided by N       +0.775 -1.291 +0.775' in out
    assert 'GRPO, divided by N - 1   +0.725 -1.208 +0.725' in out
    assert 'Dr. GRPO                 +0.375 -0.625 +0.375' in out
    assert 'RLOO                     +0.429 -0.714 +0.429' in out
    assert 'image/png' in kinds(cells) and '-> ' in out
    assert '44 to learn from, 20 to be evaluated on' in out
    assert re.search(r'pass@1 \d\.\d\d of \d+ prompts, like \d\+\d=', out)
    workdir = tmp_path / 'runs' / 'quickstart'
    assert [row['step'] for row in tiny_run.rows(workdir)] == [0, 1]
    assert [row['step'] for row in tiny_run.rows(workdir, 'evaluations.jsonl')] == [0, 2]
    # what follows finds the run there
    cells = execute('inspect_rollouts', tmp_path, outside)
    assert [row['step'] for row in tiny_run.rows(workdir)] == [0, 1]
    assert 'text/html' in kinds(cells) and 'steps with a dump: [0, 1]' in texts(cells)


def test_ablate_variants_compares_a_variant_with_a_preset(long, outside, tmp_path):
    cells = execute('ablate_variants', tmp_path, outside)
    assert 'reward_after, squash - grpo: ' in texts(cells) and '(2 seeds)' in texts(cells)
    assert 'image/png' in kinds(cells)
    row = tiny_run.rows(tmp_path / 'runs' / 'ablate' / 'squash' / '1')[0]
    assert 0 < row['reward/brief'] <= 1 and (tmp_path / 'differences.py').is_file()


def test_pathologies_amends_its_run(long, outside, tmp_path):
    out = texts(execute('pathologies', tmp_path, outside))
    assert 'before step 1: rollout.max_tokens was 12, now 4' in out
    assert 'before step 3: rollout.max_tokens was 4, now 12' in out
    workdir = tmp_path / 'runs' / 'pathologies'
    rows = tiny_run.rows(workdir / 'truncation')
    assert [row['step'] for row in rows] == [0, 1, 2, 3]
    assert max(row['length_longest'] for row in rows[1:3]) <= 4 < rows[3]['length_longest']
    assert len(tiny_run.rows(workdir / 'broken')) == len(tiny_run.rows(workdir / 'healthy')) == 2


def test_tpu_one_host_prints_its_commands_where_there_is_no_tpu(outside, tmp_path):
    out = texts(execute('tpu_one_host', tmp_path, outside))
    assert (
        'python -m grpo_jax.train --config=gsm8k:dapo --workdir=runs/tpu --config.model.dtype=bfloat16' in out
        and 'mesh.' not in out
    )
    assert 'checkpoints in runs/tpu: none yet' in out and not (tmp_path / 'runs').exists()


def test_gsm8k_one_chip_trains_nothing_where_there_is_no_chip(outside, tmp_path):
    out = texts(execute('gsm8k_one_chip', tmp_path, outside))
    assert 'python -m grpo_jax.train --config=reproduce/qwen2_5_0_5b_gsm8k --workdir=runs/chip --config.steps=2' in out
    assert 'greedy 0.436 before, 0.502 after; band 0.475 to 0.529' in out
    assert not (tmp_path / 'runs').exists()


# what they share


def test_slices_are_named_by_kind_and_count():
    assert notebook.topology('TPU v5 lite', 8) == 'v5e:2x4' and notebook.topology('TPU v6 lite', 1) == 'v6e:1x1'
    assert notebook.topology('TPU v5p', 4) == 'v5p:2x2x1' and notebook.topology('TPU v4', 8) == 'v4:2x2x2'
    assert notebook.topology('TPU v3', 8) == notebook.topology('TPU v5 lite', 3) == notebook.topology('cpu', 1) == ''


def test_a_machine_without_accelerators_is_told_so(capsys):
    assert notebook.check_machine('arithmetic') == 'cpu'
    assert re.match(r'CPU, \d+ cores: small models only\.', capsys.readouterr().out)


class Device:
    platform, device_kind = 'tpu', 'TPU v5 lite'


@pytest.mark.parametrize(('count', 'asked'), [(8, ['v5e:2x4']), (3, [])])
def test_on_tpus_preflight_runs_for_what_is_there(monkeypatch, capsys, count, asked):
    names = []

    def fake(experiment, name, settings):
        names.append(name)
        assert (experiment, settings) == ('gsm8k', {'steps': 3})
        return 0, 'it fits'

    monkeypatch.setattr(notebook.jax, 'devices', lambda: [Device] * count)
    monkeypatch.setattr(notebook, 'preflight', fake)
    assert notebook.check_machine('gsm8k', {'steps': 3}) == 'tpu' and names == asked
    assert ('it fits' in capsys.readouterr().out) == bool(asked)


class Card:
    platform, device_kind = 'gpu', 'NVIDIA A100-SXM4-40GB'

    def memory_stats(self):
        return {'bytes_limit': 30 * 2**30}


def test_on_gpus_preflight_runs_for_what_is_there(monkeypatch, capsys):
    names = []
    monkeypatch.setattr(notebook, 'preflight', lambda experiment, name, settings: names.append(name) or (0, 'it fits'))
    monkeypatch.setattr(notebook.jax, 'devices', lambda: [Card()])
    assert notebook.check_machine('gsm8k') == 'gpu'
    monkeypatch.setattr(Card, 'device_kind', 'NVIDIA RTX A6000')
    assert notebook.check_machine('gsm8k') == 'gpu'
    assert names == ['gpu:a100-40', 'gpu:40.0'] and 'it fits' in capsys.readouterr().out


def test_preflight_that_cannot_work_says_why_in_one_line(monkeypatch):
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    status, text = notebook.preflight('arithmetic', 'v5e:2x2', {'stepz': 3})
    assert status == 2 and 'config has no stepz' in text and '\n' not in text
    command = notebook.preflight_command('gsm8k:dapo', 'v5e:2x4', {'mesh.fsdp': 8})
    assert command == ['grpo_jax', 'preflight', '--config=gsm8k:dapo', '--topology=v5e:2x4', '--config.mesh.fsdp=8']


def test_a_plot_of_rows_is_a_picture_also_of_none_and_of_gaps():
    for rows in ([], [{'step': 0, 'reward': 1.0}], [{'step': 0, 'reward': None}, {'step': 1, 'length': 2.0}]):
        picture = notebook.plot_rows(rows, ('reward', 'length'))
        assert picture.startswith(b'\x89PNG')


def test_a_live_plot_goes_on_with_the_rows_of_the_run(tmp_path, monkeypatch):
    pytest.importorskip('IPython')
    (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps({'step': i, 'reward': i}) + '\n' for i in range(3)))
    drawn = []
    monkeypatch.setattr(notebook, 'plot_rows', lambda rows, names: drawn.append([r['step'] for r in rows]) or b'')
    monkeypatch.setattr(notebook, 'REDRAW_SECONDS', -1.0)
    plot = notebook.LivePlot(str(tmp_path))
    monkeypatch.setattr(plot, '_handle', type('Handle', (), {'update': staticmethod(lambda picture: None)}))
    plot(1, {'step': 1, 'reward': 0.0})  # the run goes on from an earlier step
    plot(2, {'step': 2, 'reward': 0.0})
    assert drawn == [[0, 1, 2], [0, 1], [0, 1, 2]]


ROW = {
    'prompt': '1+1=',
    'completion': '2',
    'tokens': ['2', '</s>'],
    'logprobs': [-1.0, -4.0],
    'old_logprobs': [-1.0, -3.0],
    'ref_logprobs': [-1.0, -2.0],
    'entropy': [0.0, 0.5],
    'advantage': -0.25,
    'reward': 1.0,
}


@pytest.mark.parametrize(
    ('by', 'numbers'),
    [
        ('advantage', [-0.25, -0.25]),
        ('logprob', [-1, -4]),
        ('entropy', [0, 0.5]),
        # e^1 - 1 of the second: the policy has become likelier to say it
        ('ratio', [0, np.e - 1]),
        # k3 of the reference at -2 and the policy at -3: e^1 - 1 - 1
        ('kl', [0, np.e - 2]),
    ],
)
def test_tokens_are_coloured_by_their_numbers(by, numbers):
    page = notebook.tokens_as_html([ROW], by)
    assert re.findall(r'title="([^"]*)"', page) == [f'{number:.4g}' for number in numbers]
    assert '&lt;/s&gt;</span>' in page and '<b>1</b>' in page


def test_tokens_of_a_dump_without_them_are_one_and_what_is_missing_is_refused():
    row = {'prompt': '1+1=', 'completion': '2', 'advantage': 0.5, 'reward': None}
    page = notebook.tokens_as_html([row], 'advantage')
    assert page.count('title=') == 1 and '<b>no reward</b>' in page and '42,111,187' in page  # blue: positive
    with pytest.raises(BadInput, match='is not in this dump'):
        notebook.tokens_as_html([row], 'logprob')
    with pytest.raises(BadInput, match='choose one of advantage, logprob'):
        notebook.tokens_as_html([row], 'colour')


def test_hostile_completions_are_inert_in_a_cell():
    row = ROW | {'prompt': HOSTILE, 'completion': HOSTILE, 'tokens': [HOSTILE, '<img src=x onerror=a()>']}
    page = notebook.tokens_as_html([row])
    assert re.findall(r'<(\w+)', page) == ['div', 'div', 'b', 'span', 'span', 'span']  # ours alone
    assert page.isprintable() and '\\x1b[2J\\u202e' in page and len(page) < 300_000
    many = ROW | {'tokens': ['x'] * 10**5, 'logprobs': [-1.0] * 10**5}
    assert notebook.tokens_as_html([many]).count('title=') == notebook.MOST_TOKENS
