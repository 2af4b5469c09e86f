"""Data sets, the order they are served in, and prompts as the model gets them."""

import json
import os
import re
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.configs import arithmetic as demo
from grpo_jax.data import arithmetic, gsm8k, gsm8k_calculator, tinystories
from grpo_jax.data import dataset as reading
from grpo_jax.data.prompt_format import PromptFormat, make_bound
from grpo_jax.data.records import MissingSplit
from grpo_jax.errors import BadInput
from grpo_jax.models import hf
from grpo_jax.rewards import numeric
from grpo_jax.types import Example

# order

sizes = st.integers(1, 40)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 5), step=st.integers(0, 100), count=sizes, size=sizes)
def test_indices_are_a_pure_function(seed, step, count, size):
    # whatever was asked before
    first = data.indices(seed, step, count, size)
    data.indices(seed, step + 1, count, size)
    np.testing.assert_array_equal(data.indices(seed, step, count, size), first)
    assert first.shape == (count,) and np.all((0 <= first) & (first < size))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 5), count=sizes, size=sizes)
def test_every_epoch_is_a_permutation(seed, count, size):
    # also when steps straddle epochs and when a step is longer than an epoch
    steps = -(-3 * size // count)
    run = np.concatenate([data.indices(seed, step, count, size) for step in range(steps)])[: 3 * size]
    for epoch in run.reshape(3, size):
        assert sorted(epoch) == list(range(size))


def test_epochs_and_seeds_have_different_orders():
    orders = [data.indices(0, 0, 50, 50), data.indices(0, 1, 50, 50), data.indices(1, 0, 50, 50)]
    assert len({tuple(order) for order in orders}) == 3


def test_order_is_the_one_of_earlier_versions():
    # a resumed run must see the prompts that the first part would have seen
    np.testing.assert_array_equal(data.indices(0, 0, 4, 10), np.random.default_rng((0, 0)).permutation(10)[:4])


# prompts


@pytest.fixture
def dataset():
    """7 examples with prompts of 1 to 4 tokens; ids are not positions."""
    examples = [Example(f'question {i}', str(i), 100 + i, {}) for i in range(7)]
    return data.Dataset(examples, [[10 * i + k for k in range(1 + i % 4)] for i in range(7)])


def test_prompts_are_padded_on_the_left(dataset):
    examples, prompts = data.prompts(dataset, [2, 3, 0], 4, 99)
    assert prompts.tokens.tolist() == [[99, 20, 21, 22], [30, 31, 32, 33], [99, 99, 99, 0]]
    assert prompts.mask.tolist() == [[False, True, True, True], [True] * 4, [False, False, False, True]]
    assert prompts.ids.tolist() == [102, 103, 100] == [e.id for e in examples]
    assert (prompts.tokens.dtype, prompts.mask.dtype, prompts.ids.dtype) == (np.int32, bool, np.int32)


def test_walk_from_a_position_needs_no_iterator():
    none = np.zeros(7, bool)
    whole, end = data.walk(3, 0, 24, none)
    assert end == 24 and sorted(whole[:7]) == sorted(whole[7:14]) == list(range(7))
    assert list(whole[:7]) != list(whole[7:14])
    for position in (20, 8):
        np.testing.assert_array_equal(data.walk(3, position, 4, none)[0], whole[position : position + 4])


def test_walk_passes_over_retired_examples():
    retired = np.isin(np.arange(7), [2, 5])
    whole, _ = data.walk(3, 0, 14, np.zeros(7, bool))
    chosen, end = data.walk(3, 0, 10, retired)
    np.testing.assert_array_equal(chosen, whole[~np.isin(whole, [2, 5])])
    assert end in (13, 14)  # whether or not the last of the second epoch is a retired one


def test_revisits_have_their_share_of_all_places_and_go_to_retired_examples_alone():
    retired = np.isin(np.arange(7), [2, 5, 6])

    def counts(share, retired):
        return [len(data.revisit(3, step, 4, retired, share)) for step in range(6)]

    assert counts(0.25, retired) == [1] * 6  # 4 x 0.25
    assert counts(0.375, retired) == [1, 2, 1, 2, 1, 2]  # 1.5 a step: whole places at 1.5, 3, 4.5, 6, 7.5, 9
    assert counts(0.125, retired) == [0, 1, 0, 1, 0, 1]
    assert counts(0.99, retired) == [3] * 6  # 3.96, and no more than are retired
    assert counts(0.99, np.zeros(7, bool)) == counts(0.0, retired) == [0] * 6
    visits = [data.revisit(3, step, 4, retired, 0.5).tolist() for step in range(60)]
    assert visits == [data.revisit(3, step, 4, retired, 0.5).tolist() for step in range(60)]
    assert {frozenset(pair) for pair in visits} == {frozenset(pair) for pair in ((2, 5), (2, 6), (5, 6))}
    assert visits != [data.revisit(4, step, 4, retired, 0.5).tolist() for step in range(60)]


def test_walk_is_refused_when_all_are_retired():
    with pytest.raises(BadInput, match='has retired all 7 prompts'):
        data.walk(3, 0, 1, np.ones(7, bool))


# loading


@pytest.fixture(scope='module')
def tokenizer():
    """The demo's tokenizer of single characters."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(demo.__file__)))
    return hf.load_tokenizer(os.path.join(root, demo.get_config().model.path))


def make_options(**changes):
    """The demo's data options with few examples."""
    options = {'digits': 2, 'count': 20, 'blurts': 0.5, 'wrong': 0.5}
    section = ConfigDict(demo.get_config().data.to_dict() | {'options': options} | changes)
    return data.DataOptions.from_config(section)


def test_loaded_prompts_decode_to_the_text(tokenizer):
    loaded = data.load(make_options(), 'train', tokenizer)
    assert [tokenizer.decode(ids) for ids in loaded.tokens] == [e.prompt for e in loaded.examples]
    assert len(loaded.examples) == 20


def test_template_surrounds_the_prompt(tokenizer):
    loaded = data.load(make_options(template='q {prompt}!', max_prompt_tokens=12), 'train', tokenizer)
    assert tokenizer.decode(loaded.tokens[0]) == f'q {loaded.examples[0].prompt}!'


def test_prompts_that_are_too_long_are_left_out(tokenizer, tmp_path):
    write_jsonl(tmp_path / 'train.jsonl', [{'q': '1' * n, 'a': n} for n in (3, 9, 4, 5)])
    loaded = data.load(from_files(tmp_path, max_prompt_tokens=4), 'train', tokenizer)
    assert [(e.id, e.answer) for e in loaded.examples] == [(0, '3'), (2, '4')]
    assert [len(ids) for ids in loaded.tokens] == [3, 4]


def test_limit_that_leaves_no_prompt_is_refused(tokenizer):
    with pytest.raises(BadInput, match=r'^data.max_prompt_tokens = 5: leaves no prompt of 20 .* shortest has 6 tokens'):
        data.load(make_options(max_prompt_tokens=5), 'train', tokenizer)  # 12+34= has 6


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'name': 'nonsense'}, r"^data.name = 'nonsense': no such file in grpo_jax/data"),
        ({'name': f'{__file__}:mine'}, r'a data set is a whole file, .* examples\(split, .* leave out :mine$'),
        ({'name': 'jsonl'}, r"^data.name = 'jsonl': has no examples\(split, .*or name a data set"),
        ({'name': 'nonsense.py'}, r"^data.name = 'nonsense.py': no such file; add one with examples"),
        ({'options': {'digitz': 2}}, r'^data.options.digitz = 2: is no key; did you mean digits'),
        ({'chat': True}, r'^data.chat = True: .* has no chat template'),
    ],
)
def test_data_section_that_cannot_work_is_refused(tokenizer, changes, message):
    with pytest.raises(BadInput, match=message):
        data.load(make_options(**changes), 'train', tokenizer)


