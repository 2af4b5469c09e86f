"""Malformed rows: reported by file and line, left out and counted, or the end when strict."""

import gzip
import json
import logging
import os
import re
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
import pytest

from grpo_jax import data, train
from grpo_jax.configs import arithmetic as demo
from grpo_jax.data import files, gsm8k, gsm8k_calculator, gsm8k_steps, jsonl, records, rollouts
from grpo_jax.errors import BadInput
from grpo_jax.models import hf
from tests import tiny_run

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GOOD = b'{"q": "1+1=", "a": "2"}\n'

# lines that are good whatever they look like: the prompt and the answer that they give
ACCEPTED = {
    'numbers': (b'{"q": 7, "a": 2.5}', '7', '2.5'),
    'number as text': (b'{"q": "7", "a": "-03"}', '7', '-03'),
    'a zero': (b'{"q": "1-1", "a": 0}', '1-1', '0'),
    'carriage return': (b'{"q": "x", "a": "1"}\r', 'x', '1'),
    'spaces around': (b' \t{"q" :"x","a": "1" } ', 'x', '1'),
    'spaces in the prompt': (b'{"q": " x ", "a": "1"}', ' x ', '1'),
    'UTF-8': ('{"q": "é 数 😀", "a": "1"}'.encode(), 'é 数 😀', '1'),
    'escapes': (b'{"q": "\\u00e9 \\ud83d\\ude00 \\n", "a": "1"}', 'é 😀 \n', '1'),
    'escaped NUL': (b'{"q": "x\\u0000", "a": "1"}', 'x\0', '1'),
    'line separator': ('{"q": "x\u2028y", "a": "1"}'.encode(), 'x\u2028y', '1'),
    'other fields of any type': (b'{"q": "x", "a": "1", "n": null, "l": [1, {}], "b": true}', 'x', '1'),
    'the id of another row': (b'{"q": "x", "a": "1", "id": 0}', 'x', '1'),
    'the row of another': (GOOD.strip(), '1+1=', '2'),
    'as long as may be': (b'{"q": "x", "a": "1"}'.ljust(jsonl.LONGEST - 1), 'x', '1'),
}

