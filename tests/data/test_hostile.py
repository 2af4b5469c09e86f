"""Hundreds of malformed inputs for every reader: each ends in a BadInput of one line, or in rows that are right."""

import json
import math
import os
import random
import shutil

from ml_collections import ConfigDict
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from grpo_jax import data, reward_model
from grpo_jax.configs import arithmetic as demo
from grpo_jax.data import code, files, records
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.hosts import json_file
from grpo_jax.models import hf
from grpo_jax.models.hf import families
from grpo_jax.models.hf import tensors as tensor_files
from tests import tiny_run

MODEL = os.path.join(os.path.dirname(demo.__file__), 'models', 'characters')
FIELDS = {'prompt_field': 'q', 'answer_field': 'a'}
ROWS = [{'q': f'{i}+{i}=', 'a': str(2 * i)} for i in range(4)]
RIGHT = {(row['q'], row['a']) for row in ROWS}
# values of a field that are no text, and what text they are where they are any
VALUES = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [1, 2],
    [None],
    {'a': 1},
    '',
    ' ',
    '\t\n',
    math.nan,
    math.inf,
    10**400,
    'x' * 9000,
]
CHATS = [
    [{}],
    [{'role': 'user'}],
    [{'content': 'x'}],
    [{'role': 1, 'content': 'x'}],
    [{'role': ['user'], 'content': 'x'}],
    [{'role': 'user', 'content': 1}],
    [{'role': 'user', 'content': None}],
    [{'role': 'user', 'content': {}}],
    [{'role': 'user', 'content': ['x']}],
    [{'role': 'user', 'content': [{}]}],
    [{'role': 'user', 'content': [{'type': 'text'}]}],
    [{'role': 'user', 'content': [{'type': 'text', 'text': 1}]}],
    [{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'x'}}]}],
    [{'role': 'user', 'content': []}],
    [{'role': 'assistant', 'content': 'x'}],
    [{'role': 'human', 'content': 'x'}],
    [{'from': 'human', 'value': 1}],
    [{'role': 'user', 'content': 'x'}, None],
    [{'role': 'user', 'content': 'x'}, 'y'],
    [[{'role': 'user', 'content': 'x'}]],
    {'role': 'user', 'content': 'x'},
]


def refused(thing, act):
    """Asserts that act ends in a BadInput of one short line, or returns; returns its result, or the error."""
    try:
        result = act()
    except BadInput as error:
        result = error
    if isinstance(result, BadInput):
        assert str(result).count('\n') == 0 and 10 < len(str(result)) < 1500, (thing, str(result))
    return result


def check_rows(thing, act):
    """Asserts that every row is one of the right ones, or a BadInput of one line."""
    result = refused(thing, act)
    for row in [] if isinstance(result, BadInput) else result:
        if isinstance(row, BadInput):
            assert str(row).count('\n') == 0 and len(str(row)) < 1500, (thing, str(row))
        else:
            assert (row.prompt, row.answer) in RIGHT, (thing, row)
    return result


def damage(content, seed):
    """The bytes of a file: cut, with a byte changed, or with a piece doubled, left out or replaced by zeros."""
    rng = random.Random(seed)
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice([1, 1, 4, 60]))
    middle = [
        bytes([content[start] ^ (1 << rng.randrange(8))]) + content[start + 1 : end],
        b'',
        content[start:end] * 2,
        bytes(end - start),
        rng.randbytes(end - start),
    ]
    return content[:start] if rng.random() < 0.2 else content[:start] + rng.choice(middle) + content[end:]


def encode(rows, suffix, path):
    """The bytes of rows in a format."""
    if suffix == 'jsonl':
        return ''.join(json.dumps(row) + '\n' for row in rows).encode()
    if suffix == 'json':
        return json.dumps(rows).encode()
    table = pyarrow.Table.from_pylist(rows)
    if suffix == 'parquet':
        pyarrow.parquet.write_table(table, path, compression='none', write_page_checksum=True)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return path.read_bytes()


def read(folder):
    return files.examples('train', folder=str(folder), **FIELDS)


