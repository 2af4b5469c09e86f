"""What docs/data.md shows does what it says."""

import os
import re
import runpy

import pytest

from grpo_jax import data
from grpo_jax.errors import BadInput
from grpo_jax.types import Example
from tests import hub_cache as cache
from tests.hub_cache import OLD, REPOSITORIES, options, read

PAGE = os.path.join(os.path.dirname(__file__), '..', '..', 'docs', 'data.md')


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current folder, with the files that the page shows."""
    with open(PAGE, encoding='utf8') as page:
        shown = re.findall(r'^<!-- file: (\S+) -->\n```python\n(.*?)^```$', page.read(), re.DOTALL | re.MULTILINE)
    for name, text in shown:
        (tmp_path / name).write_text(text, encoding='utf8')
    monkeypatch.chdir(tmp_path)
    return tmp_path


COUNTRIES = [{'country': 'Peru', 'capital': 'Lima', 'continent': 'America'}, {'country': 'Chile'}]


def test_the_table_of_well_known_data_sets_names_keys_and_options_that_exist():
    with open(PAGE, encoding='utf8') as page:
        rows = re.findall(r'^\| `(\S+/\S+)` \| (`name=.*?) \| (?:yes|golds|form)? ?\|$', page.read(), re.MULTILINE)
    assert len({path for path, _ in rows}) >= 25
    for path, settings in rows:
        given = dict(text.split('=', 1) for text in re.findall(r'`([a-z_.]+=.*?)`', settings))
        given.pop('reward_model.objective', None)
        own = data.options_of(given.pop('name'))
        for key in given:
            assert key in data.DataOptions._fields + ('template',) or key.partition('.')[0] in own, (path, key)


def test_a_data_set_of_ones_own_is_one_file(files):
    (files / 'countries').mkdir()
    (files / 'countries' / 'capitals_train.jsonl').write_bytes(cache.encode('x.jsonl', COUNTRIES))
    lima, missing = read(data.locate(options('capitals.py', '', folder='countries', please=True)))
    assert lima == Example('What is the capital of Peru? Please.', 'Lima', 0, {'subject': 'America'})
    with pytest.raises(BadInput, match=r"capitals_train.jsonl, line 2 .*field 'capital'"):
        raise missing
    assert {*data.options_of('capitals.py')} == {'folder', 'please'}


def test_a_data_set_of_ones_own_is_read_from_the_hub_where_its_folder_has_none(files, hub_cache):
    cache.write(hub_cache, 'me/capitals', OLD, {'data/train-00000-of-00001.parquet': COUNTRIES[:1]})
    (files / 'countries').mkdir()
    (files / 'countries' / 'gsm8k_train.jsonl').write_text('{}')
    located = data.locate(options('capitals.py', 'me/capitals', folder='countries'))
    assert [e.answer for e in read(located)] == ['Lima'] and located.origins[0].commit == OLD


def test_a_changed_file_is_read_again_and_one_without_examples_is_refused(files):
    path = files / 'mine.py'
    for count in (1, 2):
        path.write_text(
            'from grpo_jax.types import Example\n'
            f'def examples(split): return [Example(split, "", i, {{}}) for i in range({count})]\n'
        )
        os.utime(path, ns=(count, count))
        assert [e.id for e in data.examples('mine.py', {}, 'train')] == [*range(count)]
    path.write_text('')
    with pytest.raises(BadInput, match=r"^data.name = 'mine.py': has no examples\(split, .*; add this function"):
        data.examples('mine.py', {}, 'train')


def test_the_mixture_reads_each_of_its_sources_by_id(files, hub_cache):
    for path in ('openai/gsm8k', 'ChilleD/SVAMP'):
        cache.write(hub_cache, path, OLD, REPOSITORIES[path])
    config = runpy.run_path('problems.py')['get_config']()
    located = data.locate(data.DataOptions.from_config(config.data))
    assert {e.meta['source'] for e in read(located)} == {'gsm8k', 'svamp'}
