"""Chats: the whole of one reaches the model as the chat template writes it, wherever prompts are read."""

import json
import os
import shutil

from ml_collections import ConfigDict
import pyarrow
import pyarrow.parquet
import pytest

from grpo_jax import data
from grpo_jax.configs import arithmetic as demo
from grpo_jax.data import files, rollouts
from grpo_jax.errors import BadInput
from grpo_jax.models import hf
from grpo_jax.rewards import model as reward_models
from grpo_jax.run.open import open_config, open_split
from grpo_jax.tools import show
from grpo_jax.types import Example
from tests import doc_examples, tiny_run

MODEL = os.path.join(os.path.dirname(demo.__file__), 'models', 'characters')
PLAIN = data.PromptFormat(True, '', '{prompt}')
SYSTEM, USER, BOT = ({'role': role, 'content': f'{role} says so.'} for role in ('system', 'user', 'assistant'))
LAST = {'role': 'user', 'content': 'And 2+2?'}
CHAT = [SYSTEM, USER, BOT, LAST]
# the last role, and what opens the answer, as the chat templates of Qwen have it
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{% if loop.last and m.role == 'assistant' %}{% endif %}"
    '{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}'
)


@pytest.fixture(scope='module', params=['qwen3', 'qwen2.5'])
def qwen(request, qwen3, real, tmp_path_factory):
    """Both published tokenizers with their chat templates."""
    if request.param == 'qwen3':
        return qwen3
    folder = tmp_path_factory.mktemp('qwen')
    shutil.copy(os.path.join(qwen3.name_or_path, 'tokenizer.json'), folder)
    shutil.copy(os.path.join(real, 'tokenizers', 'qwen2.5', 'tokenizer_config.json'), folder)
    return hf.load_tokenizer(str(folder))


@pytest.fixture
def tokenizer():
    """The demo's tokenizer of single characters, with a chat template."""
    tokenizer = hf.load_tokenizer(MODEL)
    tokenizer.chat_template = CHATML
    return tokenizer


def load(folder, tokenizer, rows, answered=False, **changes):
    """The Dataset of rows in a JSONL file, whose prompts are chats."""
    (folder / 'train.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    section = demo.get_config().data.to_dict() | {'name': 'files', 'chat': True, 'max_prompt_tokens': 500}
    section |= {'options': {'folder': str(folder)}} | changes
    return data.load(data.DataOptions.from_config(ConfigDict(section)), 'train', tokenizer, lambda example: answered)


CHATS = {
    'one message': [LAST],
    'a system message': [SYSTEM, LAST],
    'a history': [USER, BOT, LAST],
    'both': CHAT,
    'two turns before': [SYSTEM, USER, BOT, USER, BOT, LAST],
    'a result of a tool': [USER, {'role': 'assistant', 'content': 'Let me see.'}, {'role': 'tool', 'content': '4'}],
    'spaces and marks': [SYSTEM, {'role': 'user', 'content': ' é 数 <|im_end|>\n'}],
}


@pytest.mark.parametrize('name', CHATS)
def test_a_chat_is_written_as_the_template_writes_the_whole_list(qwen, tmp_path, name):
    loaded = load(tmp_path, qwen, [{'prompt': CHATS[name], 'answer': '4'}], answered=True)
    whole = qwen.apply_chat_template(CHATS[name], add_generation_prompt=True, tokenize=False)
    assert loaded.tokens == [qwen.encode(whole, add_special_tokens=False)]
    assert loaded.examples[0].prompt == [m for m in CHATS[name] if m['role'] == 'user'][-1]['content']


def test_an_answer_that_the_chat_begins_is_gone_on_with(qwen, tmp_path):
    begun = [*CHAT, {'role': 'assistant', 'content': 'The answer is'}]
    (ids,) = load(tmp_path, qwen, [{'prompt': begun}]).tokens
    assert qwen.decode(ids).endswith('<|im_start|>assistant\nThe answer is') or 'think' in qwen.decode(ids)
    assert qwen.decode(ids).endswith('The answer is')


def test_parts_of_text_are_joined_and_pictures_are_reported(tmp_path, tokenizer):
    parts = [{'type': 'text', 'text': 'How '}, {'type': 'text', 'text': 'many?'}]
    rows = [
        {'prompt': [SYSTEM, {'role': 'user', 'content': parts}]},
        {'prompt': [{'role': 'user', 'content': [{'type': 'image', 'url': 'x.png'}, *parts]}]},
    ]
    (joined,) = load(tmp_path, tokenizer, rows).examples
    assert joined.prompt == 'How many?' and joined.messages[1] == {'role': 'user', 'content': 'How many?'}
    _, picture = files.examples('train', folder=str(tmp_path), answer_field='')
    assert str(picture).startswith(f'{tmp_path / "train.jsonl"}, line 2 = ') and 'must be text' in str(picture)


def test_fields_that_parquet_fills_up_are_no_fields_of_a_message(tmp_path):
    chat = [SYSTEM, {'role': 'user', 'content': 'x', 'name': 'Ann'}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{'prompt': chat}]), tmp_path / 'train.parquet')
    (row,) = files.examples('train', folder=str(tmp_path))
    assert row.example.messages == tuple(chat)