# lines that are reported: what the report says
REPORTED = {
    'truncated': (b'{"q": "x", "a": ', 'Expecting value'),
    'truncated in a text': (b'{"q": "x", "a": "1', 'Unterminated string'),
    'plain text': (b'What is 1+1?', 'Expecting value'),
    'a page of a web server': (b'<!DOCTYPE html>', 'Expecting value'),
    'a pointer of Git LFS': (b'version https://git-lfs.github.com/spec/v1', 'Expecting value'),
    'empty': (b'', 'the line is empty'),
    'blank': (b' \t', 'the line is empty'),
    'a list': (b'["x", "1"]', 'an object with named fields'),
    'a text': (b'"x"', 'an object with named fields'),
    'a number': (b'1', 'an object with named fields'),
    'null': (b'null', 'an object with named fields'),
    'a trailing comma': (b'{"q": "x", "a": "1",}', 'trailing comma|property name'),
    'single quotes': (b"{'q': 'x', 'a': '1'}", 'double quotes'),
    'Python literals': (b'{"q": "x", "a": None}', 'Expecting value'),
    'a comment': (b'{"q": "x", "a": "1"} // easy', 'Extra data'),
    'two objects': (b'{"q": "x", "a": "1"} {"q": "y", "a": "2"}', 'Extra data'),
    'a key twice': (b'{"q": "x", "a": "1", "a": "2"}', 'a key comes twice'),
    'a key twice deep down': (b'{"q": "x", "a": "1", "m": {"n": 1, "n": 1}}', 'a key comes twice'),
    'NaN': (b'{"q": "x", "a": NaN}', 'NaN is not JSON'),
    'Infinity': (b'{"q": "x", "a": -Infinity}', '-Infinity is not JSON'),
    'NaN in another field': (b'{"q": "x", "a": "1", "n": NaN}', 'NaN is not JSON'),
    'a number too large': (b'{"q": "x", "a": 1e999}', "field 'a' is no finite number"),
    'a number of 5000 digits': (b'{"q": "x", "a": ' + b'9' * 5000 + b'}', 'Exceeds the limit'),
    'a missing prompt': (b'{"a": "1"}', r"nothing in field 'q'; mend the row, which has a$"),
    'a missing answer': (b'{"q": "x"}', r"nothing in field 'a'; mend the row, which has q$"),
    'null as prompt': (b'{"q": null, "a": "1"}', "has nothing in field 'q'"),
    'null as answer': (b'{"q": "x", "a": null}', "has nothing in field 'a'"),
    'a truth value': (b'{"q": "x", "a": true}', "= True: field 'a' must be text or a number"),
    'a list as answer': (b'{"q": "x", "a": ["1", "2"]}', "field 'a' must be text or a number"),
    "a list's JSON as answer": (b'{"q": "x", "a": "[\\"A\\", \\"C\\"]"}', 'has 2 values; name one, like a.0'),
    'a long list as answer': (b'{"q": "x", "a": ["' + b'y' * 5000 + b'", "z"]}', r"y\.\.\.\W+: field 'a' must be text"),
    'an object as answer': (b'{"q": "x", "a": {"b": "1"}}', "field 'a' must be text or a number"),
    'a list as prompt': (b'{"q": ["x"], "a": "1"}', "field 'q' must be text or a number"),
    'a chat without a user': (b'{"q": [{"role": "system", "content": "x"}], "a": "1"}', "field 'q' must be text"),
    'an empty prompt': (b'{"q": "", "a": "1"}', "field 'q' is empty"),
    'a blank prompt': (b'{"q": " \\n\\u00a0", "a": "1"}', "field 'q' is empty"),
    'an empty answer': (b'{"q": "x", "a": ""}', "field 'a' is empty"),
    'a blank answer': (b'{"q": "x", "a": " "}', "field 'a' is empty"),
    'a huge line': (b'{"q": "' + b'x' * jsonl.LONGEST + b'", "a": "1"}', f'longer than {jsonl.LONGEST} bytes'),
    'one byte too long': (b'{"q": "x", "a": "1"}'.ljust(jsonl.LONGEST + 1), f'longer than {jsonl.LONGEST} bytes'),
    'Latin-1': ('{"q": "é", "a": "1"}'.encode('latin1'), "'utf-8' codec can't decode"),
    'surrogates in UTF-8': (b'{"q": "\xed\xa0\x80", "a": "1"}', "'utf-8' codec can't decode"),
    'half a surrogate pair': (b'{"q": "\\ud83d", "a": "1"}', 'surrogates not allowed'),
    'half a surrogate pair in another field': (b'{"q": "x", "a": "1", "n": "\\ude00"}', 'surrogates not allowed'),
    'NUL bytes': (b'\0\0\0\0', 'Expecting value'),
    'a NUL byte in a text': (b'{"q": "x\0", "a": "1"}', 'Invalid control character'),
    'a tab in a text': (b'{"q": "x\ty", "a": "1"}', 'Invalid control character'),
    'a byte order mark within the file': (b'\xef\xbb\xbf{"q": "x", "a": "1"}', 'BOM'),
    'nesting without end': (b'{"q": ' + b'[' * 100000, 'recursion'),
}

# whole files: the lines that are reported, and how many rows are good
FILES = {
    'no final newline': (GOOD + GOOD.strip(), [], 2),
    'a byte order mark at the start': (b'\xef\xbb\xbf' + GOOD + GOOD, [], 2),
    'lines ended as in Windows': (GOOD.replace(b'\n', b'\r\n') * 3, [], 3),
    'an empty line at the end': (GOOD + b'\n', [2], 1),
    'cut off': ((GOOD * 3)[:-9], [3], 2),
    'UTF-16': ((GOOD * 2).decode().encode('utf-16'), [1, 2, 3], 0),
    'compressed': (gzip.compress(GOOD, mtime=0), [1], 0),
    'one object over several lines': (json.dumps({'q': 'x', 'a': '1'}, indent=1).encode(), [1, 2, 3, 4], 0),
    'one list of all rows': (b'[' + GOOD.strip() + b',\n' + GOOD.strip() + b']\n', [1, 2], 0),
    'a text broken over two lines': (GOOD + b'{"q": "x\ny", "a": "1"}\n' + GOOD, [2, 3], 2),
}


def found(folder, content):
    (folder / 'train.jsonl').write_bytes(content)
    return files.examples('train', folder=str(folder), prompt_field='q', answer_field='a')