# arithmetic


def sums(split='train', **changes):
    return arithmetic.examples(split, **dict(digits=2, count=2000, blurts=0.7, wrong=0.8) | changes)


def test_a_misspelt_split_of_sums_is_no_other_data():
    with pytest.raises(MissingSplit, match=r"data.train_split, data.test_split = 'trian': is no split of data"):
        sums('trian')


def numbers(example):
    return [int(x) for x in re.fullmatch(r'(\d+)\+(\d+)=', example.prompt).groups()]


@pytest.mark.parametrize('split', ['train', 'test'])
@pytest.mark.parametrize('digits', [1, 2, 3])
def test_sums_are_distinct_right_and_of_the_asked_size(split, digits):
    count = 6 if digits == 1 else 300
    found = sums(split, digits=digits, count=count)
    assert len({e.prompt for e in found}) == count == len({e.id for e in found})
    for e in found:
        a, b = numbers(e)
        assert len(str(a)) == len(str(b)) == digits and e.answer == str(a + b)


def test_train_and_test_share_no_sum():
    # nearly all of the 8100 sums of two digits, so that a shared one would show
    train, test = sums(count=6500), sums('test', count=700)
    assert not {e.prompt for e in train} & {e.prompt for e in test}


def test_examples_are_the_same_each_time_and_a_smaller_count_is_a_beginning():
    assert sums() == sums()
    assert sums(count=50) == sums()[:50]