def test_the_chats_own_system_message_wins_over_that_of_the_config(tmp_path, tokenizer):
    loaded = load(tmp_path, tokenizer, [{'prompt': [SYSTEM, LAST]}, {'prompt': 'Hi'}], system='Be brief.')
    own, given = map(tokenizer.decode, loaded.tokens)
    assert 'system says so.' in own and 'Be brief.' not in own
    assert given.startswith('<system>Be brief.</<user>Hi</')


def test_the_template_is_around_the_last_words_of_the_user(tmp_path, tokenizer):
    (ids,) = load(tmp_path, tokenizer, [{'prompt': CHAT}], template='Q: {prompt} Think.').tokens
    text = tokenizer.decode(ids)
    assert '<user>user says so.</' in text and '<user>Q: And 2+2? Think.</' in text


def test_a_chat_without_the_chat_template_is_refused_and_a_single_message_is_a_prompt(tmp_path, tokenizer):
    (ids,) = load(tmp_path, tokenizer, [{'prompt': [LAST]}], chat=False).tokens
    assert tokenizer.decode(ids) == 'And 2+2?'
    with pytest.raises(BadInput, match=r'^data.chat = False: .* example 1 is a chat of 4 .*; set data.chat=True'):
        load(tmp_path, tokenizer, [{'prompt': [LAST]}, {'prompt': CHAT}], chat=False)


TEMPLATES = {
    'no message': ('Hello, who is there?', 'does not write what message 1 of user says'),
    'a fixed message': ('{{ messages | length }} messages', 'does not write what message 1 of user says'),
    'nothing': ('', 'has no chat template'),
    'a comment': ('{# nothing #}', 'fails: .*it writes nothing'),
    'spaces': ('  \n ', 'fails: .*it writes nothing'),
    'syntax': ('{% for m in messages %}{{ m.content }}', 'fails: TemplateSyntaxError'),
    'an unknown filter': ('{{ messages | nonsense }}', 'fails: '),
    'a wrong type': ('{{ messages + 1 }}', 'fails: TypeError'),
    'an exception of its own': ("{{ raise_exception('no chats here') }}", 'fails: .*no chats here'),
    'division': ('{{ 1 / 0 }}', 'fails: ZeroDivisionError'),
    'no end': ('{% for i in range(10 ** 9) %}x{% endfor %}', 'fails: OverflowError'),
    'what is private': ("{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}", 'fails|says'),
}


