"""Columns as people have them: paths, templates, chats in a text, system prompts, demonstrations; and what is told."""

import json
import logging

from ml_collections import ConfigDict
import pytest

from grpo_jax import data, rewards
from grpo_jax.configs import arithmetic as demo
from grpo_jax.configs import default
from grpo_jax.data import code, files, records
from grpo_jax.data.prompt_format import PromptFormat, columns_in
from grpo_jax.errors import BadInput
from grpo_jax.models import hf
from tests import hub_cache as cache
from tests.hub_cache import NEW

CHATML = (
    '{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}'
    '{% if add_generation_prompt %}<assistant>{% endif %}'
)
GEMMA = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
USER, BOT = ({'role': role, 'content': f'{role} says so.'} for role in ('user', 'assistant'))


def load(folder, rows, chat='', **changes):
    """The train Dataset of rows in a JSONL file; chat: a chat template; changes: keys of config.data."""
    (folder / 'train.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows), 'utf8')
    tokenizer = hf.load_tokenizer(hf.find('configs/models/characters'))
    tokenizer.chat_template = chat or None
    options = {'folder': str(folder)} | changes.pop('options', {})
    section = demo.get_config().data.to_dict() | {'name': 'files', 'chat': bool(chat), 'max_prompt_tokens': 300}
    options = data.DataOptions.from_config(ConfigDict(section | {'options': options} | changes))
    dataset = data.load(options, 'train', tokenizer, lambda example: False)
    return dataset, [tokenizer.decode(ids) for ids in dataset.tokens]


def test_a_field_is_a_path_through_structs_lists_and_json():
    row = {'a': {'b': [{'c': 1}, {'c': 2}]}, 'text': '{"outputs": ["x", "y"]}', 'a.b': 'flat', 'solutions': '["p"]'}
    paths = {'a.b': 'flat', 'text.outputs.1': 'y', 'text.outputs.-1': 'y', 'solutions.0': 'p', 'solutions.1': None}
    assert {path: records.get_field(row, path) for path in paths} == paths
    assert records.get_field({'a': row['a']}, 'a.b.1.c') == 2 and records.get_field(row, 'text.outputs.z') is None


def test_a_template_holds_columns_and_commands_of_latex_stay(tmp_path):
    rows = [
        {'instruction': 'Add.', 'input': '', 'x': {'n': [1, 2.0]}, 'answer': 3},
        {'instruction': 'Go.', 'input': 'now', 'x': {'n': [4]}},
        {'instruction': '', 'input': None, 'x': None},
    ]
    template = '{instruction} {input}{x.n} \\boxed{answer} {x.n.0}'
    dataset, texts = load(tmp_path, rows, template=template, options={'prompt_field': ''})
    assert texts == ['Add. [1, 2.0] \\boxed{answer} 1', 'Go. now[4] \\boxed{answer} 4']
    assert [e.prompt for e in dataset.examples] == texts
    _, around = load(tmp_path, [{'prompt': 'P', 'hint': 'H'}], template='{hint}: {prompt}')
    assert around == ['H: P']


def test_a_system_message_comes_from_a_column_where_it_has_one(tmp_path):
    rows = [{'prompt': 'a', 'sys': 'Brief.'}, {'prompt': 'b', 'sys': ''}]
    _, texts = load(tmp_path, rows, CHATML, system='{sys}')
    assert texts == ['<system>Brief.</><user>a</><assistant>', '<user>b</><assistant>']


def test_a_system_message_that_the_template_refuses_stands_before_the_users_words(tmp_path):
    chat = [{'role': 'system', 'content': 'Brief.'}, USER, BOT, {'role': 'user', 'content': 'And?'}]
    _, texts = load(tmp_path, [{'prompt': chat}, {'prompt': 'b'}], GEMMA, system='All.')
    whole = '<user>Brief.\n\nuser says so.</><assistant>assistant says so.</><user>And?</><assistant>'
    assert texts == [whole, '<user>All.\n\nb</><assistant>']


def test_a_chat_as_json_text_is_a_chat(tmp_path):
    _, texts = load(tmp_path, [{'prompt': json.dumps([USER, BOT, USER])}, {'prompt': '["no", "chat"]'}], CHATML)
    assert texts[0] == '<user>user says so.</><assistant>assistant says so.</><user>user says so.</><assistant>'
    assert texts[1] == '<user>["no", "chat"]</><assistant>'


def test_a_demonstration_is_the_last_message_of_the_prompts_own_chat(tmp_path):
    options = {'prompt_field': 'messages', 'columns': {'demonstration': 'messages', 'level': 'x.0'}}
    dataset, texts = load(tmp_path, [{'messages': [USER, BOT], 'x': [5]}], CHATML, options=options)
    assert texts == ['<user>user says so.</><assistant>']
    assert dataset.examples[0].meta['demonstration'] == 'assistant says so.' and dataset.examples[0].meta['level'] == 5


def test_rows_are_chosen_by_their_columns(tmp_path):
    rows = [{'prompt': str(i), 'answer': i, 'kind': 'ab'[i % 2]} for i in range(6)]
    dataset, _ = load(tmp_path, rows, options={'only': {'kind': 'a'}, 'without': {'answer': '2|9'}})
    assert [e.id for e in dataset.examples] == [0, 4]


@pytest.mark.parametrize('gold, words', [(['1', '2'], 'like answer.0'), ({'target': 1}, 'like answer.target')])
def test_a_gold_of_several_values_is_malformed_and_names_a_path(tmp_path, gold, words):
    with pytest.raises(BadInput, match=words):
        load(tmp_path, [{'prompt': 'x', 'answer': gold}])


def test_csv_is_read_with_quoted_lines_and_its_malformed_rows_are_named(tmp_path):
    (tmp_path / 'all.csv').write_text('prompt,answer\n"a, b\nc",1\nonly one\nd,2\n')
    first, bad, last = files.examples('train', folder=str(tmp_path))
    assert (first.prompt, first.answer, last.answer, last.id) == ('a, b\nc', '1', '2', 2)
    assert str(bad).startswith(f'{tmp_path / "all.csv"}, line 4 = ') and 'has 1 cells, not 2' in str(bad)


def test_files_are_found_by_their_words_and_named_by_key(tmp_path):
    for name in ('math-train', 'math-test', 'extra'):
        (tmp_path / f'{name}.jsonl').write_text(json.dumps({'prompt': name, 'answer': '1'}) + '\n')
    read = {split: files.examples(split, folder=str(tmp_path))[0].prompt for split in ('train', 'test', 'extra.jsonl')}
    assert read == {'train': 'math-train', 'test': 'math-test', 'extra.jsonl': 'extra'}
    (tmp_path / 'code-train.jsonl').write_text('{}')
    with pytest.raises(
        data.MissingSplit, match=r'code-train, math-train may each be its split train; name one in data'
    ):
        files.examples('train', folder=str(tmp_path))


def test_a_configuration_of_the_hub_is_named_behind_the_id(hub_cache):
    rows = {name: [{'prompt': name, 'answer': '1'}] for name in ('default', 'extended')}
    cache.write(hub_cache, 'me/sums', NEW, {f'{name}/train-00000-of-00001.parquet': rows[name] for name in rows})
    for path, name in {'me/sums:extended': 'extended', 'me/sums': 'default'}.items():
        located = data.locate(cache.options('files', path))
        assert located.origins[0].path == path and [e.prompt for e in cache.read(located)] == [name]
    with pytest.raises(BadInput, match='has no subsets'):
        data.locate(cache.options('svamp', 'me/sums:all'))


def test_odd_prompts_are_told_once(tmp_path, caplog):
    rows = [{'prompt': [USER, {'role': 'assistant', 'content': f'It is {i}.'}], 'answer': i} for i in (11, 12, 13, 13)]
    dataset, _ = load(tmp_path, rows, CHATML)
    with caplog.at_level(logging.WARNING):
        data.warn_of_prompts(dataset)
    assert '1 of 4 prompts of the train split repeat another one, like examples 2 and 3' in caplog.text
    assert "4 of 4 prompts of the train split end with the assistant's words" in caplog.text
    assert "the gold answer stands in 4 of 4 prompts, like '11' in example 0" in caplog.text
    data.warn_of_count(dataset, 5)
    assert 'data.prompts_per_step = 5 is more than the 4 prompts of the train split' in caplog.text
    caplog.clear()
    data.warn_of_count(dataset, 4)
    dataset, _ = load(tmp_path, [{'prompt': f'{i}+1=, A or B', 'answer': 'AB'[i % 2]} for i in range(4)])
    data.warn_of_prompts(dataset)
    assert not caplog.text


def test_a_template_that_does_not_open_the_answer_is_told(tmp_path, caplog):
    load(tmp_path, [{'prompt': 'a'}], CHATML)
    load(tmp_path, [{'prompt': 'a'}], '{% for m in messages %}{{ m.content }} {% endfor %}')
    assert 'does not open the answer' not in caplog.text
    load(tmp_path, [{'prompt': 'a'}], CHATML.partition('{% if')[0])
    assert "does not open the answer, with '<assistant>'" in caplog.text


INPUT = {'stdin': 'a, b = map(int, input().split())', 'as a file': 'a, b = map(int, open(0).read().split())'}
INPUT['bytes'] = 'import sys\na, b = map(int, sys.stdin.buffer.readline().split())'
INPUT['fileinput'] = 'import fileinput\na, b = map(int, "".join(fileinput.input()).split())'
INPUT['the system'] = 'import os\na, b = map(int, os.read(0, 99).split())'
OUTPUT = {
    'print': 'print(a + b)\nexit()',
    'the system': 'import os\nos.write(1, str(a + b).encode())',
    'at exit': 'import atexit, io, sys\nsys.stdout = io.StringIO()\n'
    'atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint(a + b)',
    'a wrapper': 'import io, os, sys\nclass Fast(io.StringIO):\n'
    '    def flush(self): os.write(1, self.getvalue().encode())\nsys.stdout = Fast()\nprint(a + b)',
    'closed': 'import sys\nprint(a + b)\nsys.stdout.close()',
}


def test_programs_are_judged_by_what_they_read_and_write(tmp_path):
    tests = {'inputs': ['1 2\n', ['3 4', '']], 'outputs': ['3\n', ['7', '']]}
    call = {'inputs': [[1, 2]], 'outputs': [[3]], 'fn_name': 'add'}
    rows = [
        {'question': 'Add.', 'input_output': json.dumps(tests), 'solutions': '["print(1)"]'},
        {'question': 'Add.', 'input_output': call, 'starter_code': 'class Solution:\n    def add(self, a, b):'},
        {'question': 'Add.', 'input_output': '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]'}
        | {'metadata': '{"func_name": "add"}', 'starter_code': 'def add(a, b):'},
    ]
    (tmp_path / 'train.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    read, method, function = code.examples('train', folder=str(tmp_path))
    assert read.answer == 'print(1)' and method.prompt == 'Add.\n\nclass Solution:\n    def add(self, a, b):'
    right = [f'{source}\n{OUTPUT["print"]}' for source in INPUT.values()]
    right += [f'{INPUT["stdin"]}\n{write}' for write in OUTPUT.values()]
    add = 'def add({}a, b):\n    return a + b'
    c = default.get_config()
    with c.unlocked():
        c.reward.parts, c.reward.verifier, c.reward.workers = (('code', 1.0),), 'code', 1
    with rewards.build(rewards.RewardOptions.from_config(c.reward), 512) as functions:
        texts = [
            *right,
            'print(3)',
            'print(1/0)',
            'class Solution:\n    ' + add.format('self, ').replace('\n', '\n    ').replace('b)', 'b) -> List[int]'),
            add.format(''),
            'add = max',
        ]
        examples = [read] * (len(right) + 2) + [method, function, function]
        texts = [f'```python\n{text}\n```' for text in texts]
        paid = rewards.compute_rewards(functions, examples, texts, [False] * len(texts), [5] * len(texts))
    assert list(paid.parts['code']) == [1] * len(right) + [0, 0, 1, 1, 0]


def test_a_newline_that_a_shell_hands_on_is_a_newline():
    given = PromptFormat(template=r'{question}\n{choices}\nAnswer: \nu \neq \nabla\n', system=r'Add.\nBriefly.')
    read = given.with_newlines()
    assert read.template == '{question}\n{choices}\nAnswer: \\nu \\neq \\nabla\n' and read.system == 'Add.\nBriefly.'
    assert columns_in(read.template) == ['question', 'choices']


@pytest.mark.parametrize('given, gold', [('x y', '3'), (7, '3'), ('1', 'three')])
def test_arguments_that_are_no_json_make_a_row_malformed(tmp_path, given, gold):
    cases = [{'input': given, 'output': gold, 'testtype': 'functional'}]
    rows = [{'question': 'Add.', 'input_output': cases, 'metadata': {'func_name': 'add'}}]
    (tmp_path / 'train.jsonl').write_text(json.dumps(rows[0]) + '\n')
    (malformed,) = code.examples('train', folder=str(tmp_path))
    assert isinstance(malformed, BadInput) and "field 'input_output' must have tests" in str(malformed)
