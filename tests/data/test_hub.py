"""Data sets as they lie on the hub: every layout, against literal rows and against the files of their authors."""

import os
import re

import pytest

from grpo_jax import data
from grpo_jax.configs import code, gsm8k, preferences, svamp
from grpo_jax.configs import math as math_config
from grpo_jax.data import jsonl
from grpo_jax.data.math import last_boxed
from grpo_jax.errors import BadInput
from grpo_jax.rewards import expression
from tests import hub_cache as cache
from tests.hub_cache import BOT, HALVES, OLD, REPOSITORIES, SUBJECTS, USER, math_row, options, read


def solved(solution, subject='Algebra', level=5):
    return {'subject': subject, 'level': level, 'demonstration': solution}


PAIR = {'demonstration': 'So.', 'rejected': 'No.'}
MBPP = 'You are an expert Python programmer, and here is your task: {} Your code should pass these tests:\n\n{}\n'
READ = [
    (
        'gsm8k',
        'openai/gsm8k',
        {},
        'train',
        [
            (row['question'], answer, {'demonstration': row['answer']})
            for row, answer in zip(HALVES, ['24', '1001'], strict=True)
        ],
    ),
    ('gsm8k', 'openai/gsm8k', {}, 'test', [('48/2?', '24', {'demonstration': HALVES[0]['answer']})]),
    (
        'gsm8k',
        'openai/gsm8k',
        {'subset': 'socratic'},
        'train',
        [('Why?', '7', {'demonstration': 'How many? ** 7\n#### 7'})],
    ),
    ('gsm8k_calculator', 'openai/gsm8k', {'slips': 0.0}, 'train', [('48/2=', '24', {'demonstration': '24'})]),
    (
        'math',
        'EleutherAI/hendrycks_math',
        {},
        'test',
        [(f'{s} test', str(k), solved(rf'So $\boxed{{{k}}}$.', s)) for k, s in enumerate(SUBJECTS)],
    ),
    (
        'math',
        'EleutherAI/hendrycks_math',
        {'subset': 'geometry'},
        'train',
        [('geometry train', '2', solved(r'So $\boxed{2}$.', 'geometry'))],
    ),
    (
        'math',
        'DigitalLearningGmbH/MATH-lighteval',
        {},
        'train',
        [('p', r'\frac{1}{2}', solved(r'$\boxed{\frac{1}{2}}$')), ('q', '5', solved(r'is $\boxed 5$'))],
    ),
    ('math', 'HuggingFaceH4/MATH-500', {}, 'test', [('p', '7', solved('s', level=2))]),
    (
        'svamp',
        'ChilleD/SVAMP',
        {},
        'train',
        [
            (
                'A pack costs 76 dollars, less 25 dollars. How much is a pack?',
                '51',
                {'subject': 'Subtraction', 'demonstration': '76 - 25 = 51'},
            ),
            ('It rains. How much?', '0.5', {'subject': 'Common-Division'}),
        ],
    ),
    (
        'code',
        'openai/openai_humaneval',
        {'name': 'humaneval'},
        'test',
        [
            (
                'def one():\n    """One."""\n',
                '    return 1\n',
                {
                    'before': 'def one():\n    """One."""\n',
                    'setup': '',
                    'tests': ['assert candidate() == 1'],
                    'names': {'one': 'one', 'candidate': 'one'},
                    'demonstration': '    return 1\n',
                },
            )
        ],
    ),
    (
        'code',
        'google-research-datasets/mbpp',
        {'name': 'mbpp'},
        'train',
        [
            (
                MBPP.format('Write one.', 'assert one() == 1'),
                'def one():\n  return 1',
                {
                    'before': '',
                    'setup': '',
                    'tests': ['assert one() == 1'],
                    'names': {'one': 'one'},
                    'demonstration': 'def one():\n  return 1',
                },
            )
        ],
    ),
    (
        'code',
        'google-research-datasets/mbpp',
        {'name': 'mbpp_sanitized'},
        'validation',
        [
            (
                MBPP.format('Write two.', 'assert two() == math.sqrt(4)'),
                'def two():\n  return 2',
                {
                    'before': '',
                    'setup': 'import math',
                    'tests': ['assert two() == math.sqrt(4)'],
                    'names': {'two': 'two'},
                    'demonstration': 'def two():\n  return 2',
                },
            )
        ],
    ),
    (
        'preferences',
        'HuggingFaceH4/ultrafeedback_binarized',
        {},
        'train',
        [('Why?', '', PAIR), ('Same?', '', {'demonstration': 'Yes.'})],
    ),
    ('preferences', 'trl-lib/ultrafeedback_binarized', {}, 'train', [('Why?', '', PAIR)]),
    (
        'files',
        'openai/gsm8k',
        {'subset': 'main', 'prompt_field': 'question', 'answer_field': 'answer'},
        'test',
        [('48/2?', HALVES[0]['answer'], HALVES[0])],
    ),
]


