"""The pages are what the code says, what they name exists, and their examples run. See docs/contributing.md."""

import ast
import contextlib
from html.parser import HTMLParser
import importlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import types

from absl import flags
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms, supervised, train
from grpo_jax.algorithms import pieces, surrogates
from grpo_jax.configs import default
from grpo_jax.diagnose import MONITORS, PUBLISHED, DiagnoseOptions
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.run import config_file
from grpo_jax.tools import sweep
from tests import doc_examples, small_model
from tests.doc_examples import PAGES, ROOT

DOCS = os.path.join(ROOT, 'docs')
# presets that no paper describes: a textbook method, a trainer's defaults, and this project's own choice
WITHOUT_PAPER = {'sft', 'reinforce', 'reinforce_moving', 'olmo3_like', 'opd_reward', 'default_rlvr'}
EXAMPLES = [page for page in PAGES if page not in ('CHANGELOG.md', 'benchmarks/README.md')]
PAGES_MADE = ('algorithms', 'coming_from', 'config', 'troubleshooting')
HEADING = re.compile(r'^#+ (.*)$', re.MULTILINE)
LINK = re.compile(r'\]\(([^)\s]+)\)')


@pytest.fixture
def scripts(monkeypatch):
    """The scripts that write pages, by name."""
    monkeypatch.syspath_prepend(DOCS)
    return {name: importlib.import_module(f'make_{name}') for name in PAGES_MADE}


@pytest.fixture
def advice(scripts):
    return scripts['algorithms'].ADVICE


def prose(page):
    """A page without its fenced blocks."""
    return re.sub(r'^```.*?^```$', '', doc_examples.read(page), flags=re.DOTALL | re.MULTILINE)


# the glossary


def glossary_rows():
    """(words, modules) of each row of docs/glossary.md, except for the words of earlier versions; modules is a text."""
    page = doc_examples.read('docs/glossary.md').partition('## Words of earlier versions')[0]
    rows = [line.strip('| ').split(' | ') for line in page.splitlines() if line.startswith('| ')]
    return [(words.split(', '), modules) for words, _, modules in rows if words != 'word']


def letters(text):
    return re.sub('[^a-z0-9]', '', text.lower())


def glossary_text(reference):
    """The text in which a row's word must stand: of a key of the config its name, of a module its path and source."""
    if reference.startswith('config.'):
        value = default.get_config()
        for key in reference.split('.')[1:]:
            value = value[key]
        return reference
    with open(os.path.join(ROOT, 'grpo_jax', reference), encoding='utf8') as file:
        return reference + file.read()


def test_the_glossary_has_each_word_in_one_row():
    words = [word for row, _ in glossary_rows() for word in row]
    assert len(words) > 100
    assert sorted(word for word in set(words) if words.count(word) > 1) == []


@pytest.mark.parametrize('words, modules', glossary_rows(), ids=lambda value: str(value)[:40])
def test_a_row_of_the_glossary_names_modules_that_have_its_words(words, modules):
    places = re.findall(r'`([^`]+)`(?: \(([^)]*)\))?', modules)
    texts = []
    for reference, names in places:
        texts.append(glossary_text(reference))
        for name in re.findall('`([^`]+)`', names):
            assert re.search(rf'\b{name}\b', texts[-1]), f'{reference} has no {name}'
    for word in words:
        stem = letters(word.rpartition('.')[2]).removesuffix('ed').removesuffix('s')
        assert any(stem in letters(text) for text in texts), f'{word!r} stands in none of {modules}'


# pages that are made from the code


@pytest.mark.parametrize('name', PAGES_MADE)
def test_the_page_is_what_the_script_makes(scripts, name):
    assert doc_examples.read(f'docs/{name}.md') == scripts[name].text(), f'run: python docs/make_{name}.py'


