"""A cache of the Hugging Face hub as its client writes one, filled without the hub, and data sets as they lie there."""

import hashlib
import json
import os

from ml_collections import ConfigDict
import pyarrow
import pyarrow.parquet

from grpo_jax import data
from grpo_jax.configs import default

OLD, NEW = 'a' * 40, 'b' * 40
HALVES = [
    {'question': '48/2?', 'answer': 'He has 48/2 = <<48/2=24>>24.\n#### 24'},
    {'question': '1,000+1?', 'answer': '#### 1,001'},
]


def write(folder, repository, commit, files, kind='dataset', refs=('main',)):
    """Puts a commit of a repository into the cache folder; files are bytes, or lists of rows, by name.

    Each ref, a branch or a tag, names the commit from now on, as after a download. Returns the snapshot's folder.
    """
    home = folder / f'{kind}s--{repository.replace("/", "--")}'
    snapshot = home / 'snapshots' / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (home / 'blobs').mkdir(exist_ok=True)
    for name, content in files.items():
        content = encode(name, content)
        blob, path = home / 'blobs' / hashlib.sha256(content).hexdigest(), snapshot / name
        path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        path.symlink_to(os.path.relpath(blob, path.parent))
    for ref in refs:
        (home / 'refs').mkdir(exist_ok=True)
        (home / 'refs' / ref).write_text(commit)
    return snapshot


def encode(name, rows):
    """The bytes of a file of rows: Parquet, JSONL or a JSON list, as its name says; bytes are what they are."""
    if isinstance(rows, bytes):
        return rows
    if name.endswith('.parquet'):
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        return sink.getvalue().to_pybytes()
    text = '\n'.join(map(json.dumps, rows)) if name.endswith('.jsonl') else json.dumps(rows, indent=1)
    return text.encode()


def options(name, path, revision='', /, **changes):
    """DataOptions of a data set on the hub."""
    section = default.get_config().data.to_dict() | {'name': name, 'path': path, 'revision': revision}
    return data.DataOptions.from_config(ConfigDict(section | {'options': changes}))


def read(located, split='train'):
    return data.examples(located.name, located.options, split)


# the first rows of every data set of the list, in its files

USER, BOT = (lambda text, role=role: {'content': text, 'role': role} for role in ('user', 'assistant'))


def math_row(problem, solution, kind='Algebra'):
    return {'problem': problem, 'level': 'Level 5', 'type': kind, 'solution': solution}


SUBJECTS = 'algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus'.split()
REPOSITORIES = {
    'openai/gsm8k': {
        'README.md': b'---\nconfigs: ...',
        'main/train-00000-of-00001.parquet': HALVES,
        'main/test-00000-of-00001.parquet': HALVES[:1],
        'socratic/train-00000-of-00001.parquet': [{'question': 'Why?', 'answer': 'How many? ** 7\n#### 7'}],
    },
    'EleutherAI/hendrycks_math': {
        f'{subject}/{split}-00000-of-00001.parquet': [math_row(f'{subject} {split}', rf'So $\boxed{{{k}}}$.', subject)]
        for k, subject in enumerate(SUBJECTS)
        for split in ('train', 'test')
    },
    'DigitalLearningGmbH/MATH-lighteval': {
        'data/train-00000-of-00001.parquet': [math_row('p', r'$\boxed{\frac{1}{2}}$'), math_row('q', r'is $\boxed 5$')]
    },
    'HuggingFaceH4/MATH-500': {
        'test.jsonl': [
            {
                'problem': 'p',
                'solution': 's',
                'answer': '7',
                'subject': 'Algebra',
                'level': 2,
                'unique_id': 'test/1.json',
            }
        ]
    },
    'ChilleD/SVAMP': {
        'train.json': [
            {
                'ID': 'chal-1',
                'Body': 'A pack costs 76 dollars, less 25 dollars',
                'Question': 'How much is a pack?',
                'Equation': '( 76.0 - 25.0 )',
                'Answer': '51.0',
                'Type': 'Subtraction',
            },
            {'Body': 'It rains. ', 'Question': ' How much?', 'Answer': 0.5, 'Type': 'Common-Divison', 'ID': 'chal-2'},
        ]
    },
    'openai/openai_humaneval': {
        'openai_humaneval/test-00000-of-00001.parquet': [
            {
                'task_id': 'HumanEval/0',
                'prompt': 'def one():\n    """One."""\n',
                'canonical_solution': '    return 1\n',
                'test': 'def check(candidate):\n    assert candidate() == 1\n',
                'entry_point': 'one',
            }
        ]
    },
    'google-research-datasets/mbpp': {
        'full/train-00000-of-00001.parquet': [
            {
                'task_id': 601,
                'text': 'Write one.',
                'code': 'def one():\r\n  return 1',
                'test_list': ['assert one() == 1'],
                'test_setup_code': '',
                'challenge_test_list': [],
            }
        ],
        'sanitized/validation-00000-of-00001.parquet': [
            {
                'source_file': 'x.ipynb',
                'task_id': 552,
                'prompt': 'Write two.',
                'code': 'def two():\n  return 2',
                'test_imports': ['import math'],
                'test_list': ['assert two() == math.sqrt(4)'],
            }
        ],
    },
    'HuggingFaceH4/ultrafeedback_binarized': {
        'data/train_gen-00000-of-00001.parquet': [{'prompt': 'another split', 'chosen': None}],
        'data/train_prefs-00000-of-00001.parquet': [
            {
                'prompt': 'Why?',
                'prompt_id': 'f0',
                'chosen': [USER('Why?'), BOT('So.')],
                'rejected': [USER('Why?'), BOT('No.')],
                'messages': [USER('Why?'), BOT('So.')],
                'score_chosen': 8.0,
                'score_rejected': 2.0,
            },
            {
                'prompt': 'Same?',
                'prompt_id': 'f1',
                'chosen': [USER('Same?'), BOT('Yes.')],
                'rejected': [USER('Same?'), BOT('Yes.')],
                'messages': [],
                'score_chosen': 5.0,
                'score_rejected': 5.0,
            },
        ],
    },
    'trl-lib/ultrafeedback_binarized': {
        'data/train-00000-of-00001.parquet': [
            {'chosen': [USER('Why?'), BOT('So.')], 'rejected': [USER('Why?'), BOT('No.')], 'score_chosen': 8.0}
        ]
    },
}
