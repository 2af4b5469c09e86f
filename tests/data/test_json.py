"""JSON files: one list of objects, or what is called JSON and has an object a line."""

import pytest

from grpo_jax.data import jsonl
from grpo_jax.errors import BadInput

LISTS = {
    'a list': (b'[{"q": 1}, {"q": 2}]', [{'q': 1}, {'q': 2}]),
    'a byte order mark': (b'\xef\xbb\xbf [{"q": 1}]', [{'q': 1}]),
    'a row a line': (b'{"q": 1}\n{"q": 2}\n', [{'q': 1}, {'q': 2}]),
    'an empty list': (b'[]', []),
}
NO_LISTS = {
    'cut off': (b'[{"q": 1}, {"q"', 'delimiter'),
    'a key twice': (b'[{"q": 1, "q": 2}]', 'a key comes twice'),
    'NaN': (b'[{"q": NaN}]', 'NaN is not JSON'),
    'two lists': (b'[{"q": 1}][{"q": 1}]', 'Extra data'),
    'Latin-1': ('[{"q": "é"}]'.encode('latin1'), "can't decode"),
    'nesting without end': (b'[' * 100000, 'recursion'),
}


@pytest.mark.parametrize('name', LISTS)
def test_a_json_file_is_read(tmp_path, name):
    content, rows = LISTS[name]
    (tmp_path / 'train.json').write_bytes(content)
    assert [row for _, row in jsonl.read_list(str(tmp_path / 'train.json'))] == rows


@pytest.mark.parametrize('name', NO_LISTS)
def test_a_json_file_that_is_none_is_refused(tmp_path, name):
    content, words = NO_LISTS[name]
    (tmp_path / 'train.json').write_bytes(content)
    with pytest.raises(BadInput, match=f'data file.*train.json.*{words}'):
        list(jsonl.read_list(str(tmp_path / 'train.json')))


def test_half_a_surrogate_pair_in_a_list_is_the_fault_of_its_row(tmp_path):
    (tmp_path / 'train.json').write_bytes(b'[{"q": "\\ud83d"}, {"q": 1}]')
    (_, first), (_, second) = jsonl.read_list(str(tmp_path / 'train.json'))
    assert isinstance(first, BadInput) and second == {'q': 1}


def test_a_list_too_large_for_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, 'LARGEST', 10)
    (tmp_path / 'train.json').write_bytes(b'[{"q": 1}, {"q": 2}]')
    with pytest.raises(BadInput, match='more than 10 bytes; make it JSONL or Parquet'):
        list(jsonl.read_list(str(tmp_path / 'train.json')))