@pytest.mark.parametrize('field', ['q', 'a'])
def test_a_row_with_another_value_in_a_field_is_reported(tmp_path, field):
    values = VALUES + (CHATS if field == 'q' else [])
    for i, value in enumerate(values):
        row = {'q': 'x', 'a': '1'} | {field: value}
        path = tmp_path / 'train.jsonl'
        path.write_text(json.dumps(ROWS[0]) + '\n' + json.dumps(row) + '\n')
        sound, second = refused(value, lambda: read(tmp_path))
        if isinstance(value, str) and value.strip():
            assert getattr(second, {'q': 'prompt', 'a': 'answer'}[field]) == value
        elif value == 10**400 and not isinstance(value, float):
            assert getattr(second, {'q': 'prompt', 'a': 'answer'}[field]) == str(value)
        else:
            assert isinstance(second, BadInput) and str(second).startswith(f'{path}, line 2 '), (i, value, second)
            assert len(str(second)) < 1500
        assert (sound.prompt, sound.answer) in RIGHT


# whether a change of one bit within a text can be noticed depends on the format: JSON has no checksum
@pytest.mark.parametrize('suffix', ['jsonl', 'json', 'parquet', 'arrow'])
def test_a_damaged_file_gives_no_traceback(tmp_path, suffix):
    content = encode(ROWS, suffix, tmp_path / 'whole')
    os.makedirs(tmp_path / 'data')
    for seed in range(60):
        (tmp_path / 'data' / f'train.{suffix}').write_bytes(damage(content, seed))
        rows = refused(seed, lambda: read(tmp_path / 'data'))
        for row in [] if isinstance(rows, BadInput) else rows:
            assert isinstance(row, BadInput) or (row.prompt.strip() and isinstance(row.answer, str))


def test_a_damaged_page_of_parquet_gives_no_wrong_row(tmp_path):
    content = encode(ROWS, 'parquet', tmp_path / 'whole')
    start = content.index(b'0+0=')
    for place in range(start, start + 24):
        changed = bytearray(content)
        changed[place] ^= 4
        (tmp_path / 'train.parquet').write_bytes(changed)
        check_rows(place, lambda: read(tmp_path))


