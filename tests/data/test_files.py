"""The same examples from every format that a data set may lie in."""

import json
import os
import re
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from grpo_jax.data import files, gsm8k, jsonl, records
from grpo_jax.errors import BadInput
from grpo_jax.tools import prepare
from grpo_jax.types import Example

# as verl writes them
ROWS = [
    {
        'prompt': [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': f'é {i}?'}],
        'reward_model': {'style': 'rule', 'ground_truth': str(10 * i)},
        'level': i,
    }
    for i in range(5)
]
CHAT = {'prompt_field': 'prompt', 'answer_field': 'reward_model.ground_truth'}
SPLITS = {'train': ROWS, 'test': ROWS[3:]}


def table(rows):
    return pyarrow.Table.from_pylist(rows)


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table(rows), path, row_group_size=2)


def save_to_disk(folder, rows, split=None):
    """As Dataset.save_to_disk of `datasets` 5.2 with two shards; the cache file of a map lies there too."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f'data-{i:05d}-of-00002.arrow' for i in range(2)]
    for name, part in [*zip(names, [rows[:2], rows[2:]], strict=True), ('cache-1b2c.arrow', rows[:1])]:
        with pyarrow.ipc.new_stream(folder / name, table(rows).schema) as writer:
            writer.write_table(table(part), max_chunksize=1)
    state = {
        '_data_files': [{'filename': name} for name in names],
        '_fingerprint': '766c72bda8868ac5',
        '_format_columns': None,
        '_format_kwargs': {},
        '_format_type': None,
        '_output_all_columns': False,
        '_split': split,
    }
    (folder / 'state.json').write_text(json.dumps(state))
    (folder / 'dataset_info.json').write_text('{"citation": "", "description": "", "features": {}}')


def whole(write, name):
    """Writer of one file of each split."""

    def run(folder):
        for split, all_rows in SPLITS.items():
            write(folder / name.format(split), all_rows)
        return folder

    return run


def sharded(write, name):
    """Writer of three shards of each split."""

    def run(folder):
        for split, all_rows in SPLITS.items():
            for i, part in enumerate([all_rows[:1], all_rows[1:2], all_rows[2:]]):
                write(folder / name.format(split=split, i=i), part)
        return folder

    return run


def in_folders(folder):
    (folder / 'dataset_dict.json').write_text('{"splits": ["train", "test"]}')
    return whole(save_to_disk, '{}')(folder)


FORMATS = {
    'jsonl': whole(write_jsonl, '{}.jsonl'),
    'parquet': whole(write_parquet, '{}.parquet'),
    'shards of jsonl': sharded(write_jsonl, '{split}-{i:05d}-of-00003.jsonl'),
    'a folder from the hub': sharded(write_parquet, 'data/{split}-{i:05d}-of-00003.parquet'),
    'an old folder from the hub': sharded(write_parquet, 'data/{split}-{i:05d}-of-00003-a09b74b3ef9c3b56.parquet'),
    'a folder that the hub converted': sharded(write_parquet, '{split}/{i:04d}.parquet'),
    'a DatasetDict': in_folders,
    'Datasets side by side': lambda folder: whole(save_to_disk, 'mine_{}')(folder) / 'mine_{split}',
    'files of other names': lambda folder: whole(write_parquet, '{}_v2.parquet')(folder) / '{split}_v2.parquet',
    'folders of other names': lambda folder: whole(write_jsonl, 'x[1]/{0}_v2/{0}.jsonl')(folder) / 'x[1]/{split}_v2',
}


@pytest.mark.parametrize('name', FORMATS)
@pytest.mark.parametrize('split', SPLITS)
def test_every_format_gives_the_same_examples(tmp_path, name, split):
    found = files.examples(split, folder=str(FORMATS[name](tmp_path)), **CHAT)
    assert found == [
        Example(row['prompt'][1]['content'], row['reward_model']['ground_truth'], i, row, tuple(row['prompt']))
        for i, row in enumerate(SPLITS[split])
    ]


def test_dataset_of_one_split_is_that_split_alone(tmp_path):
    save_to_disk(tmp_path, ROWS, split='train')
    assert len(files.examples('train', folder=str(tmp_path), **CHAT)) == 5
    with pytest.raises(BadInput, match='holds the split train, not test'):
        files.examples('test', folder=str(tmp_path), **CHAT)


def test_one_file_is_not_served_as_every_split(tmp_path):
    write_jsonl(tmp_path / 'all.jsonl', ROWS)
    with pytest.raises(BadInput, match='is one file for all splits'):
        files.examples('test', folder=str(tmp_path / 'all.jsonl'), **CHAT)


def test_field_of_a_field_and_the_users_last_words():
    row = {
        'a': {'b': {'c': 1.5}},
        'a.b': 'flat',
        'chat': [
            {'role': 'user', 'content': 'first'},
            {'role': 'assistant', 'content': 'no'},
            {'role': 'user', 'content': 'x'},
            {'role': 'assistant', 'content': '<think>'},
        ],
    }
    assert records.text_field(row, 'a.b.c', '') == '1.5'
    assert records.text_field(row, 'a.b', '') == 'flat'  # the field of that very name first
    assert records.read_prompt(row, 'chat', '') == ('x', tuple(row['chat']))
    for field in ('a.c', 'a.b.c.d', 'chat.role', 'chat'):
        with pytest.raises(BadInput, match=f'line 1 .*field {field!r}'):
            records.text_field(row, field, 'line 1')


def test_malformed_rows_of_a_table_are_reported_by_their_number(tmp_path):
    offsets = np.arange(5, dtype=np.int32)
    broken = pyarrow.StringArray.from_buffers(4, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b'x\xffyz'))
    answers = pyarrow.array([1.0, 2.0, None, float('nan')])
    pyarrow.parquet.write_table(pyarrow.table({'q': broken, 'a': answers}), tmp_path / 'train.parquet')
    found = files.examples('train', folder=str(tmp_path), prompt_field='q', answer_field='a')
    assert found[0] == Example('x', '1', 0, {'q': 'x', 'a': 1.0})
    for index, reason in [(1, "can't decode byte 0xff"), (2, "has nothing in field 'a'"), (3, 'no finite number')]:
        assert str(found[index]).startswith(f'{tmp_path / "train.parquet"}, row {index} ')
        assert reason in str(found[index])


@pytest.mark.parametrize('suffix', ['parquet', 'arrow'])
@pytest.mark.parametrize('content', [b'', b'<!DOCTYPE html>' * 20, 0.6, 0.98], ids=str)
def test_damaged_file_is_refused_by_name(tmp_path, suffix, content):
    if isinstance(content, float):  # the share of a whole file that came
        write_parquet(tmp_path / 'whole.parquet', ROWS)
        save_to_disk(tmp_path, ROWS)
        name = {'parquet': 'whole.parquet', 'arrow': 'data-00001-of-00002.arrow'}[suffix]
        intact = (tmp_path / name).read_bytes()
        content = intact[: int(content * len(intact))]
    (tmp_path / f'train.{suffix}').write_bytes(content)
    with pytest.raises(BadInput, match=rf"train.{suffix}': is damaged at row \d"):
        files.examples('train', folder=str(tmp_path / ('{split}.' + suffix)), **CHAT)


def test_missing_shard_is_refused(tmp_path):
    FORMATS['a folder from the hub'](tmp_path)
    os.remove(tmp_path / 'data' / 'train-00001-of-00003.parquet')
    with pytest.raises(BadInput, match='is one of 3 shards, but 2 are there'):
        files.examples('train', folder=str(tmp_path), **CHAT)


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / 'train.txt').write_text('q,a\n')
    with pytest.raises(BadInput, match=r"train.txt': is none of .jsonl, .parquet, .arrow"):
        files.examples('train', folder=str(tmp_path / '{split}.txt'), **CHAT)
    with pytest.raises(BadInput, match=r'holds no train.jsonl or .parquet.* \(it has no subfolders, and train.txt\)'):
        files.examples('train', folder=str(tmp_path), **CHAT)
    with pytest.raises(BadInput, match=r'train.jsonl.*no such file'):
        list(jsonl.read(str(tmp_path / 'train.jsonl')))


# tensorflow-datasets

GSM8K = [
    {'question': 'How much is 1+1? é', 'answer': 'Well.\n#### 2'},
    {'question': 'Many?', 'answer': 'x #### y\n#### 1,234'},
    {'question': 'Cold?', 'answer': 'Yes.\n#### -3'},
]


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """GSM8K and MATH as tensorflow-datasets folders; the second row of either is malformed."""
    folder = tmp_path_factory.mktemp('prepared')
    for split in ('train', 'test'):
        write_jsonl(folder / f'gsm8k_{split}.jsonl', [GSM8K[0], {'question': 'x'}, *GSM8K[1:]])
        write_jsonl(
            folder / f'math_{split}.jsonl',
            [
                {'problem': 'p', 'answer': '\\frac12', 'level': 3, 'subject': None},
                {'problem': ''},
                {'problem': split, 'answer': '7', 'other': 1},
            ],
        )
    return [prepare.prepare(name, str(folder), str(folder / 'out')) for name in ('gsm8k', 'math')]


def test_gsm8k_from_tensorflow_datasets_is_that_from_the_file_and_needs_no_tensorflow(prepared):
    source = os.path.dirname(os.path.dirname(os.path.dirname(prepared[0])))
    for split in ('train', 'test'):
        found, bad = records.split_malformed(gsm8k.examples(split, folder=prepared[0]))
        assert found == records.split_malformed(gsm8k.examples(split, folder=source))[0]
        assert [(e.id, e.answer) for e in found] == [(0, '2'), (2, '1234'), (3, '-3')]
        assert [str(error).split(' = ')[0] for error in bad] == [f'{prepared[0]}, {split} row 1']
    assert 'tensorflow' not in sys.modules


def test_bytes_that_are_no_text_are_reported(tmp_path):
    latin = {'question': b'\xff', 'answer': b'#### 1'}
    builder = prepare.FromFiles('gsm8k', {'train': [GSM8K[0], latin]}, str(tmp_path))
    builder.download_and_prepare(download_dir=str(tmp_path / 'downloads'))
    good, bad = gsm8k.examples('train', folder=builder.data_dir)
    assert good.answer == '2' and re.search(r"train row 1 = .*can't decode byte 0xff", str(bad))


def test_math_from_tensorflow_datasets(prepared):
    first, bad, last = files.examples('test', folder=prepared[1], prompt_field='problem', answer_field='answer')
    assert first == Example('p', '\\frac12', 0, {'problem': 'p', 'answer': '\\frac12', 'level': '3', 'subject': ''})
    assert (last.prompt, last.answer, last.id) == ('test', '7', 2) and isinstance(bad, BadInput)


def test_split_that_was_not_prepared_and_files_that_need_tensorflow_are_refused(prepared, tmp_path):
    with pytest.raises(BadInput, match=r"has no split validation, only \['test', 'train'\]"):
        gsm8k.examples('validation', folder=prepared[0])
    for name in ('features.json', 'dataset_info.json'):
        with open(os.path.join(prepared[0], name), encoding='utf8') as file:
            (tmp_path / name).write_text(file.read().replace('array_record', 'tfrecord'))
    with pytest.raises(BadInput, match='holds tfrecord files, which need tensorflow'):
        gsm8k.examples('train', folder=str(tmp_path))


def test_prepared_folder_is_not_overwritten(prepared):
    out = os.path.dirname(os.path.dirname(prepared[0]))
    with pytest.raises(BadInput, match='nothing is overwritten'):
        prepare.prepare('gsm8k', os.path.dirname(out), out)


def test_real_data_sets_are_the_same_prepared(real, tmp_path, long):
    for name, fields in [('gsm8k', ('question', 'answer')), ('math', ('problem', 'answer'))]:
        source = os.path.join(real, 'math', f'{name}_{{split}}.jsonl')
        folder = prepare.prepare(name, source, str(tmp_path))
        for split in ('train', 'test'):
            both = [
                [
                    (e.prompt, e.answer, e.id)
                    for e in records.split_malformed(
                        files.examples(split, folder=place, prompt_field=fields[0], answer_field=fields[1])
                    )[0]
                ]
                for place in (source, folder)
            ]
            assert both[0] == both[1] and len(both[0]) > 1000