@pytest.mark.parametrize(
    'name, path, changes, split, expected',
    READ,
    ids=[f'{path} {changes} {split}' for _, path, changes, split, _ in READ],
)
def test_a_data_set_is_read_by_its_id(hub_cache, name, path, changes, split, expected):
    cache.write(hub_cache, path, OLD, REPOSITORIES[path])
    located = data.locate(options(name, path, **changes))
    examples = read(located, split)
    assert [(e.prompt, e.answer, e.meta) for e in examples] == expected
    assert located.origins == (data.Origin(path, '', OLD, ''),)
    assert len({e.id for e in examples}) == len(examples)


def rows_of(real, name):
    return [row for _, row in jsonl.read(os.path.join(real, f'{name}.jsonl'))]


MBPP_SPLITS = {'prompt': (1, 10), 'test': (11, 510), 'validation': (511, 600), 'train': (601, 974)}


def mbpp(rows, subset):
    """The files of MBPP on the hub, where each split is one."""
    return {
        f'{subset}/{split}-00000-of-00001.parquet': [row for row in rows if first <= row['task_id'] <= last]
        for split, (first, last) in MBPP_SPLITS.items()
    }


REAL = {
    'openai/gsm8k': (
        *('gsm8k', 'math', {}, ('train', 'test')),
        lambda real: {f'main/{x}-00000-of-00001.parquet': rows_of(real, f'math/gsm8k_{x}') for x in ('train', 'test')},
    ),
    'openai/openai_humaneval': (
        *('code', 'code', {'name': 'humaneval'}, ('test',)),
        lambda real: {'openai_humaneval/test-00000-of-00001.parquet': rows_of(real, 'code/humaneval')},
    ),
    'google-research-datasets/mbpp': (
        *('code', 'code', {'name': 'mbpp'}, tuple(MBPP_SPLITS)),
        lambda real: mbpp(rows_of(real, 'code/mbpp'), 'full'),
    ),
    'google-research-datasets/mbpp, sanitized': (
        *('code', 'code', {'name': 'mbpp_sanitized'}, tuple(MBPP_SPLITS)),
        lambda real: mbpp(rows_of(real, 'code/mbpp_sanitized'), 'sanitized'),
    ),
}


@pytest.mark.parametrize('path', REAL)
def test_the_hub_gives_what_the_authors_file_gives(real, hub_cache, path):
    name, folder, changes, splits, files = REAL[path]
    path = path.partition(',')[0]
    cache.write(hub_cache, path, OLD, files(real))
    remote = data.locate(options(name, path, **changes))
    local = data.locate(options(name, path, folder=os.path.join(real, folder), **changes))
    assert remote.origins[0].commit == OLD and local.origins[0].commit == ''
    for split in splits:
        assert read(remote, split) == read(local, split)
        assert read(remote, split)


