"""Step labels: what the files mean, splits that share no problem, and refusals of malformed rows."""

import json
import os

import pytest

from grpo_jax.data import arithmetic_steps, step_labels
from grpo_jax.errors import BadInput
from grpo_jax.rewards import calculator

TASKS = {'mr_gsm8k_wrong': 590, 'bigbench_mistake_dyck_languages': 986, 'bigbench_mistake_word_sorting': 300}


def write(folder, *rows):
    (folder / 'task.jsonl').write_text('\n'.join(map(json.dumps, rows)), encoding='utf8')
    return [
        e
        for split in ('train', 'test')
        for e in step_labels.examples(split, folder=str(folder), tasks=('task',), exchanges=0)
    ]


def test_labels_end_at_the_first_wrong_step(tmp_path):
    steps = ['a', 'b', 'c', 'd']
    (blank,) = write(tmp_path, {'input': 'p', 'target': 'q', 'steps': ['a', 'b', '', 'c'], 'mistake_index': 1})
    assert blank.meta == {'task': 'task', 'steps': ['a', 'b', 'c'], 'labels': [1, 0, None]}
    for row, expected in [
        ({'input': 'p', 'target': 'q', 'steps': steps, 'mistake_index': 1}, [1, 0, None, None]),
        ({'input': 'p', 'target': 'q', 'steps': steps, 'mistake_index': 0}, [0, None, None, None]),
        ({'input': 'p', 'target': 'q', 'steps': steps, 'mistake_index': None}, [1, 1, 1, 1]),
        ({'question': 'p', 'gold': 5, 'steps': steps, 'first_error_step': 1}, [0, None, None, None]),
        ({'question': 'p', 'gold': 5, 'steps': steps, 'first_error_step': 4}, [1, 1, 1, 0]),
    ]:
        (example,) = write(tmp_path, row)
        assert example.meta == {'task': 'task', 'steps': steps, 'labels': expected}
        assert example.prompt == 'p\n' and example.answer in ('q', '5')


@pytest.mark.parametrize(
    'changes',
    [
        {'mistake_index': 2},
        {'mistake_index': -1},
        {'mistake_index': 'one'},
        {'steps': 'a'},
        {'steps': [1, 2]},
        {'input': None},
    ],
)
def test_a_malformed_row_is_told_by_its_line(tmp_path, changes):
    good = {'input': 'p', 'target': 'q', 'steps': ['a', 'b'], 'mistake_index': 1}
    bad = [made for made in write(tmp_path, good, good | changes) if isinstance(made, BadInput)]
    assert len(bad) == 2 and all('task.jsonl, line 2 ' in str(made) for made in bad)  # in both splits


@pytest.mark.parametrize('task', TASKS)
def test_real_files_are_read_whole_and_no_problem_is_in_both_splits(real, task):
    train, test = (
        step_labels.examples(split, folder=os.path.join(real, 'process'), tasks=(task,), exchanges=0)
        for split in ('train', 'test')
    )
    assert len(train) + len(test) == TASKS[task]
    assert 0.15 < len(test) / TASKS[task] < 0.25
    assert not {e.prompt for e in train} & {e.prompt for e in test}
    for example in train + test:
        labels = example.meta['labels']
        assert len(labels) == len(example.meta['steps'])
        assert labels == sorted(labels, key=[1.0, 0.0, None].index) and labels.count(0.0) <= 1
        assert task != 'mr_gsm8k_wrong' or 0.0 in labels


def test_brackets_are_exchanged_in_training_alone_and_consistently(tmp_path):
    rows = [{'input': '( [', 'target': '] )', 'steps': [f'( ; stack: ( {i}'], 'mistake_index': None} for i in range(3)]
    (tmp_path / 'dyck_languages.jsonl').write_text('\n'.join(map(json.dumps, rows)), encoding='utf8')
    found = {
        split: step_labels.examples(split, folder=str(tmp_path), tasks=('dyck_languages',), exchanges=20)
        for split in ('train', 'test')
    }
    train, test = found['train'], found['test']
    assert (len(train), len(test)) in [(63, 0), (0, 3)]  # one problem, hence one split
    assert [e.id for e in train + test] == list(range(len(train) + len(test)))
    closes = {'(': ')', '[': ']', '{': '}', '<': '>'}
    assert not train or len({e.prompt for e in train}) > 8
    for example in train:
        first, second = example.prompt.split()
        assert example.answer == f'{closes[second]} {closes[first]}' and first != second
        assert example.meta['steps'][0].startswith(f'{first} ; stack: {first} ')


def test_problems_that_differ_in_brackets_alone_are_in_one_split(tmp_path):
    rows = [
        {'input': text, 'target': 'x', 'steps': ['a'], 'mistake_index': None}
        for text in ('( [ (', '[ ( [', '{ < {', '< > <')
    ]
    (tmp_path / 'task.jsonl').write_text('\n'.join(map(json.dumps, rows)), encoding='utf8')
    sizes = [
        len(
            {e.prompt for e in step_labels.examples(s, folder=str(tmp_path), tasks=('task',), exchanges=0)}
            & {'( [ (\n', '[ ( [\n', '{ < {\n'}
        )
        for s in ('train', 'test')
    ]
    assert sorted(sizes) == [0, 3]


def test_sums_with_slips_are_labelled_by_the_true_columns():
    found = arithmetic_steps.examples('train', digits=2, count=300, blurts=0.3, wrong=0.5, slips=0.5)
    labels = [e.meta['labels'] for e in found]
    assert {len(x) for x in labels} == {1, 3} and 60 < sum(0.0 in x for x in labels) < 240
    for example in found:
        steps, marks = example.meta['steps'], example.meta['labels']
        said = [value for _, value in calculator.steps(' '.join(steps), example._replace(meta={}))]
        # a column that is no true equation is wrong; one that is may still be that of other digits
        first = marks.index(0.0) if 0.0 in marks else len(marks)
        assert all(value == 1 for value in said[:first])
        if None not in marks:
            assert (marks[-1] == 1.0) == (steps[-1] == example.answer)