@pytest.mark.parametrize('name', ACCEPTED)
def test_line_is_accepted(name, tmp_path):
    line, prompt, answer = ACCEPTED[name]
    examples = found(tmp_path, GOOD + line + b'\n' + GOOD)
    assert [e.id for e in examples] == [0, 1, 2]
    assert (examples[1].prompt, examples[1].answer) == (prompt, answer)


@pytest.mark.parametrize('name', REPORTED)
def test_line_is_reported_with_file_and_line_and_reason_and_the_others_keep_their_ids(name, tmp_path):
    line, reason = REPORTED[name]
    before, bad, after = found(tmp_path, GOOD + line + b'\n' + GOOD)
    assert (before.id, after.id) == (0, 2)
    assert re.match(re.escape(f'{tmp_path / "train.jsonl"}, line 2 ') + '(= |has )', str(bad)), bad
    assert re.search(reason, str(bad)) and len(str(bad)) < 1000


@pytest.mark.parametrize('name', FILES)
def test_file(name, tmp_path):
    content, lines, good = FILES[name]
    sound, bad = records.split_malformed(found(tmp_path, content))
    assert len(sound) == good
    assert [int(re.search(r'train\.jsonl, line (\d+) = ', str(error))[1]) for error in bad] == lines


FRAGMENTS = [
    b'{',
    b'}',
    b'[',
    b']',
    b'"',
    b'"q"',
    b'"a"',
    b':',
    b',',
    b'1',
    b'-',
    b'.5',
    b'e999',
    b'NaN',
    b'true',
    b'null',
    b' ',
    b'\n',
    b'\r',
    b'\t',
    b'\0',
    b'\\',
    b'\\u',
    b'd83d',
    b'x',
    b'\xef\xbb\xbf',
    b'\xff',
    b'\xc3\xa9',
    GOOD,
]


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=4), max_size=30))
def test_whatever_the_bytes_every_line_is_an_example_or_a_report(tmp_path_factory, pieces):
    content = b''.join(pieces)
    lines = content.count(b'\n') + (content[-1:] not in (b'', b'\n'))
    everything = found(tmp_path_factory.getbasetemp(), content)
    assert len(everything) == lines
    for line, made in enumerate(everything):
        if isinstance(made, BadInput):
            assert f'train.jsonl, line {line + 1} = ' in str(made)
        else:
            assert made.id == line and made.prompt.strip().encode() and made.answer.strip().encode()