def test_the_last_box_of_a_real_solution_is_the_answer(real):
    rows = rows_of(real, 'math/math500')
    assert all(last_boxed(row['solution']) == row['answer'] for row in rows)


@pytest.mark.parametrize(
    'solution, answer',
    [
        (r'$\boxed{1}$, or rather $\boxed{\frac{2}{3}}$', r'\frac{2}{3}'),
        (r'\fbox{ 4 }', '4'),
        (r'$\boxed 5$ apples', '5'),
        (r'\boxed{\{1, 2\}}', r'\{1, 2\}'),
        (r'\boxed{\text{a } b}', r'\text{a } b'),
        (r'$\boxed{7$', None),
        (r'\boxed{}', None),
        (r'\boxedspace{3}', None),
        ('42', None),
    ],
)
def test_the_last_box(solution, answer):
    assert last_boxed(solution) == answer


# malformed rows

# a row of each data set that is malformed, and what its report says
CHOSEN = {'prompt': 'p', 'chosen': 'a'}
MALFORMED = [
    ('math', 'train.jsonl', math_row('p', 'It is 7.'), r'line 2 .*has no \\boxed{}'),
    ('math', 'train.jsonl', {'problem': 'p', 'answer': ''}, r"line 2 .*field 'answer' is empty"),
    ('math', 'train.jsonl', {'problem': 'p'}, r"line 2 .*field 'answer'"),
    ('svamp', 'train.json', {'Body': 'b', 'Question': 'q', 'Answer': 'many'}, 'row 1 .*must be a number'),
    ('svamp', 'train.json', {'Body': ' ', 'Question': 'q', 'Answer': 1}, "row 1 .*field 'Body' is empty"),
    ('svamp', 'train.json', ['b'], 'row 1 .*must be an object with named fields'),
    ('preferences', 'train.jsonl', CHOSEN, "line 2 .*field 'rejected'"),
    ('preferences', 'train.jsonl', {'chosen': 'a', 'rejected': 'b'}, 'line 2 .*must be one prompt'),
    ('preferences', 'train.jsonl', CHOSEN | {'rejected': [USER('q'), BOT('b')]}, 'line 2 .*must be one prompt'),
    ('preferences', 'train.jsonl', CHOSEN | {'rejected': [USER('p'), BOT('')]}, "line 2 .*field 'content' is empty"),
    (
        'preferences',
        'train.jsonl',
        CHOSEN | {'rejected': ['b']},
        "line 2 .*'rejected' must be text or a number, or messages",
    ),
    (
        *('preferences', 'train.jsonl', CHOSEN | {'rejected': [USER('p'), BOT('x'), USER('q'), BOT('b')]}),
        'line 2 .*must be one prompt',
    ),
    (
        *('preferences', 'train.jsonl', CHOSEN | {'prompt': [BOT('x')], 'rejected': 'b'}),
        "line 2 .*field 'prompt' must be text, or have words of the user",
    ),
    (
        *('preferences', 'train.parquet', {'chosen': [USER('p'), BOT('a')], 'rejected': [USER('q'), BOT('b')]}),
        'row 1 .*must be one prompt',
    ),
]
SOUND = {
    'math': {'problem': 'p', 'answer': '1'},
    'svamp': {'Body': 'b', 'Question': 'q', 'Answer': 1},
    'preferences': {'prompt': 'p', 'chosen': 'a', 'rejected': 'b'},
}


@pytest.mark.parametrize('name, file, row, report', MALFORMED)
def test_a_malformed_row_is_named_by_file_and_row(tmp_path, name, file, row, report):
    sound = SOUND[name]
    if file.endswith('.parquet'):
        sound = {'chosen': [USER('p'), BOT('a')], 'rejected': [USER('p'), BOT('b')]}
    (tmp_path / file).write_bytes(cache.encode(file, [sound, row]))
    first, second = data.examples(name, {'folder': str(tmp_path)}, 'train')
    assert isinstance(second, BadInput) and not isinstance(first, BadInput)
    with pytest.raises(BadInput, match=f'{file}, {report}'):
        raise second


