"""Folders in buckets: read as if they lay here, fetched once and on from where it stopped, and never written to."""

import json
import os
import pathlib
import subprocess
import sys
import zlib

from fsspec.implementations.memory import MemoryFileSystem
import pytest

from grpo_jax import data, train
from grpo_jax.errors import BadInput
from grpo_jax.hosts import buckets
from grpo_jax.models import hf
from grpo_jax.models.hf import families
from tests import hub_cache as rows
from tests import small_model, tiny_run
from tests.hub_cache import options


class Bucket(MemoryFileSystem):
    """A bucket in memory; `limit` bytes can still be read, and `read` are all that were."""

    protocol = 'gs'
    store, pseudo_dirs = {}, ['']
    limit, read = None, []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix('gs://'))

    def info(self, path, **options):
        entry = super().info(path, **options)
        return entry | {'md5Hash': zlib.crc32(super().cat_file(path))} if entry['type'] == 'file' else entry

    def find(self, path, **options):
        return {name: self.info(name) for name in super().find(path)}

    def cat_file(self, path, start=None, end=None, **options):
        content = super().cat_file(path, start, end, **options)
        if Bucket.limit is not None:
            if len(content) > Bucket.limit:
                raise ConnectionError('the network is gone')
            Bucket.limit -= len(content)
        Bucket.read.append(len(content))
        return content


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """Puts files, bytes by path, into the bucket `b`; an empty cache."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(Bucket, 'store', {})
    monkeypatch.setattr(Bucket, 'pseudo_dirs', [''])
    monkeypatch.setattr(Bucket, 'limit', None)
    monkeypatch.setattr(Bucket, 'read', [])
    # the module's name is also that of its table
    monkeypatch.setitem(sys.modules['fsspec.registry']._registry, 'gs', Bucket)
    system = Bucket(skip_instance_cache=True)

    def put(**files):
        for name, content in files.items():
            system.pipe_file(f'/b/{name}', content)

    put.system = system
    return put


def contents(folder):
    """Bytes by path of the files below a folder, except for what the cache knows of them."""
    paths = [path for path in pathlib.Path(folder).rglob('*') if path.is_file()]
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in paths if not path.name.startswith(buckets.LISTING)
    }


def test_a_model_in_a_bucket_is_a_folder_of_this_machine(bucket, tmp_path):
    folder = small_model.write(tmp_path / 'model')
    bucket(
        **{f'm/{name}': content for name, content in contents(folder).items()}, **{'m/notes.md': b'', 'm/x.bin': b'x'}
    )
    fetched = hf.find('gs://b/m')
    assert contents(fetched) == contents(folder)
    assert families.load_config(fetched) == families.load_config(folder)
    assert hf.load_tokenizer(fetched).encode('1+1') == hf.load_tokenizer(folder).encode('1+1')


def test_what_has_not_changed_is_read_once_and_what_is_gone_goes(bucket):
    bucket(**{'m/a.json': b'one', 'm/b.json': b'two', 'm/c.json': b'three'})
    folder = buckets.download('model.path', 'gs://b/m', ['*.json'])
    assert sum(Bucket.read) == 11
    assert buckets.download('model.path', 'gs://b/m', ['*.json']) == folder and sum(Bucket.read) == 11
    bucket(**{'m/b.json': b'TWO'})  # as long as before
    bucket.system.rm_file('/b/m/c.json')
    assert contents(buckets.download('model.path', 'gs://b/m', ['*.json'])) == {'a.json': b'one', 'b.json': b'TWO'}
    assert sum(Bucket.read) == 14


def test_a_file_that_came_in_part_is_read_on_from_there(bucket, monkeypatch):
    monkeypatch.setattr(buckets, 'CHUNK', 10)
    content = bytes(range(95))
    bucket(**{'m/a.json': content})
    Bucket.limit = 47
    with pytest.raises(
        BadInput, match=r"^model.path = 'gs://b/m': cannot be read, ConnectionError: the network is gone"
    ):
        buckets.download('model.path', 'gs://b/m', ['*.json'])
    Bucket.limit = None
    assert contents(buckets.download('model.path', 'gs://b/m', ['*.json'])) == {'a.json': content}
    assert sum(Bucket.read) == 95


def test_a_part_of_what_has_changed_meanwhile_is_left(bucket, monkeypatch):
    monkeypatch.setattr(buckets, 'CHUNK', 10)
    bucket(**{'m/a.json': b'a' * 95})
    Bucket.limit = 47
    with pytest.raises(BadInput):
        buckets.download('model.path', 'gs://b/m', ['*.json'])
    Bucket.limit = None
    bucket(**{'m/a.json': b'b' * 95})
    assert contents(buckets.download('model.path', 'gs://b/m', ['*.json'])) == {'a.json': b'b' * 95}


def test_no_name_leads_out_of_the_cache(bucket, tmp_path):
    bucket(**{'m/a.json': b'a', f'm/{buckets.LISTING}': b'[]'})
    bucket.system.store['/b/m/../../../../../mine.json'] = bucket.system.store['/b/m/a.json']
    folder = buckets.download('model.path', 'gs://b/m', ['*.json'])
    assert contents(folder) == {'a.json': b'a'} and not list(tmp_path.rglob('mine.json'))


FIELDS = {'prompt_field': 'question', 'answer_field': 'answer'}


@pytest.mark.parametrize(
    'folder, file, name, fields',
    [
        ('gs://b/d', 'gsm8k_{split}.jsonl', 'gsm8k', {}),
        ('gs://b/d/', 'gsm8k_{split}.jsonl', 'gsm8k', {}),
        ('gs://b/d/{split}', '{split}/{split}.jsonl', 'files', FIELDS),
        ('gs://b/d/mine_{split}.jsonl', 'mine_{split}.jsonl', 'files', FIELDS),
    ],
)
def test_data_in_a_bucket_are_read_and_recorded_by_their_url(bucket, folder, file, name, fields):
    for split in ('train', 'test'):
        lines = [{'question': f'{split}?', 'answer': '#### 1'}]
        bucket(**{'d/' + file.replace('{split}', split): rows.encode('x.jsonl', lines)})
    located = data.locate(options(name, '', folder=folder, **fields))
    assert [example.prompt for example in rows.read(located)] == ['train?']
    assert located.origins[0].folder == folder


REFUSED = {
    'gs://b': 'has 1 files, none like',
    'gs://b/absent': 'has 0 files, none like',
    'gs://': 'is nothing like gs://BUCKET/PATH; begin it with one of gs, s3',
    'gs:/b/m': 'is nothing like gs://BUCKET/PATH',
    'gs://b/../m': 'is nothing like gs://BUCKET/PATH',
    'http://b/m': 'is nothing like gs://BUCKET/PATH',
    'file:///etc': 'is nothing like gs://BUCKET/PATH',
}


@pytest.mark.parametrize('url', REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(bucket, url):
    bucket(**{'x.md': b''})
    with pytest.raises(BadInput, match=f'^model.path = .*{REFUSED[url]}'):
        hf.find(url)


def test_without_the_package_of_a_bucket_one_line_names_it_and_the_mount(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setitem(sys.modules, 's3fs', None)
    with pytest.raises(BadInput, match=r'needs a package; run `pip install s3fs`, or mount the bucket'):
        hf.find('s3://b/m')


@pytest.mark.parametrize('path', ['gs://b/runs/x', 'gs:/b/runs/x', 's3://b/x'])
def test_a_workdir_in_a_bucket_is_refused_and_nothing_is_made(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=f'^--workdir = .{path}.: must be a folder of this machine; mount the bucket'):
        train.run(tiny_run.config(), path)
    assert not os.listdir(tmp_path)


def test_a_command_refuses_a_folder_in_a_bucket(tmp_path):
    command = [sys.executable, '-m', 'grpo_jax', 'export', '--workdir=x', '--out=gs://b/out']
    ended = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {'PYTHONPATH': os.getcwd()}, capture_output=True, text=True
    )
    assert ended.returncode == 2 and ended.stderr.splitlines()[-1].startswith("error: --out = 'gs://b/out': must be")
    assert not os.listdir(tmp_path)


def test_the_listing_of_the_cache_is_json(bucket):
    bucket(**{'m/a.json': b'one'})
    folder = buckets.download('model.path', 'gs://b/m', ['*.json'])
    with open(os.path.join(folder, buckets.LISTING), encoding='utf8') as file:
        assert json.load(file)['a.json']['size'] == '3'
