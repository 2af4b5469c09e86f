"""Preference pairs in the forms of Hugging Face's preference data sets, and what learns from them."""

import dataclasses
import json

import numpy as np
import pytest

from grpo_jax import evaluate, reward_model, train
from grpo_jax.collect import demonstrations
from grpo_jax.data import preferences
from grpo_jax.errors import BadInput
from grpo_jax.run.open import open_config, open_split
from grpo_jax.types import Example
from tests import tiny_run


def message(role):
    return lambda content: {'role': role, 'content': content}


SYSTEM, USER, BOT = map(message, ('system', 'user', 'assistant'))
PAIR = {'demonstration': 'So.', 'rejected': 'No.'}
BEFORE = (SYSTEM('Be brief.'), USER('Hi'), BOT('Hello'), USER('Why?'))

# a row, and the prompt and messages that it gives; the completions are always the same
FORMS = {
    'texts': ({'prompt': 'Why?', 'chosen': 'So.', 'rejected': 'No.'}, ('Why?', ())),
    'chats': ({'prompt': [USER('Why?')], 'chosen': [BOT('So.')], 'rejected': [BOT('No.')]}, ('Why?', ())),
    'a whole history': ({'prompt': [*BEFORE], 'chosen': [BOT('So.')], 'rejected': [BOT('No.')]}, ('Why?', BEFORE)),
    'completions that begin with the prompt': (
        {'prompt': [*BEFORE], 'chosen': [*BEFORE, BOT('So.')], 'rejected': [*BEFORE, BOT('No.')]},
        ('Why?', BEFORE),
    ),
    'an implicit prompt': ({'chosen': [*BEFORE, BOT('So.')], 'rejected': [*BEFORE, BOT('No.')]}, ('Why?', BEFORE)),
    'a text that the chat repeats': (
        {'prompt': 'Why?', 'chosen': [USER('Why?'), BOT('So.')], 'rejected': [USER('Why? '), BOT('No.')]},
        ('Why?', ()),
    ),
    'a text that a chat began with': (
        {'prompt': 'Hi', 'chosen': [*BEFORE, BOT('So.')], 'rejected': [*BEFORE, BOT('No.')]},
        ('Why?', BEFORE),
    ),
    'a text and a chat': ({'prompt': 'Why?', 'chosen': 'So.', 'rejected': [USER('Why?'), BOT('No.')]}, ('Why?', ())),
    'a chat and texts': ({'prompt': [*BEFORE], 'chosen': 'So.', 'rejected': 'No.'}, ('Why?', BEFORE)),
}