TABLES = {
    'columns of one name': pyarrow.table([['x'], ['y'], ['1']], names=['q', 'q', 'a']),
    'answers of one name': pyarrow.table([['x'], ['1'], ['2']], names=['q', 'a', 'a']),
    'fields of one name': pyarrow.table(
        {
            'q': ['x'],
            'a': pyarrow.StructArray.from_arrays([pyarrow.array(['1']), pyarrow.array(['2'])], names=['b', 'b']),
        }
    ),
    'fields of one name in a list': pyarrow.table(
        {
            'q': ['x'],
            'a': ['1'],
            'm': pyarrow.ListArray.from_arrays(
                [0, 1], pyarrow.StructArray.from_arrays([pyarrow.array(['1']), pyarrow.array(['2'])], names=['b', 'b'])
            ),
        }
    ),
    'no columns': pyarrow.table({}),
    'no rows': pyarrow.table({'q': [], 'a': []}),
    'bytes': pyarrow.table({'q': [b'\xff'], 'a': [b'1']}),
    'times': pyarrow.table({'q': ['x'], 'a': pyarrow.array([2**62], pyarrow.timestamp('s'))}),
    'a date beyond all': pyarrow.table({'q': ['x'], 'a': pyarrow.array([2**31 - 1], pyarrow.date32())}),
    'durations': pyarrow.table({'q': ['x'], 'a': pyarrow.array([2**62], pyarrow.duration('s'))}),
    'maps': pyarrow.table(
        {'q': ['x'], 'a': pyarrow.array([[('a', 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int8()))}
    ),
    'nulls': pyarrow.table({'q': pyarrow.nulls(1), 'a': pyarrow.nulls(1)}),
    'truth values': pyarrow.table({'q': ['x'], 'a': [True]}),
    'not a number': pyarrow.table({'q': ['x'], 'a': pyarrow.array([math.nan], pyarrow.float32())}),
    'infinity': pyarrow.table({'q': ['x'], 'a': pyarrow.array([math.inf], pyarrow.float16())}),
    'lists': pyarrow.table({'q': ['x'], 'a': [[1.5, 2.5]]}),
}


@pytest.mark.parametrize('suffix', ['parquet', 'arrow'])
@pytest.mark.parametrize('name', TABLES)
def test_a_table_of_other_columns_gives_no_row(tmp_path, name, suffix):
    path = tmp_path / f'train.{suffix}'
    if suffix == 'arrow':
        with pyarrow.ipc.new_stream(path, TABLES[name].schema) as writer:
            writer.write_table(TABLES[name])
    else:
        try:
            pyarrow.parquet.write_table(TABLES[name], path)
        except (pyarrow.ArrowException, ValueError):
            pytest.skip('Parquet has no such type')
    rows = refused(name, lambda: read(tmp_path))
    assert isinstance(rows, BadInput) or all(isinstance(row, BadInput) for row in rows), rows
    if 'one name' in name:
        assert isinstance(rows, BadInput) and 'more than once' in str(rows)


@pytest.mark.parametrize(
    'values, kind, texts',
    [
        ([0.1, 18.0, 2.5, -0.0], pyarrow.float32(), ['0.1', '18', '2.5', '0']),
        ([0.1, 1024.0], pyarrow.float16(), ['0.1', '1024']),
        ([0.1, 18.0, 1e-05, 1e22], pyarrow.float64(), ['0.1', '18', '0.00001', '1' + '0' * 22]),
        ([1, -3], pyarrow.int8(), ['1', '-3']),
        (['1.50', '18.0'], pyarrow.string(), ['1.50', '18.0']),  # a text stays as it is
    ],
)
@pytest.mark.parametrize('nested', [False, True])
def test_a_number_in_a_table_is_written_in_the_decimals_that_it_was_made_of(tmp_path, values, kind, texts, nested):
    answers = pyarrow.array(values, kind)
    column = pyarrow.StructArray.from_arrays([answers], names=['b']) if nested else answers
    table = pyarrow.table({'q': ['x'] * len(values), 'a': column})
    pyarrow.parquet.write_table(table, tmp_path / 'train.parquet')
    rows = files.examples('train', folder=str(tmp_path), prompt_field='q', answer_field='a.b' if nested else 'a')
    assert [row.answer for row in rows] == texts


def test_a_decimal_is_written_without_zeros_behind(tmp_path):
    answers = pyarrow.array(['18.00', '0.10', '100.00']).cast(pyarrow.decimal128(9, 2))
    pyarrow.parquet.write_table(pyarrow.table({'q': ['x'] * 3, 'a': answers}), tmp_path / 'train.parquet')
    assert [row.answer for row in read(tmp_path)] == ['18', '0.1', '100']


# values that stand in place of any JSON value, and texts that stand in place of any JSON file
WRONG = [None, True, 0, -1, 1.5, 10**30, math.nan, '', 'x', [], {}, [[]], ['x', 1], {'x': 1}]
TEXTS = [b'', b'{', b'[]', b'null', b'1', b'"x"', b'\xff\xfe', b'[' * 100000, b'{"a": 1, }', b'<html>', b'{}', bytes(9)]


def mutants(intact):
    """Yields each JSON value with one of its own fields replaced or left out, one level deep."""
    for key in intact:
        yield {name: value for name, value in intact.items() if name != key}
        yield from (intact | {key: value} for value in WRONG)


def test_a_damaged_state_json_is_refused(tmp_path):
    intact = {'_data_files': [{'filename': 'data.arrow'}], '_split': 'train'}
    encode(ROWS, 'arrow', tmp_path / 'data.arrow')
    (tmp_path / 'state.json').write_text(json.dumps(intact))
    assert len(read(tmp_path)) == 4
    texts = TEXTS + [json.dumps(mutant).encode() for mutant in mutants(intact)]
    texts += [json.dumps(intact | {'_data_files': [{'filename': value}]}).encode() for value in WRONG]
    for text in texts:
        (tmp_path / 'state.json').write_bytes(text)
        assert isinstance(check_rows(text, lambda: read(tmp_path)), BadInput), text


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """A folder of tensorflow-datasets."""
    from grpo_jax.tools import prepare

    folder = tmp_path_factory.mktemp('prepared')
    rows = [{'question': row['q'], 'answer': f'#### {row["a"]}'} for row in ROWS]
    for split in ('train', 'test'):
        (folder / f'gsm8k_{split}.jsonl').write_bytes(encode(rows, 'jsonl', None))
    return prepare.prepare('gsm8k', str(folder), str(folder / 'out'))


@pytest.mark.parametrize('name', ['features.json', 'dataset_info.json'])
def test_a_damaged_folder_of_tensorflow_datasets_is_refused(tmp_path, prepared, name):
    folder = tmp_path / os.path.basename(prepared)
    shutil.copytree(prepared, folder)
    intact = (folder / name).read_bytes()
    texts = TEXTS + [json.dumps(mutant).encode() for mutant in mutants(json.loads(intact))][::7]
    texts += [damage(intact, seed) for seed in range(25)]
    for text in texts:
        (folder / name).write_bytes(text)
        rows = refused(text, lambda: files.examples('train', folder=str(folder), prompt_field='question'))
        for row in [] if isinstance(rows, BadInput) else rows:
            assert isinstance(row, BadInput) or (row.prompt, row.answer[5:]) in RIGHT, (text, row)


def test_damaged_records_of_tensorflow_datasets_are_refused(tmp_path, prepared):
    folder = tmp_path / os.path.basename(prepared)
    shutil.copytree(prepared, folder)
    (path,) = folder.glob('*train*')
    intact = path.read_bytes()
    for content in [b'', intact[: len(intact) // 2], bytes(len(intact)), intact[:-1], b'<html>']:
        path.write_bytes(content)
        rows = refused(content, lambda: files.examples('train', folder=str(folder), prompt_field='question'))
        assert isinstance(rows, BadInput) or all(isinstance(row, BadInput) for row in rows), rows
    path.unlink()
    assert isinstance(refused('none', lambda: files.examples('train', folder=str(folder))), BadInput)


@pytest.fixture
def model(tmp_path):
    """The demo's model folder, to damage."""
    shutil.copytree(MODEL, tmp_path / 'model')
    return tmp_path / 'model'


SIZES = (
    *('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'num_key_value_heads'),
    *('intermediate_size', 'head_dim', 'max_position_embeddings'),
)


def test_a_config_json_that_no_model_has_is_refused(model):
    intact = json.loads((model / 'config.json').read_text())
    families.load_config(model)
    for name in SIZES:
        for value in (0, -1, 1.5, '4', True, [], {}, 2**40, math.nan, None):
            (model / 'config.json').write_text(json.dumps(intact | {name: value}))
            result = refused((name, value), lambda: families.load_config(model))
            # transformers has a default for what is null
            assert isinstance(result, BadInput) or value is None, (name, value, result)
    others = {
        'model_type': [None, 1, [], {}, 'gpt2', ''],
        'rms_norm_eps': [0, -1e-6, 2, '1e-6', math.nan, [], True],
        'rope_theta': [0, -1.0, 1, 'x', math.nan, math.inf, []],
        'rope_scaling': [
            *([], 'linear', 1, {}, {'rope_type': 'linear'}, {'rope_type': 'linear', 'factor': 0}, {'rope_type': []}),
            *({'rope_type': 'linear', 'factor': 'x'}, {'rope_type': 'llama3', 'factor': 8.0}, {'rope_type': 'dynamic'}),
        ],
        'tie_word_embeddings': ['yes', 1, []],
        'attention_bias': ['no', 0, None, []],
        'hidden_act': ['relu', 1, None, []],
    }
    for name, values in others.items():
        for value in values:
            (model / 'config.json').write_text(json.dumps(intact | {name: value}))
            result = refused((name, value), lambda: families.load_config(model))
            assert isinstance(result, BadInput) or value in ({}, [], None), (name, value, result)
    for text in TEXTS:
        (model / 'config.json').write_bytes(text)
        assert isinstance(refused(text, lambda: families.load_config(model)), BadInput), text


def test_stop_ids_that_are_no_tokens_are_refused(model):
    tokenizer = hf.load_tokenizer(str(model))
    path = model / 'generation_config.json'
    for value in ([98], 5, [0, 1], None, []):
        path.write_text(json.dumps({'eos_token_id': value}))
        assert 1 in hf.stop_tokens(model, tokenizer, 99)
    for value in [99, -1, 1.0, '1', True, [[]], [1, 99], ['</s>'], {}, [None], 10**30, math.nan]:
        path.write_text(json.dumps({'eos_token_id': value}))
        error = refused(value, lambda: hf.stop_tokens(model, tokenizer, 99))
        assert isinstance(error, BadInput) and 'eos_token_id' in str(error), value
    for text in TEXTS[:-2] + TEXTS[-1:]:
        path.write_bytes(text)
        assert isinstance(refused(text, lambda: hf.stop_tokens(model, tokenizer, 99)), BadInput), text


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json'])
def test_a_damaged_tokenizer_is_refused_or_reads_prompts(model, name):
    intact = (model / name).read_bytes()
    texts = TEXTS + [json.dumps(mutant).encode() for mutant in mutants(json.loads(intact))][::5]
    texts += [damage(intact, seed) for seed in range(25)]
    for text in texts:
        (model / name).write_bytes(text)
        refused(text[:80], lambda: encode_with(str(model)))


def encode_with(folder):
    tokenizer = hf.load_tokenizer(folder)
    hf.stop_tokens(folder, tokenizer, 99)
    assert data.encode_prompt(tokenizer, '1+1=', data.PromptFormat(False, '', '{prompt}'))


def test_a_damaged_index_of_weights_is_refused(model):
    path = model / 'model.safetensors.index.json'
    intact = {'weight_map': {'a': 'model-00001-of-00001.safetensors'}}
    texts = TEXTS + [json.dumps(mutant).encode() for mutant in mutants(intact)]
    for text in texts + [json.dumps({'weight_map': {'a': value}}).encode() for value in WRONG]:
        path.write_bytes(text)
        assert isinstance(refused(text, lambda: tensor_files.list_tensors(model)), BadInput), text


@pytest.mark.parametrize(
    'template', ['', 'prompt', '{ prompt }', '{}', '{prompt', '{0}', '%s', '{a b}', '\\boxed{answer}', ' ']
)
def test_a_template_without_a_place_for_the_prompt_is_refused(template):
    section = ConfigDict(demo.get_config().data.to_dict() | {'template': template})
    with pytest.raises(BadInput, match=r'^data.template = .* must hold {prompt}'):
        data.DataOptions.from_config(section)


HUMANEVAL = {
    'prompt': 'def f(x):\n    "Gives it back."\n',
    'canonical_solution': '    return x\n',
    'entry_point': 'f',
    'test': 'def check(candidate):\n    assert candidate(1) == 1\n',
}
TESTS = [
    'def check(candidate):\n    pass\n',
    'def check(candidate):\n    candidate(1)\n',
    'def check(candidate):\n    assert True\n',
    'def check(candidate):\n    """assert candidate(1) == 1"""\n',
    'def check(candidate, other):\n    assert candidate(1)\n',
    'def check():\n    assert f(1)\n',
    'def check(candidate:\n',
    'x = 1\n',
    'def check(candidate):\n' + '(' * 5000,
]


def test_programming_problems_that_test_nothing_are_reported(tmp_path):
    rows = [HUMANEVAL, *(HUMANEVAL | {'test': test} for test in TESTS), HUMANEVAL | {'prompt': 'def ('}]
    (tmp_path / 'humaneval.jsonl').write_bytes(encode(rows, 'jsonl', None))
    sound, *bad = code.examples('test', folder=str(tmp_path), name='humaneval')
    assert sound.meta['tests'] == ['assert candidate(1) == 1']
    for line, row in enumerate(bad, 2):
        assert isinstance(row, BadInput) and f'humaneval.jsonl, line {line} = ' in str(row), row
    mbpp = {'task_id': 11, 'text': 'Do.', 'code': 'def f(): pass', 'test_list': ['assert f() is None']}
    changes = [{'test_list': []}, {'test_list': ['f()']}, {'test_list': 'assert f()'}, {'test_list': ['assert (']}]
    changes += [{'task_id': value} for value in ('11', True, None, 1.5)] + [{'code': ''}, {'code': 'def ('}]
    (tmp_path / 'mbpp.jsonl').write_bytes(encode([mbpp, *(mbpp | change for change in changes)], 'jsonl', None))
    sound, *bad = code.examples('test', folder=str(tmp_path), name='mbpp')
    assert sound.id == 11 and len(bad) == len(changes) and all(isinstance(row, BadInput) for row in bad)


def test_a_json_file_of_the_workdir_that_is_damaged_is_named(tmp_path):
    for text in TEXTS:
        (tmp_path / 'x.json').write_bytes(text)
        error = refused(text, lambda: json_file.read_object(tmp_path / 'x.json'))
        assert isinstance(error, BadInput) == (text != b'{}')
    assert isinstance(refused('none', lambda: json_file.read(tmp_path / 'none.json')), BadInput)


def test_train_and_test_that_share_prompts_are_counted_and_above_half_refused(caplog):
    def dataset(*tokens):
        return data.Dataset([Example(str(token), '', i, {}) for i, token in enumerate(tokens)], [[t] for t in tokens])

    data.check_shared(dataset(1, 2), dataset(3, 4))
    assert not caplog.messages
    data.check_shared(dataset(1, 2), dataset(2, 3))
    assert caplog.messages == ['1 of 2 prompts of the test split are in the train split, like example 0']
    with pytest.raises(BadInput, match=r'^2 of 3 prompts of the test split are in the train split'):
        data.check_shared(dataset(1, 2), dataset(2, 3, 1))


def test_numbers_are_written_without_exponents():
    values = {7: '7', 2.5: '2.5', 18.0: '18', 1e-05: '0.00001', 1e16: '1' + '0' * 16, -0.0: '0', 0.1: '0.1'}
    assert {value: records.number_text(value) for value in values} == values
    assert all(float(records.number_text(x)) == x for x in np.random.default_rng(0).normal(size=500) * 1e9)


@pytest.mark.parametrize(
    'objective, meta, thing',
    [
        ('pairwise', {'demonstration': 1, 'rejected': 'x'}, 'demonstration of example 0'),
        ('pairwise', {'demonstration': 'x', 'rejected': ['y']}, 'rejected of example 0'),
        ('pairwise', {'demonstration': None, 'rejected': 'y'}, 'demonstration of example 0'),
        ('pointwise', {'demonstration': 'x', 'label': 'good'}, 'label of example 0'),
        ('pointwise', {'demonstration': 'x', 'label': 2}, 'label of example 0'),
        ('steps', {'steps': 'x', 'labels': [1.0]}, 'steps of example 0'),
        ('steps', {'steps': [1], 'labels': [1.0]}, 'steps of example 0'),
        ('steps', {'steps': ['x'], 'labels': {'x': 1.0}}, 'labels of example 0'),
        ('steps', {'steps': ['x'], 'labels': []}, 'labels of example 0'),
        ('steps', {'steps': ['x'], 'labels': ['1']}, 'label of example 0'),
    ],
)
def test_what_a_reward_model_cannot_be_taught_is_refused_by_its_example(tmp_path, objective, meta, thing):
    for split, prompt in [('train', '1+1='), ('test', '2+2=')]:
        (tmp_path / f'{split}.jsonl').write_text(json.dumps({'prompt': prompt} | meta))
    config = tiny_run.config(data__name='files', data__options={'folder': str(tmp_path)}, reward__verifier='')
    config.reward_model.objective, config.supervised.updates = objective, 4
    with pytest.raises(BadInput, match=f'^{thing} = '):
        reward_model.run(config, str(tmp_path / 'run'))
    assert not (tmp_path / 'run').exists()