def test_llms_txt_leads_to_every_page_with_a_sentence(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    text = doc_examples.read('docs/llms.txt')
    assert text == importlib.import_module('make_llms').text(), 'run: python docs/make_llms.py'
    assert re.match(r'# grpo_jax\n\n> .+\n', text)
    listed = re.findall(r'^- \[[^]]+\]\((\w+\.md)\): \w.+$', text, re.MULTILINE)
    assert sorted(f'docs/{page}' for page in listed) == [page for page in PAGES if page.startswith('docs/')]


def test_every_monitor_has_its_row_and_its_remedies():
    page = doc_examples.read('docs/troubleshooting.md')
    for monitor in MONITORS.values():
        assert page.count(f'`{monitor.name}` |') >= 2, monitor.name
        assert all(answer.cause in page for answer in monitor.answers.values())
    rows = re.findall(r'^\| `(\w+)` \| (\w+) \| (.*) \| (.*) \|$', page, re.MULTILINE)
    assert {row[0] for row in rows} == set(MONITORS)
    keys = {key for row in rows for key in re.findall(r'`(\w+)`', row[3])}
    assert keys == set(DiagnoseOptions._fields) - {'on', 'repeat_after'}, 'a threshold that no monitor reads'


def test_the_page_has_the_published_settings_that_runs_are_held_against():
    page = doc_examples.read('docs/config.md')
    for published in PUBLISHED:
        assert f'| `{published.setting}` | {published.values} |' in page and published.sources in page


@pytest.mark.skipif(not os.path.exists(os.path.join(DOCS, 'metrics.md')), reason='no page of the metrics yet')
def test_monitors_read_metrics_that_the_page_has():
    known = set(re.findall(r'`([\w/*@]+)`', doc_examples.read('docs/metrics.md')))
    names = {name for monitor in MONITORS.values() for name in monitor.reads if not name.startswith('evaluation/')}
    assert not [name for name in names if name not in known and f'{name.partition("/")[0]}/*' not in known]


@pytest.mark.skipif(not os.path.exists(os.path.join(ROOT, 'configs', 'labs', 'dead_run.py')), reason='no labs yet')
def test_every_monitor_has_its_lab():
    without = [m.lab for m in MONITORS.values() if not os.path.exists(f'{ROOT}/configs/labs/{m.lab}.py')]
    assert not without


def test_every_key_of_the_config_has_a_row_and_a_meaning(scripts):
    rows = dict(re.findall(r'^\| `([\w.]+)` \| (.*) \|$', doc_examples.read('docs/config.md'), re.MULTILINE))
    assert set(rows) == {path for path, _ in scripts['config'].leaves(scripts['config'].defaults().to_dict())}
    assert len(rows) > 150 and rows['steps'].startswith('`100` | a whole number at least 1 | steps of the loop')
    without = [path for path, row in rows.items() if not row.split(' | ')[2].strip()]
    assert not without, 'no comment at the fields of these keys'


def test_the_page_says_which_values_a_key_may_have(scripts):
    rows = dict(re.findall(r'^\| `([\w.]+)` \| (.*) \|$', doc_examples.read('docs/config.md'), re.MULTILINE))
    values = {path: row.split(' | ')[1].strip() for path, row in rows.items()}
    assert values['optimizer.b1'] == values['supervised.optimizer.b1'] == 'a number at least 0 and at most 0.999999'
    assert values['model.dtype'] == 'float32 or bfloat16' and values['data.system'] == ''
    assert '`dual_clip`' in values['algorithm.surrogate'] and '`icepop`' in values['algorithm.correction']
    without = [path for path, row in rows.items() if re.match(r'`-?[\d.e-]+`', row) and not values[path]]
    assert not without, 'numbers without a range beside their default'


def test_defaults_are_those_before_a_preset(scripts):
    # the preset grpo has a KL of 0.04
    assert '| `algorithm.kl_coef` | `0.0` |' in scripts['config'].keys()
    assert default.get_config('grpo').algorithm.kl_coef == 0.04


def test_advice_is_for_presets_and_a_preset_needs_none(scripts, advice, monkeypatch):
    assert {*advice} <= {*sweep.choose_presets('all')}
    monkeypatch.delitem(advice, 'cispo')
    assert '| [2506.13585](https://arxiv.org/abs/2506.13585) |  |  |' in scripts['algorithms'].advice()
    assert {grade for grade, _ in advice.values()} <= set('PRSW')


def test_presets_after_papers_name_their_arxiv_number(scripts, advice):
    table = scripts['algorithms'].advice()
    for line in table.splitlines()[2:]:
        name = line.split('`')[1]
        assert name not in advice or ('](https://arxiv.org/abs/' in line) == (name not in WITHOUT_PAPER), name
    # the names that several papers claim
    assert '[2505.18086](' in table and '[2508.03772](' in table


def test_a_piece_and_a_preset_without_a_word_come_into_the_tables(scripts, monkeypatch):
    def bare(ratio, advantages, *, bare_bound=0.25, bare_free):
        return ratio

    bare.__module__ = surrogates.__name__
    monkeypatch.setattr(surrogates, 'bare', bare, raising=False)
    assert '| `bare` |  |  | `bare_bound` 0.25, `bare_free` |' in scripts['algorithms'].all_pieces()
    module = importlib.import_module('grpo_jax.configs.algorithms.rloo')
    monkeypatch.setattr(module, '__doc__', None)
    assert '| `rloo` |  |  | R |' in scripts['algorithms'].advice()


def test_the_tables_of_pieces_hold_every_piece_that_a_preset_takes(scripts):
    tables = doc_examples.read('docs/algorithms.md')
    for preset in scripts['algorithms'].ADVICE:
        method = algorithms.make(default.get_config(preset).algorithm)
        for key in scripts['algorithms'].MODULES:
            chosen = getattr(method, key)
            for piece in chosen if key == 'regularizers' else (chosen,):
                assert f'| `{pieces.name_of(piece)}` |' in tables, (preset, key)


def test_bounds_in_the_table_are_those_of_the_config():
    page = doc_examples.read('docs/algorithms.md').partition('## What each is made of')[2].partition('## Pieces')[0]
    rows = {line.split('`')[1]: line for line in page.splitlines() if line.startswith('| `')}
    assert '| `clip` 0.2 / 0.28 |' in rows['dapo'] and '| resample |' in rows['dapo']
    assert '| `clip` 0.0003 / 0.0004 |' in rows['gspo']
    assert '| `k3` in loss, 0.04 |' in rows['grpo'] and rows['grpo'].endswith('| frozen |')
    assert '| `k1` in reward by token, 0.05 |' in rows['ppo']
    assert rows['deepseek_r1'].endswith('| renewed every 400 |') and rows['dapo'].endswith('| none |')
    assert '| `token` to sampler |' in rows['dppo']


# what pages name


def test_every_test_that_a_page_names_exists():
    there = set()
    for folder, _, files in os.walk(os.path.join(ROOT, 'tests')):
        for name in (name for name in files if name.endswith('.py')):
            with open(os.path.join(folder, name), encoding='utf8') as file:
                there |= {
                    (name, node.name) for node in ast.walk(ast.parse(file.read())) if isinstance(node, ast.FunctionDef)
                }
    named = {pair for page in PAGES for pair in re.findall(r'`(test_\w+\.py)::(test_\w+)`', doc_examples.read(page))}
    assert len(named) > 30 and named <= there, named - there


def anchors(page):
    """The anchors of a page's headings, as GitHub and mkdocs make them alike."""
    headings = [re.sub(r'\[([^]]*)\]\([^)]*\)|`', r'\1', heading) for heading in HEADING.findall(prose(page))]
    return [re.sub(r'[^\w\- ]', '', heading).strip().lower().replace(' ', '-') for heading in headings]


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_to_files_and_headings(page):
    for target in LINK.findall(prose(page)):
        if target.startswith('http'):
            continue
        path, _, anchor = target.partition('#')
        path = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        assert os.path.isfile(os.path.join(ROOT, path)), target  # a folder has no page on the site
        assert not anchor or anchors(path).count(anchor) == 1, target


@pytest.mark.parametrize('page', PAGES)
def test_lists_and_tables_begin_after_an_empty_line(page):
    # GitHub reads them all the same, mkdocs does not
    lines = prose(page).splitlines()
    for before, line in itertools.pairwise(lines):
        for begin in (r'\| ', r'[-*] ', r'\d+\. '):
            starts = re.match(begin, line) and before.strip() and not re.match(rf'{begin}|\|--| ', before)
            assert not starts, line


def test_the_page_for_agents_is_short():
    assert len(doc_examples.read('AGENTS.md').splitlines()) <= 120


def test_the_readme_is_read_in_two_minutes(advice):
    readme = doc_examples.read('README.md')
    assert len(readme.splitlines()) <= 130
    families = re.findall(r'^\| [\w ,]+ \| (`.*) \|$', readme, re.MULTILINE)
    named = re.findall(r'`(\w+)`', ' '.join(families))
    assert sorted(named) == sorted(advice), 'each preset of the project in one family'
    assert f'{len(advice)} presets' in readme
    assert '(docs/not.md)' in readme and '(docs/coming_from.md)' in readme


# the site


class Addresses(HTMLParser):
    """The addresses that a page of the site asks for."""

    def __init__(self, text):
        super().__init__()
        self.found_at = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found_at += [value for name, value in attrs if name in ('href', 'src') and value]


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    """The folder of the built site."""
    for package in ('material', 'latex2mathml'):
        pytest.importorskip(package, reason='the site is not built here: pip install .[docs]')
    folder = tmp_path_factory.mktemp('site')
    done = subprocess.run(
        [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', '--site-dir', str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_address_of_the_site_is_on_it(site):
    pages = list(site.rglob('*.html'))
    for page in pages:
        for address in Addresses(page.read_text(encoding='utf8')).found_at:
            path = re.sub('[#?].*', '', address)
            if path and not path.startswith(('http', '/')):  # the page for what is not found has absolute ones
                target = page.parent / path
                assert (target / 'index.html' if target.is_dir() else target).is_file(), (page, address)
    assert len(pages) > 40


def test_the_site_shows_files_of_the_repository_and_formulas(site):
    assert 'repository/grpo_jax/train.py/' in (site / 'index.html').read_text(encoding='utf8')
    listing = (site / 'repository' / 'grpo_jax' / 'train.py' / 'index.html').read_text(encoding='utf8')
    assert 'def run(' in re.sub('<.*?>', '', listing)  # of its colours
    contributing = (site / 'repository' / 'CONTRIBUTING' / 'index.html').read_text(encoding='utf8')
    assert 'href="../../glossary/"' in contributing


def test_formulas_need_neither_a_script_nor_a_network(site):
    page = (site / 'algorithms' / 'index.html').read_text(encoding='utf8')
    assert page.count('<math') > 20 and 'display="block"' in page and 'MATHML' not in page
    assert '$5' in (site / 'rewards' / 'index.html').read_text(encoding='utf8')  # an amount is none


def test_no_page_of_the_site_loads_anything_from_elsewhere(site):
    loaded = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]* (?:src|href)="(?://|https?:)[^"]*')
    assert not [
        (page.name, loaded.findall(page.read_text(encoding='utf8')))
        for page in site.rglob('*.html')
        if loaded.search(page.read_text(encoding='utf8'))
    ]


def test_the_site_is_searched_and_its_commands_are_copied(site):
    with open(site / 'search' / 'search_index.json', encoding='utf8') as file:
        found = [entry['location'] for entry in json.load(file)['docs'] if 'icepop_low' in entry['text']]
    assert 'config/#algorithm' in found and not [place for place in found if place.startswith('repository/grpo_jax')]
    assert 'content.code.copy' in (site / 'start' / 'index.html').read_text(encoding='utf8')


def test_the_site_has_the_markdown_to_which_llms_txt_leads(site):
    listed = re.findall(r'\((\w+\.md)\)', (site / 'llms.txt').read_text(encoding='utf8'))
    assert len(listed) > 25
    for page in listed:
        assert (site / page).read_text(encoding='utf8') == doc_examples.read(f'docs/{page}')


# examples


@pytest.fixture(scope='module')
def tiny_model(tmp_path_factory):
    return small_model.write(tmp_path_factory.mktemp('model'))


@pytest.fixture(scope='module')
def finished(tmp_path_factory, tiny_model):
    """The folder in which the first run of docs/start.md was run."""
    folder = tmp_path_factory.mktemp('start')
    with contextlib.chdir(folder):
        run_command('docs/start.md', 'train', 'runs/arithmetic', tiny_model)
    (folder / 'runs' / 'x').symlink_to('arithmetic')
    return folder


def commands(page):
    """(command, its flags) of each line of a page that starts one."""
    for block in doc_examples.blocks(page, 'bash'):
        for words in doc_examples.shell_lines(block.text):
            if own := doc_examples.arguments(words):
                yield own


def run_command(page, command, word, model):
    """Runs the one line of a page that starts the command with this word in its flags, with tiny settings."""
    (own,) = {tuple(own) for name, own in commands(page) if name == command and word in ' '.join(own)}
    own = [flag for flag in own if not flag.startswith('--samples')]  # more would be another sampler to compile
    with doc_examples.parsed(command, own) as module:
        config = doc_examples.flags.FLAGS.config if 'config' in doc_examples.flags.FLAGS else None
        if config is not None:
            doc_examples.shrink(config, model)
        module['main']()


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """An empty folder as the current one, with the files of the page; what the page appends to modules is there."""
    page = request.param
    for package in doc_examples.write_files(page, tmp_path):
        name = package if package.startswith('grpo_jax') else f'grpo_jax/{package}'
        module = importlib.import_module(name.replace('/', '.'))
        monkeypatch.setattr(module, '__path__', [*module.__path__, str(tmp_path / package)])
    modules = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.ExitStack() as stack:
        for block in doc_examples.blocks(page, 'python'):
            if block.mark.startswith('append: '):
                stack.enter_context(doc_examples.appended(block))
        yield tmp_path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in (getattr(sys.modules[name], '__file__', None) or ''):
            del sys.modules[name]


@pytest.mark.parametrize('folder, page', [(page, page) for page in EXAMPLES], indirect=['folder'], ids=EXAMPLES)
def test_commands_are_parsed_by_their_own_flags_and_config(folder, page):
    for block in doc_examples.blocks(page, 'bash'):
        for words in doc_examples.shell_lines(block.text):
            if own := doc_examples.arguments(words):
                with doc_examples.parsed(*own):
                    if own[0] == 'train' and flags.FLAGS.config is not None:
                        assert not doc_examples.unread_flags(), words
            elif block.mark != 'needs: tpu':
                check_line(words)


def check_line(words):
    """Fails for a line of shell that names what is not there, or that is of no kind that a test can look at."""
    with open(os.path.join(ROOT, 'pyproject.toml'), 'rb') as file:
        extras = tomllib.load(file)['project']['optional-dependencies']
    for number, word in enumerate(words):
        if word in ('bash', 'source', 'python') or word == '.ci/run':
            path = words[number + (word != '.ci/run')]
            assert path == '-m' or os.path.isfile(os.path.join(ROOT, path)), words
        assert set(re.findall(r'^\.\[(.*)\]', word)) <= {'', *extras}, words
    known = ('bash', 'source', 'python', '.ci/run', 'pip', 'mkdocs', 'export', 'for', 'done', 'done;')
    assert words[0] in known or words[0].startswith('.venv/bin/'), f'not known: {words}; see docs/contributing.md'


def test_no_bash_block_is_a_shell_error():
    for page in EXAMPLES:
        for block in doc_examples.blocks(page, 'bash'):
            done = subprocess.run(['bash', '-n'], input=block.text, capture_output=True, text=True)
            assert done.returncode == 0, (page, block.line, done.stderr)


@pytest.mark.parametrize('page', EXAMPLES)
def test_marks_are_of_a_known_kind(page):
    kinds = {'needs: tpu': ('bash',), 'file: ': ('python', 'jsonl'), 'append: ': ('python',)}
    for match in doc_examples.FENCE.finditer(doc_examples.read(page)):
        mark, language = match['mark'] or '', match['language']
        assert language in ('', 'bash', 'python', 'jsonl', 'math'), (page, language)
        if re.match('needs|file|append', mark):
            assert [kind for kind, of in kinds.items() if mark.startswith(kind) and language in of], (page, mark)


EXECUTED = set()  # pages may share a block; it runs once


@pytest.mark.parametrize('folder, page', [(page, page) for page in EXAMPLES], indirect=['folder'], ids=EXAMPLES)
def test_python_runs(folder, page, finished, tiny_model, monkeypatch, request):
    if page == 'docs/notebooks.md':  # a sweep of four runs, whose like test_sweep has
        request.getfixturevalue('long')
    if importlib.util.find_spec('pandas') is None:  # which no extra installs
        frames = types.SimpleNamespace(DataFrame=lambda rows: {name: [row[name] for row in rows] for name in rows[0]})
        monkeypatch.setitem(sys.modules, 'pandas', frames)
    for module in (train, supervised):

        def run_less(config, *arguments, run=module.run, **options):
            doc_examples.shrink(config, tiny_model, cold_start=min(config.supervised.updates, 1))
            return run(config, *arguments, **options)

        monkeypatch.setattr(module, 'run', run_less)
    (folder / 'runs').mkdir()
    (folder / 'runs' / 'arithmetic').symlink_to(finished / 'runs' / 'arithmetic')
    names = {}
    for block in doc_examples.blocks(page, 'python'):
        if not block.mark and block.text not in EXECUTED:
            EXECUTED.add(block.text)
            exec(compile(block.text, f'{page}:{block.line}', 'exec'), names)


def test_the_first_run_ends_with_its_curve(finished):
    assert (finished / 'runs' / 'arithmetic' / 'curve.png').is_file()


def test_a_run_is_evaluated_and_exported_as_the_page_says(finished, tiny_model, monkeypatch):
    monkeypatch.chdir(finished)
    run_command('docs/start.md', 'evaluate', 'runs/x', tiny_model)
    assert (finished / 'runs' / 'x' / 'evaluation.json').is_file()
    run_command('docs/start.md', 'export', 'runs/x', tiny_model)
    assert (finished / 'DIR' / 'model.safetensors').is_file()


# add your own

OWN = 'docs/add_your_own.md'


@pytest.mark.parametrize('folder', [OWN], indirect=True)
@pytest.mark.parametrize('name', ['brevity', 'squash'])
def test_what_a_reader_adds_trains(folder, name, tiny_model):
    run_command(OWN, 'train', f'runs/{name}', tiny_model)
    with open(folder / 'runs' / name / 'metrics.jsonl', encoding='utf8') as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 1 and rows[0]['finite'] == 1
    assert name != 'brevity' or 0 < rows[0]['reward/brevity'] < 1


@pytest.mark.parametrize('folder', [OWN], indirect=True)
def test_what_the_examples_set_arrives(folder):
    own = {flag.rpartition('/')[2]: list(flags) for _, flags in commands(OWN) for flag in flags if 'workdir' in flag}
    with doc_examples.parsed('train', own['brevity']):
        assert doc_examples.flags.FLAGS.config.reward.options.brevity.scale == 0.05
    with doc_examples.parsed('train', own['two_digits']):
        config = doc_examples.flags.FLAGS.config
        assert (config.data.options.digits, config.rollout.group_size, config.algorithm.clip_high) == (2, 16, 0.28)
    with doc_examples.parsed('train', own['unclipped']):
        config = doc_examples.flags.FLAGS.config
        method = algorithms.make(config.algorithm, config.collection)
    assert pieces.name_of(method.surrogate) == 'importance' and method.dead_groups == 'drop'
    with doc_examples.parsed('train', own['squash']):
        config = doc_examples.flags.FLAGS.config
        method = algorithms.make(config.algorithm)
    assert config.learner.minibatches == 2  # with one the ratio is 1, and the variant does nothing
    # -2 w tanh(.2 / w) with w = .4
    loss = method.surrogate(jnp.array([[1.2]]), jnp.array([[2.0]]))
    np.testing.assert_allclose(loss, [[-0.8 * np.tanh(0.5)]], rtol=1e-6)


@pytest.mark.parametrize('folder', [OWN], indirect=True)
def test_a_family_that_is_added_has_the_logits_of_transformers(folder, tiny_model):
    torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
    hf.copy_files(tiny_model, folder / 'gemma')
    with open(folder / 'gemma' / 'config.json', encoding='utf8') as file:
        config = json.load(file) | {'model_type': 'gemma', 'hidden_act': 'gelu_pytorch_tanh'}
    with open(folder / 'gemma' / 'config.json', 'w', encoding='utf8') as file:
        json.dump(config | {'architectures': ['GemmaForCausalLM']}, file)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder / 'gemma'))
    model.save_pretrained(folder / 'gemma')
    c = families.load_config(folder / 'gemma')
    device = transformer.map_table(lambda path, param: jnp.zeros(()).device, transformer.param_table(c))
    params = hf.load_params(folder / 'gemma', c, device)
    tokens = np.arange(2, 18).reshape(1, -1)
    visible = jnp.ones(tokens.shape, bool)
    hidden = transformer.forward(params, jnp.asarray(tokens), transformer.positions_of(visible), visible, c)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(transformer.unembed(params, hidden, c), expected, atol=2e-5)