@pytest.mark.parametrize('name', TEMPLATES)
def test_a_chat_template_that_does_not_write_the_prompt_is_refused(tmp_path, tokenizer, name):
    tokenizer.chat_template, words = TEMPLATES[name]
    with pytest.raises(BadInput, match=f'^data.chat = True: .*{words}'):
        load(tmp_path, tokenizer, [{'prompt': 'x'}])


def test_a_template_that_drops_the_system_message_or_the_history_is_refused_where_there_is_one(tmp_path, tokenizer):
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    load(tmp_path, tokenizer, [{'prompt': [USER, BOT, LAST]}])
    for rows, changes in [([{'prompt': [SYSTEM, LAST]}], {}), ([{'prompt': 'x'}], {'system': 'Be brief.'})]:
        with pytest.raises(BadInput, match='does not write what message 1 of system, user says'):
            load(tmp_path, tokenizer, rows, **changes)
    tokenizer.chat_template = '{{ messages[-1].content }}'
    load(tmp_path, tokenizer, [{'prompt': 'x'}])
    with pytest.raises(BadInput, match='does not write what message 1 of user, assistant, user says'):
        load(tmp_path, tokenizer, [{'prompt': [USER, BOT, LAST]}])


def test_a_chat_that_the_template_refuses_is_the_fault_of_its_row(tmp_path, tokenizer):
    tokenizer.chat_template = (
        "{% if messages[1] %}{{ raise_exception('one message') }}{% endif %}"
        '{% for m in messages %}{{ m.content }}{% endfor %}'
    )
    rows = [{'prompt': 'x'}, {'prompt': [USER, BOT, LAST]}, {'prompt': 'y'}]
    assert [e.id for e in load(tmp_path, tokenizer, rows).examples] == [0, 2]
    with pytest.raises(BadInput, match=r'example 1 of the train split = .*cannot write it: .*one message'):
        load(tmp_path, tokenizer, rows, strict=True)


def test_variables_of_the_chat_template_are_given_and_must_be_its_own(tmp_path, tokenizer):
    tokenizer.chat_template = '{{ date }}{% for m in messages %}{{ m.content }}{% endfor %}'
    kwargs = {'date': '1+'}
    loaded = load(tmp_path, tokenizer, [{'prompt': '1='}], chat_template_kwargs=kwargs)
    assert tokenizer.decode(loaded.tokens[0]) == '1+1='
    for name in ('datum', 'messages', 'add_generation_prompt'):
        with pytest.raises(BadInput, match=rf'data\.chat_template_kwargs\.{name} = .*is no variable'):
            load(tmp_path, tokenizer, [{'prompt': '1='}], chat_template_kwargs={name: 'x'})
    flag = '--config.data.chat_template_kwargs.enable_thinking=False'
    with doc_examples.parsed('train', ['--config=gsm8k', '--workdir=w', flag]):
        assert doc_examples.flags.FLAGS.config.data.chat_template_kwargs.to_dict() == {'enable_thinking': False}
    with pytest.raises(BadInput, match=r'chat_template_kwargs = .*set data\.chat=True'):
        load(tmp_path, tokenizer, [{'prompt': '1='}], chat=False, chat_template_kwargs=kwargs)


# answers


ROWS = [{'prompt': '1+1=', 'answer': 2}, {'prompt': '1+2='}, {'prompt': '1+3=', 'answer': None}, {'prompt': '1+4='}]


def load_run(folder, rows, **changes):
    """The train split of a run on these rows."""
    for split, part in [('train', rows), ('test', [{'prompt': '9+9=', 'answer': 18}])]:
        (folder / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in part))
    changes = {'data__name': 'files', 'data__options': {'folder': str(folder)}} | changes
    return open_split(open_config(tiny_run.config(**changes), str(folder / 'run')), 'train')


def test_prompts_without_answers_are_loaded_where_no_verifier_is_set(tmp_path):
    loaded = load_run(tmp_path, ROWS, reward__verifier='')
    assert [e.answer for e in loaded.examples] == ['2', '', '', ''] and [e.id for e in loaded.examples] == [0, 1, 2, 3]


