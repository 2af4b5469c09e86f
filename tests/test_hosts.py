"""Files and folders on a shared disk appear whole or not at all."""

import os

import pytest

from grpo_jax.hosts import files, json_file


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    path = tmp_path / 'a'
    path.write_text('old')
    with files.atomic_write(path) as file:
        file.write('né')
        assert path.read_text() == 'old'
    assert path.read_bytes() == 'né'.encode()
    with files.atomic_write(path, 'wb') as file:
        file.write(b'\xff')
    assert path.read_bytes() == b'\xff'
    assert os.listdir(tmp_path) == ['a']


def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    path = tmp_path / 'a.json'
    json_file.write(path, {'a': 1})
    with pytest.raises(TypeError):
        json_file.write(path, {'a': 2, 'b': object()})
    assert json_file.read(path) == {'a': 1}
    assert os.listdir(tmp_path) == ['a.json']


def test_a_folder_appears_when_it_is_filled(tmp_path):
    (tmp_path / 'out.writing').mkdir()
    (tmp_path / 'out.writing' / 'left over').touch()
    with files.atomic_folder(tmp_path / 'out') as folder:
        with open(os.path.join(folder, 'a'), 'w', encoding='utf8') as file:
            file.write('1')
        assert not (tmp_path / 'out').exists()
    assert os.listdir(tmp_path) == ['out'] and os.listdir(tmp_path / 'out') == ['a']


def test_an_error_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), files.atomic_folder(tmp_path / 'out'):
        raise KeyError
    assert os.listdir(tmp_path) == []


def test_a_full_folder_is_not_replaced(tmp_path):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'a').touch()
    with pytest.raises(OSError), files.atomic_folder(tmp_path / 'out'):
        pass
    assert os.listdir(tmp_path / 'out') == ['a'] and os.listdir(tmp_path) == ['out']