def test_the_table_says_how_many_files_and_lines_each_takes():
    lines = {}
    for block in doc_examples.blocks(OWN, 'python'):
        if block.mark:
            name = block.mark.partition(': ')[2]
            lines[name] = len([line for line in block.text.splitlines() if line.strip()])
    text = doc_examples.read(OWN)
    for row, files in {
        'reward': ['brevity.py'],
        'reward of all completions': ['nearness.py'],
        'preset': ['unclipped.py'],
        'variant': ['squash.py'],
        'experiment': ['two_digits.py'],
        'model family': ['grpo_jax/models/hf/families.py'],
    }.items():
        places, count = re.search(rf'^\| \[{row}\].*?\| (.*?) \| (\d+) \|', text, re.MULTILINE).groups()
        if row == 'model family':
            assert places == f'none of yours, {count} lines in `{files[0]}`'
        else:
            assert sum(map(int, re.findall(r'\d+', places))) == len(files), row
        assert int(count) == sum(lines.pop(file) for file in files), row
    assert not lines, 'an example that the table does not have'


def test_every_experiment_is_listed_with_figures_that_were_measured():
    """Each number of a docstring's line `Measured:` stands in the page of results or in the page of recipes."""
    page, measured = (doc_examples.read(f'docs/{name}.md') for name in ('config', 'results'))
    measured += doc_examples.read('docs/recipes.md')
    for name in config_file.experiments():
        if name.startswith('labs/'):
            continue
        (row,) = (line for line in page.splitlines() if line.startswith(f'| [`{name}`](../configs/{name}.py) |'))
        _, _, _, machine, time, figure, _ = (cell.strip() for cell in row.split('|'))
        assert machine and (machine == 'not run') == (not time), row
        numbers = re.findall(r'[0-9][0-9.,]*[0-9]', f'{time} {figure}') if name != 'arithmetic_reward' else []
        assert [number for number in numbers if number not in measured] == [], row