def test_prompts_without_answers_are_refused_by_file_and_row_where_a_verifier_is_set(tmp_path):
    with pytest.raises(
        BadInput,
        match=r'3 of 4 rows.* are malformed; mend .*; the first of them so: .*train.jsonl, line 2 has nothing in field',
    ):
        load_run(tmp_path, ROWS)
    with pytest.raises(BadInput, match=r"train.jsonl, line 2 has nothing in field 'answer'"):
        load_run(tmp_path, ROWS[:2], data__strict=True)


def test_a_mixture_loads_prompts_without_answers_too(tmp_path):
    (tmp_path / 'train.jsonl').write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    sources = [
        {'name': 'files', 'source': name, 'weight': 1.0, 'options': {'folder': str(tmp_path)}} for name in ('a', 'b')
    ]
    options = {'sources': sources}
    section = ConfigDict(demo.get_config().data.to_dict() | {'name': 'mixture', 'options': options})
    options = data.DataOptions.from_config(section)
    loaded = data.load(options, 'train', hf.load_tokenizer(MODEL), needs_answer=lambda example: False)
    assert [(e.id, e.meta['source']) for e in loaded.examples] == [(0, 'a'), (2, 'a'), (1, 'b'), (3, 'b')]


def test_an_answer_of_another_type_is_malformed_also_without_a_verifier(tmp_path, tokenizer):
    rows = [{'prompt': 'x', 'answer': 1}, {'prompt': 'y', 'answer': ['1', '2']}]
    assert [e.id for e in load(tmp_path, tokenizer, rows).examples] == [0]


# where else prompts are read


def test_a_reward_model_reads_the_whole_chat(tokenizer):
    loaded = reward_models.RewardModel(tokenizer, PLAIN, '\n', None, print, None, 512, 1)
    examples = [Example('And 2+2?', '', 0, {}, tuple(CHAT))] * 2 + [Example('And 2+2?', '', 1, {})]
    first, second, alone = reward_models.encode_prompts(loaded, examples)
    assert tokenizer.decode(first) == ''.join(f'<{m["role"]}>{m["content"]}</' for m in CHAT) + '<assistant>'
    assert first == second != alone


def test_chats_in_a_runs_rollouts_are_read_again(tmp_path):
    row = {'prompt': 'And 2+2?', 'messages': CHAT, 'answer': '4', 'completion': '4', 'reward': 1.0}
    rows = [row, row | {'messages': CHAT[2:], 'completion': '5'}, row | {'completion': 'five', 'reward': 0.0}]
    (tmp_path / '000000.jsonl').write_text('\n'.join(json.dumps({'parts': {}} | row) for row in rows))
    both = [e for split in ('train', 'test') for e in rollouts.examples(split, folder=str(tmp_path), least=1.0)]
    assert {(e.messages == tuple(CHAT), e.meta['demonstration'], e.meta.get('rejected')) for e in both} == {
        (True, '4', 'five'),
        (False, '5', None),
    }


def test_show_prints_chats_without_answers(tmp_path, qwen3):
    for split, prompt in {'train': CHAT, 'test': 'another'}.items():
        (tmp_path / f'{split}.jsonl').write_text(json.dumps({'prompt': prompt}) + '\n')
    config = demo.get_config()
    config.reward.verifier, config.supervised.updates = '', 0
    config.data.prompts_per_step = 1
    shutil.copytree(qwen3.name_or_path, tmp_path / 'model')
    shutil.copy(os.path.join(hf.find('configs/models/Qwen3-0.6B'), 'config.json'), tmp_path / 'model')
    config.model.path, config.model.random_init = str(tmp_path / 'model'), True
    config.data.name, config.data.chat = 'files', True
    config.data.options, config.data.max_prompt_tokens = {'folder': str(tmp_path)}, 200
    assert any('<|im_start|>system\\nsystem says so.<|im_end|>' in line for line in show.lines(config, 1))