def check_work(text, a, b):
    """Asserts that a worked demonstration adds a and b by columns, from the right."""
    *columns, answer = text.split(' ')
    carry, left, right = 0, str(a)[::-1], str(b)[::-1]
    assert len(columns) == len(left)
    for place, column in enumerate(columns):
        terms, total = column.split('=')
        assert terms == '+'.join([left[place], right[place]] + ['1'] * carry)
        assert int(total) == sum(map(int, terms.split('+')))
        carry = int(total) // 10
    assert int(answer) == a + b


def test_worked_example_from_the_docstring():
    # 7+5 = 12, carry 1: 4+8+1 = 13
    assert arithmetic.work_out(47, 85) == '7+5=12 4+8+1=13 132'


def test_demonstrations_in_tags_are_the_same_ones_with_their_columns_as_thoughts():
    plain, tagged = (sums(tags=tags) for tags in (False, True))
    assert [(e.prompt, e.answer) for e in plain] == [(e.prompt, e.answer) for e in tagged]
    for bare, marked in zip(plain, tagged, strict=True):
        columns, _, answer = bare.meta['demonstration'].rpartition(' ')
        assert marked.meta['demonstration'] == f'<think>{columns}</think><answer>{answer}</answer>'


@pytest.mark.parametrize('digits', [2, 3])
def test_every_worked_demonstration_adds_up(digits):
    for e in sums(digits=digits, blurts=0.0):
        check_work(e.meta['demonstration'], *numbers(e))


def test_shares_of_blurts_and_of_wrong_ones_are_the_asked_ones():
    # 4000 draws: the standard deviations are .0072 and .0076, the bounds 4 of them
    found = sums(count=4000)
    blurts = [e for e in found if '=' not in e.meta['demonstration']]
    assert abs(len(blurts) / 4000 - 0.7) < 0.03
    assert abs(np.mean([e.meta['demonstration'] != e.answer for e in blurts]) - 0.8) < 0.03


def test_wrong_blurt_has_exactly_one_wrong_digit():
    for e in sums(blurts=1.0, wrong=1.0):
        text = e.meta['demonstration']
        assert len(text) == len(e.answer)
        assert sum(x != y for x, y in zip(text, e.answer, strict=True)) == 1


def test_reward_accepts_worked_and_right_demonstrations_and_refuses_wrong_ones():
    for e in sums():
        text = e.meta['demonstration']
        assert numeric.reward(text, e) == (text.rsplit(' ', 1)[-1] == e.answer)


# files


def write_jsonl(path, rows):
    path.write_text(''.join((row if isinstance(row, str) else json.dumps(row)) + '\n' for row in rows), encoding='utf8')


def from_files(folder, **changes):
    return make_options(
        name='files', options={'folder': str(folder), 'prompt_field': 'q', 'answer_field': 'a'}, **changes
    )


# gsm8k

GSM8K = [
    {'question': 'How much is 1+1? é', 'answer': 'Well.\n#### 2'},
    {'question': 'Many?', 'answer': 'x #### y\n#### 1,234'},
    {'question': 'Cold?', 'answer': 'Yes.\n#### -3'},
]
GOLDS = ['2', '1234', '-3']


@pytest.mark.parametrize('name', ['gsm8k_{}.jsonl', '{}.jsonl'])
@pytest.mark.parametrize('split', ['train', 'test'])
def test_gsm8k_from_files(tmp_path, name, split):
    write_jsonl(tmp_path / name.format(split), GSM8K)
    found = gsm8k.examples(split, folder=str(tmp_path))
    assert [(e.prompt, e.answer, e.id) for e in found] == [
        (r['question'], g, i) for i, (r, g) in enumerate(zip(GSM8K, GOLDS, strict=True))
    ]
    assert found[1].meta == {'demonstration': GSM8K[1]['answer']}


def test_folder_without_gsm8k_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r'holds no gsm8k_train.jsonl or .parquet'):
        gsm8k.examples('train', folder=str(tmp_path))


@pytest.mark.parametrize('split, count', [('train', 7473), ('test', 1319)])
def test_real_gsm8k_is_whole_and_its_solutions_earn_the_reward(real, split, count):
    found = gsm8k.examples(split, folder=os.path.join(real, 'math'))
    assert len(found) == count
    assert all(numeric.extract(e.answer) is not None for e in found)
    assert all(numeric.reward(e.meta['demonstration'], e) == 1 for e in found)


CALCULATOR = [
    {'question': 'q', 'answer': '48/2 = <<48/2=24>>24 and <<12/60=0.20>>0.2 #### 1'},
    {'question': 'q', 'answer': 'again <<48/2=24>>24, <<7 + 5 - 9=3.00>>3, no sum <<5=5>>5 #### 1'},
]