def test_fields_of_preferences_have_any_names(tmp_path):
    rows = [
        {'q': 'p', 'x': {'good': 'a', 'bad': 'b'}},
        {'q': [USER('p')], 'x': {'good': [BOT('a')], 'bad': [USER('p'), BOT('b')]}},
    ]
    (tmp_path / 'train.jsonl').write_bytes(cache.encode('train.jsonl', rows))
    named = {'prompt_field': 'q', 'chosen_field': 'x.good', 'rejected_field': 'x.bad'}
    examples = data.examples('preferences', {'folder': str(tmp_path)} | named, 'train')
    assert [(e.prompt, e.meta) for e in examples] == [('p', {'demonstration': 'a', 'rejected': 'b'})] * 2


def test_the_real_challenge_set_of_svamp_is_its_test_split(real):
    folder = os.path.join(real, 'math')
    examples = data.examples('svamp', {'folder': folder}, 'test')
    assert len(examples) == 1000 and examples[0].answer == '51' and examples[0].meta['subject'] == 'Subtraction'
    assert examples[0].meta['demonstration'] == '76 - 25 = 51'
    bare = data.examples('svamp', {'folder': folder, 'results': False}, 'test')
    assert bare[0].meta['demonstration'] == '76 - 25'
    # one row of the published file has a wrong answer
    assert sum(expression.reward(e.meta['demonstration'], e) for e in bare) == 999
    with pytest.raises(BadInput, match=r'holds no svamp_train\.jsonl'):
        data.examples('svamp', {'folder': folder}, 'train')


def test_a_share_of_svamps_stories_is_held_out_with_all_their_problems(real):
    options = {'folder': os.path.join(real, 'math'), 'held_out': 0.3}
    train, test = (data.examples('svamp', options, split) for split in ('train', 'test'))
    assert len(train) + len(test) == 1000 and 200 < len(test) < 400
    begins = [{re.sub('[0-9]', '', example.prompt.split('. ')[0]) for example in part} for part in (train, test)]
    assert not begins[0] & begins[1]


def test_variants_of_svamps_problems_have_other_numbers_and_right_answers(real):
    options = {'folder': os.path.join(real, 'math'), 'held_out': 0.3, 'results': False}
    train, more = (data.examples('svamp', options | {'variants': n}, 'train') for n in (0, 4))
    assert more == data.examples('svamp', options | {'variants': 4}, 'train') and more[: len(train)] == train
    assert len({example.id for example in more}) == len(more) > 4.8 * len(train)
    originals = {example.id: example for example in train}
    for variant in more[len(train) :]:
        original = originals[variant.id % 1000]  # svamp.jsonl has so many rows
        assert variant.prompt != original.prompt
        assert expression.reward(variant.meta['demonstration'], variant) == 1 and '.' not in variant.answer
        assert re.sub('[0-9.]', '', variant.prompt) == re.sub('[0-9.]', '', original.prompt)
        assert variant.meta['subject'] == original.meta['subject']
    assert len({example.prompt for example in more}) > 0.95 * len(more)
    test = data.examples('svamp', options, 'test')
    assert data.examples('svamp', options | {'variants': 4}, 'test') == test


# the experiments


@pytest.mark.parametrize('module', [gsm8k, math_config, code, svamp, preferences], ids=lambda module: module.__name__)
def test_an_experiment_reads_the_hub_where_there_is_no_folder(hub_cache, module):
    config = module.get_config()
    config.data.options.folder = 'no/where'
    cache.write(hub_cache, config.data.path, OLD, REPOSITORIES[config.data.path])
    located = data.locate(data.DataOptions.from_config(config.data))
    assert read(located) and not any(isinstance(row, BadInput) for row in read(located))