def read(folder, *rows, **options):
    (folder / 'train.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return preferences.examples('train', folder=str(folder), **options)


@pytest.mark.parametrize('name', FORMS)
def test_every_form_gives_the_prompt_its_chat_and_the_pair(tmp_path, name):
    row, (prompt, messages) = FORMS[name]
    assert read(tmp_path, row) == [Example(prompt, '', 0, PAIR, messages)]


def test_fields_of_other_names_are_mapped(tmp_path):
    names = {'prompt_field': 'question', 'chosen_field': 'answers.good', 'rejected_field': 'answers.bad'}
    row = {'question': 'Why?', 'answers': {'good': 'So.', 'bad': 'No.'}}
    assert read(tmp_path, row, **names) == [Example('Why?', '', 0, PAIR)]


@pytest.mark.parametrize(
    'chosen, rejected, prompt, completions',
    [
        ('The sky is blue.', 'The sky is black.', 'The sky is', (' blue.', ' black.')),  # not within a word
        ('\n\nHuman: Why?\n\nAssistant: So.', '\n\nHuman: Why?\n\nAssistant: No.', '\n\nHuman: Why?\n\nAssistant:', ()),
        ('2+2=\n4', '2+2=\n5', '2+2=', ('\n4', '\n5')),
        ('I am', 'I am not', 'I', (' am', ' am not')),
    ],
)
def test_texts_without_a_prompt_are_parted_where_they_part(tmp_path, chosen, rejected, prompt, completions):
    (example,) = read(tmp_path, {'chosen': chosen, 'rejected': rejected})
    assert example.prompt == prompt
    assert (example.meta['demonstration'], example.meta['rejected']) == (completions or (' So.', ' No.'))


MALFORMED = {
    'other prompts': {'chosen': [USER('a'), BOT('x')], 'rejected': [USER('b'), BOT('y')]},
    'another history': {'chosen': [*BEFORE, BOT('x')], 'rejected': [*BEFORE[1:], BOT('y')]},
    'chats that part early': {'chosen': [USER('a'), BOT('x'), USER('c'), BOT('z')], 'rejected': [USER('a'), BOT('y')]},
    'no prompt': {'chosen': [BOT('x')], 'rejected': [BOT('y')]},
    'no prompt of texts': {'chosen': 'x', 'rejected': 'y'},
    'equal texts alone': {'chosen': 'a b', 'rejected': 'a b'},
    'a prompt of another chat': {'prompt': 'q', 'chosen': [USER('a'), BOT('x')], 'rejected': [USER('a'), BOT('y')]},
    'no answer': {'chosen': [USER('a')], 'rejected': [USER('a'), BOT('y')]},
    'an empty chat': {'prompt': 'a', 'chosen': [], 'rejected': [BOT('y')]},
    'no roles': {'chosen': [{'from': 'human', 'value': 'a'}], 'rejected': [BOT('y')]},
    'an unknown role': {'prompt': 'a', 'chosen': [message('gpt')('x')], 'rejected': [BOT('y')]},
    'a number as a chat': {'prompt': 'a', 'chosen': 1, 'rejected': True},
    'nothing': {},
}


@pytest.mark.parametrize('name', MALFORMED)
def test_a_row_that_is_no_pair_is_reported(tmp_path, name):
    _, error = read(tmp_path, FORMS['texts'][0], MALFORMED[name])
    assert isinstance(error, BadInput) and str(error).startswith(f'{tmp_path / "train.jsonl"}, line 2 ')


@pytest.fixture(scope='module')
def pairs(tmp_path_factory):
    """A folder of pairs of sums: the right answer is chosen; each form comes by turns."""
    folder = tmp_path_factory.mktemp('pairs')
    for split, start in [('train', 1), ('test', 6)]:
        rows = []
        for a in range(start, start + 4):
            prompt, right, wrong = f'{a}+{a}=', str(2 * a), str(3 * a)
            rows.append({'prompt': prompt, 'chosen': right, 'rejected': wrong})
            prompt = f'{a}+0='
            rows.append({'chosen': [USER(prompt), BOT(str(a))], 'rejected': [USER(prompt), BOT('17')]})
        (folder / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(folder)


def config(folder, **changes):
    own = {
        'preset': 'dpo',
        'steps': 2,
        'data__prompts_per_step': 2,
        'data__name': 'preferences',
        'data__options': {'folder': folder},
        'collection__source': 'pairs',
        'rollout__group_size': 2,
        'reward__parts': (('repetition', 1.0),),
        'reward__verifier': '',
        'supervised__updates': 0,
        'evaluation__prompts': 6,
    }
    return tiny_run.config(**own | changes)


def test_pairs_of_a_file_train_dpo(pairs, tmp_path):
    train.run(config(pairs, optimizer__learning_rate=1e-3, evaluation__prompts=2), str(tmp_path / 'run'))
    rows = tiny_run.rows(tmp_path / 'run')
    assert rows[0]['loss'] == pytest.approx(np.log(2), abs=1e-5)  # policy and reference are the same
    assert len(rows) == 2 and rows[1]['loss'] != rows[0]['loss'] and rows[1]['finite'] == 1


def test_pairs_of_a_file_train_a_reward_model(pairs, tmp_path):
    reward_model.run(config(pairs, supervised__updates=2), str(tmp_path / 'run'))
    results = json.loads((tmp_path / 'run' / 'evaluation.json').read_text())
    assert results['examples'] == 6 and (tmp_path / 'run' / 'reward_model' / 'config.json').exists()
    with pytest.raises(BadInput, match='holds a reward model, in its folder reward_model, and no policy'):
        evaluate.open_subject(None, str(tmp_path / 'run'))


def test_the_chat_of_a_pair_is_its_prompt(tmp_path, qwen3):
    for split in ('train', 'test'):
        row = {'chosen': [*BEFORE, BOT('So.')], 'rejected': [*BEFORE, BOT('No.')]}
        (tmp_path / f'{split}.jsonl').write_text(json.dumps(row) + '\n')
    opened = open_config(config(str(tmp_path), data__chat=True, data__max_prompt_tokens=200), str(tmp_path / 'run'))
    opened = dataclasses.replace(opened, model=opened.model._replace(tokenizer=qwen3))
    fields, settings = ('demonstration', 'rejected'), opened.settings
    dataset, (pair,) = demonstrations.find(open_split(opened, 'train'), qwen3, fields, settings.data, settings.sampling)
    assert qwen3.decode(dataset.tokens[0]) == qwen3.apply_chat_template(
        list(BEFORE), add_generation_prompt=True, tokenize=False
    )
    assert [qwen3.decode(ids[:-1]) for ids in pair] == ['So.', 'No.']