def test_calculator_takes_each_annotated_expression_once_and_holds_new_ones_out(tmp_path):
    write_jsonl(tmp_path / 'train.jsonl', CALCULATOR)
    write_jsonl(tmp_path / 'test.jsonl', [{'question': 'q', 'answer': '<<48/2=24>> <<2*3=6>> #### 6'}])
    train = gsm8k_calculator.examples('train', folder=str(tmp_path), slips=0.0)
    assert [(e.prompt, e.answer) for e in train] == [('48/2=', '24'), ('12/60=', '0.2'), ('7+5-9=', '3')]
    assert [e.meta['demonstration'] for e in train] == [e.answer for e in train]
    test = gsm8k_calculator.examples('test', folder=str(tmp_path), slips=1.0)
    assert [(e.prompt, e.answer, e.meta['demonstration']) for e in test] == [('2*3=', '6', '60')]


def test_the_asked_share_of_real_annotations_slips_and_a_slip_of_a_whole_number_is_wrong(real):
    found = gsm8k_calculator.examples('train', folder=os.path.join(real, 'math'), slips=0.65)
    assert len(found) == 10652
    slipped = [e for e in found if e.meta['demonstration'] != e.answer]
    assert len(slipped) / len(found) == pytest.approx(0.65, abs=0.02)
    whole = [e for e in slipped if '.' not in e.answer and e.answer != '0']
    assert not any(numeric.reward(e.meta['demonstration'], e) for e in whole)


def test_tinystories_holds_one_story_out():
    train, test = tinystories.examples('train'), tinystories.examples('test')
    assert len(train) == 5 * len(test) == 120
    assert len({e.id for e in train + test}) == 144
    assert not {e.prompt.split('. ', 1)[1] for e in train} & {e.prompt.split('. ', 1)[1] for e in test}


def test_very_many_prompts_are_encoded_when_they_are_drawn(tmp_path, monkeypatch):
    texts = [f'{i}+{i % 7}=' for i in range(60)] + ['1+' * 40, 'é+1=']
    for split in ('train', 'test'):
        rows = [json.dumps({'prompt': text, 'answer': str(i)}) for i, text in enumerate(texts)]
        (tmp_path / f'{split}.jsonl').write_text('\n'.join(rows) + '\n', encoding='utf8')
    options = data.DataOptions(name='files', options={'folder': str(tmp_path)}, max_prompt_tokens=12)
    tokenizer = hf.load_tokenizer(hf.find('configs/models/characters'))
    whole = data.load(options, 'train', tokenizer)
    monkeypatch.setattr(reading, 'MOST_AT_ONCE', 10)
    encoded, encode = [], reading.encode_prompt
    monkeypatch.setattr(reading, 'encode_prompt', lambda *given: encoded.append(given[1]) or encode(*given))
    lazy = data.load(options, 'train', tokenizer)
    assert encoded == texts[-2:]  # the one is long, the other no plain ASCII
    assert lazy.examples == whole.examples and len(lazy.tokens) == len(whole.tokens) == 61
    assert [lazy.tokens[i] for i in (3, 50, 60)] == [whole.tokens[i] for i in (3, 50, 60)]
    assert data.pick(lazy, [5, 3]).tokens[1] == whole.tokens[3] and len(encoded) == 4
    assert list(lazy.tokens) == list(whole.tokens)


def test_a_start_on_200_000_rows_takes_less_than_5_seconds_beyond_reading_them(long):
    # seconds of the CPU, since other work on the machine makes the clock's longer; types are not checked there
    done = subprocess.run([sys.executable, '-m', 'benchmarks.many_rows'], capture_output=True, text=True, check=True)
    seconds = {name: float(text) for name, text in re.findall(r'^(.*?)  .*CPU +([\d.]+) s$', done.stdout, re.MULTILINE)}
    read = seconds['reads the files']
    assert seconds['opens the splits, reads included'] - read + seconds['digests'] < 5, seconds
    assert seconds['opens all of it again (resume)'] - read < 5, seconds


def test_a_prompt_that_may_open_thinking_is_encoded_before_the_run():
    """Its tokens say whether the completion begins inside a tag; see turns.find_begun."""
    tokenizer = hf.load_tokenizer(hf.find('configs/models/characters'))
    assert make_bound(tokenizer, PromptFormat(), 30)('1+1=')
    assert not make_bound(tokenizer, PromptFormat(), 30)('1+1= [answer] ')
    assert not make_bound(tokenizer, PromptFormat(template='{prompt}\n<think>\n'), 30)('1+1=')