@pytest.mark.parametrize('solution', ['just 4', '4', '4 ####', '#### four', '#### 4 or 5', '#### 1.', '####', '#### -'])
def test_gsm8k_row_without_a_gold_number_is_reported(tmp_path, solution):
    lines = [{'question': 'q', 'answer': '#### 1'}, {'question': 'q', 'answer': solution}]
    (tmp_path / 'train.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    good, bad = gsm8k.examples('train', folder=str(tmp_path))
    assert good.answer == '1'
    assert re.match(re.escape(f'{tmp_path}/train.jsonl, line 2 = {solution!r}: has no #### line'), str(bad))


@pytest.mark.parametrize(
    'module, options', [(gsm8k_calculator, {'slips': 0.0}), (gsm8k_steps, {'slips': 0.0, 'steps': 3})]
)
def test_data_sets_made_of_gsm8k_pass_its_malformed_rows_on(tmp_path, module, options):
    lines = [json.dumps({'question': 'q', 'answer': '<<1+2=3>>3 and <<3*3=9>>9 #### 9'}), '{']
    (tmp_path / 'train.jsonl').write_text('\n'.join(lines))
    (tmp_path / 'test.jsonl').write_text('\n'.join(lines).replace('1+2', '2+1'))
    for split in ('train', 'test'):
        sound, bad = records.split_malformed(module.examples(split, folder=str(tmp_path), **options))
        assert sound and [re.search(r'(\w+)\.jsonl, line 2', str(error))[1] for error in bad] == [split]


@pytest.mark.parametrize('changes', [{'completion': None}, {'reward': '1'}, {'prompt': ''}, {'answer': [7]}], ids=str)
def test_malformed_row_of_a_runs_rollouts_is_reported(tmp_path, changes):
    row = {'prompt': 'p', 'answer': 'a', 'completion': '', 'reward': 1.0}
    (tmp_path / '000000.jsonl').write_text('\n'.join(map(json.dumps, [row, row | changes, row | {'reward': None}])))
    good, bad = rollouts.examples('test', folder=str(tmp_path), least=1.0)
    assert good.meta['demonstration'] == '' and '000000.jsonl, line 2 = ' in str(bad)


# what becomes of them


@pytest.fixture(scope='module')
def tokenizer():
    return hf.load_tokenizer(os.path.join(ROOT, demo.get_config().model.path))


def load(folder, tokenizer, good, bad, strict=False):
    (folder / 'train.jsonl').write_bytes(b'{"q": 1}\n' * bad + GOOD * good)
    changes = {'name': 'files', 'options': {'folder': str(folder), 'prompt_field': 'q', 'answer_field': 'a'}}
    section = ConfigDict(demo.get_config().data.to_dict() | changes | {'strict': strict})
    return data.load(data.DataOptions.from_config(section), 'train', tokenizer)


def test_malformed_rows_are_left_out_and_counted_in_one_warning(tmp_path, tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = load(tmp_path, tokenizer, good=5, bad=5)
    assert [e.id for e in dataset.examples] == [5, 6, 7, 8, 9] and len(dataset.tokens) == 5
    (message,) = caplog.messages
    assert message.startswith('5 of 10 rows of the train split are malformed')
    assert re.findall(r'train\.jsonl, line (\d)', message) == ['1', '2', '3']


def test_strict_stops_at_the_first_malformed_row(tmp_path, tokenizer):
    with pytest.raises(
        BadInput, match=re.escape(f"{tmp_path / 'train.jsonl'}, line 1 has nothing in field 'a'; mend the row")
    ):
        load(tmp_path, tokenizer, good=5, bad=1, strict=True)
    assert len(load(tmp_path, tokenizer, good=5, bad=0, strict=True).examples) == 5


def test_more_malformed_rows_than_good_ones_stop_it_anyway(tmp_path, tokenizer):
    with pytest.raises(
        BadInput, match=r'6 of 11 rows of the train split are malformed; mend .*; the first of them so: .*line 1 '
    ):
        load(tmp_path, tokenizer, good=5, bad=6)


def test_file_without_rows_is_refused(tmp_path, tokenizer):
    with pytest.raises(BadInput, match=r'^data.options = .* gives no example of the train split'):
        load(tmp_path, tokenizer, good=0, bad=0)


@pytest.mark.parametrize('ids', [[0, 1, 1], [0, 1, 2**31], [0, 1, -1]], ids=str)
def test_data_set_whose_ids_cannot_tell_prompts_apart_is_refused(tmp_path, tokenizer, monkeypatch, ids):
    genuine = files.convert_rows
    monkeypatch.setattr(
        files,
        'convert_rows',
        lambda convert, rows: [e._replace(id=i) for e, i in zip(genuine(convert, rows), ids, strict=True)],
    )
    with pytest.raises(BadInput, match='ids that are not distinct'):
        load(tmp_path, tokenizer, good=3, bad=0)


def test_strict_run_ends_before_it_writes(tmp_path):
    for split in ('train', 'test'):
        (tmp_path / f'{split}.jsonl').write_bytes(GOOD * 3 + b'\n')
    config = tiny_run.config(
        data__name='files',
        data__strict=True,
        data__options={'folder': str(tmp_path), 'prompt_field': 'q', 'answer_field': 'a'},
    )
    with pytest.raises(BadInput, match=r"\.jsonl, line 4 = b'\\n': the line is empty"):
        train.run(config, str(tmp_path / 'run'))
    assert not any(names for _, _, names in os.walk(tmp_path / 'run'))


@pytest.mark.parametrize('arguments, strict', [([], False), (['--strict'], True)], ids=str)
def test_flag_strict_sets_the_config_also_for_a_sweep_which_reads_overrides(arguments, strict):
    script = (
        'import sys; from absl import flags; from ml_collections import config_flags; '
        'from grpo_jax.run import cli; cli.define_flags(workdir=False); '
        'cli.run(lambda: print(flags.FLAGS.config.data.strict, '
        'config_flags.get_override_values(flags.FLAGS["config"])))'
    )
    done = subprocess.run(
        [sys.executable, '-c', script, '--config=configs/arithmetic.py', *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split(maxsplit=1) == [str(strict), "{'data.strict': True}\n" if strict else '{}\n']