def sections(page):
    """A page's sections by their anchor."""
    parts = re.split(r'^## ', doc_examples.read(page), flags=re.MULTILINE)[1:]
    return {re.sub(r'[^a-z0-9 -]', '', part.split('\n')[0].lower()).replace(' ', '-'): part for part in parts}


def figures(text):
    return set(re.findall(r'(?<![\w.@])-?\d+(?:[.,]\d+)*', re.sub(r'`[^`]*`|\]\([^)]*\)', ' ', text)))


def test_figures_of_the_readme_stand_in_the_section_that_it_links():
    results = doc_examples.read('README.md').split('## Results')[1].split('\n## ')[0]
    speed = doc_examples.read('benchmarks/README.md')
    bullets = re.findall(r'^- .*', results, re.MULTILINE)
    assert len(bullets) >= 5
    for bullet in bullets:
        linked = re.findall(r'docs/results\.md#([\w-]+)', bullet)
        text = ' '.join(sections('docs/results.md')[anchor] for anchor in linked) if linked else speed
        names = {'39'} if 'presets' in bullet else set()  # its rows are counted by another test
        assert sorted(figures(bullet) - names - figures(text) - figures(bullet.split(']')[0])) == [], bullet
    (reached,) = re.findall(r'mean reward of ([\d.]+) to ([\d.]+)', doc_examples.read('README.md'))
    assert set(reached) <= figures(sections('docs/results.md')['the-examples'])


def test_every_section_of_results_names_its_command():
    for name, text in sections('docs/results.md').items():
        if name not in ('agreement-of-sampler-and-learner', 'published-runs-to-compare-with'):  # of all runs, of no run
            assert re.search(r'`(python|bash) ', text), name
