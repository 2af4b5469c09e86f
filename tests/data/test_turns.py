"""The assistant's turn: the text of its token ids, the token that ends it, and what the prompt has begun of it."""

import json
import shutil

from ml_collections import ConfigDict
import pytest

from grpo_jax import data
from grpo_jax.configs import arithmetic
from grpo_jax.data import turns
from grpo_jax.data.prompt_format import PromptFormat
from grpo_jax.models import hf
from grpo_jax.text import completion_text, exact_text

TAGS = ('<think>', '</think>', '<answer>', '</answer>')
ASKS = '{% if add_generation_prompt %}<s>assistant\n{% endif %}'
CHAT = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}" + ASKS
OPENS = CHAT.replace('assistant\n{%', 'assistant\n<think>\n{%')
CLOSES = CHAT.replace('assistant\n{%', 'assistant\n<think>\n\n</think>\n\n{%')


@pytest.fixture
def tokenizer_with(tmp_path):
    """(added tokens, special=False, **settings of tokenizer_config.json) -> the demo's tokenizer with these."""

    def make(added=(), special=False, **settings):
        folder = tmp_path / 'model'
        shutil.copytree(hf.find('configs/models/characters'), folder, dirs_exist_ok=True)
        content = json.loads((folder / 'tokenizer.json').read_text())
        size = 1 + max(*content['model']['vocab'].values(), *(token['id'] for token in content['added_tokens']))
        flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': special}
        content['added_tokens'] += [{'id': size + i, 'content': text, **flags} for i, text in enumerate(added)]
        (folder / 'tokenizer.json').write_text(json.dumps(content))
        config = json.loads((folder / 'config.json').read_text()) | {'vocab_size': size + len(added)}
        (folder / 'config.json').write_text(json.dumps(config))
        path = folder / 'tokenizer_config.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return hf.load_tokenizer(folder)

    return make


@pytest.mark.parametrize('special', [False, True])
def test_text_is_what_was_sampled_whatever_the_tokenizer_cleans_or_calls_special(tokenizer_with, special):
    tokenizer = tokenizer_with(TAGS, special, clean_up_tokenization_spaces=True)
    text = "<think>do n't , I 'm</think><answer>5 !</answer>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert completion_text(tokenizer, [*ids, tokenizer.eos_token_id, tokenizer.pad_token_id]) == text
    assert exact_text(tokenizer, [*ids, tokenizer.eos_token_id]) == text + '<eos>'


def test_text_leaves_out_the_stop_tokens_of_the_run_alone(tokenizer_with):
    tokenizer = tokenizer_with((*TAGS, '<e>'), special=True)
    ids = tokenizer.encode('<answer>5</answer><e>', add_special_tokens=False)
    assert completion_text(tokenizer, ids, [ids[-1]]) == '<answer>5</answer>'
    assert completion_text(tokenizer, ids) == '<answer>5</answer><e>'


@pytest.mark.parametrize(
    ('template', 'before', 'token'),
    [
        (CHAT, '', '<e>'),
        (CHAT.replace('<e>\n', ' <e>'), ' ', '<e>'),  # as Llama 2 writes it
        # the last turn ends otherwise than those before it, as gpt-oss writes it
        (CHAT.replace('<e>', '{% if loop.last %}<last>{% else %}<e>{% endif %}'), '', '<last>'),
        (CHAT.replace('<e>', ''), '', '<eos>'),  # the template writes no token there
        ('{{ raise_exception("only questions") }}', '', '<eos>'),
    ],
    ids=['chatml', 'blank', 'last', 'text', 'fails'],
)
def test_demonstration_of_a_chat_ends_as_the_template_ends_a_turn(tokenizer_with, template, before, token):
    tokenizer = tokenizer_with(('<s>', '<e>', '<last>'), chat_template=template)
    end = data.find_end(tokenizer, PromptFormat(chat=True), (1,))
    assert end == (before, tokenizer.convert_tokens_to_ids(token))
    ids = data.encode_turn(tokenizer, '4', end)
    assert exact_text(tokenizer, ids) == f'4{before}{token}'
    assert data.find_end(tokenizer, PromptFormat(), (7,)) == ('', tokenizer.eos_token_id)
    tokenizer.eos_token = None
    assert data.find_end(tokenizer, PromptFormat(), (7,)) == ('', 7)


@pytest.mark.parametrize(
    ('text', 'begun'),
    [
        ('1+1=', ''),
        ('Put it in <think> </think>. 1+1=', ''),
        ('Begin with <think>. 1+1=', ''),
        ('1+1=<think>\n', '<think>\n'),
        ('1+1=<think>\n\n</think>\n\n', ''),
        ('Use <think> </think>. 1+1=[THINK]', '[THINK]'),
        ('1+1= <reasoning> ', '<reasoning> '),
    ],
)
@pytest.mark.parametrize('added', [(), ('<think>', '</think>')], ids=['spelled', 'tokens'])
def test_prompt_begins_a_completion_where_a_tag_stands_open_at_its_end(tokenizer_with, added, text, begun):
    tokenizer = tokenizer_with(added)
    assert turns.find_begun(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == begun


def test_words_of_the_assistant_that_the_completion_continues_count_with_an_open_tag(tokenizer_with):
    tokenizer = tokenizer_with()
    ids = tokenizer.encode('<think>So 1+1', add_special_tokens=False)
    assert turns.find_begun(tokenizer, ids, '<think>So 1+1') == '<think>So 1+1'
    assert turns.find_begun(tokenizer, ids, '<think>So</think> 1+1') == ''


@pytest.mark.parametrize(('template', 'begun'), [(CHAT, ''), (OPENS, '<think>\n'), (CLOSES, '')])
def test_examples_know_what_the_chat_template_begins(tokenizer_with, template, begun):
    tokenizer = tokenizer_with(('<think>', '</think>', '<s>', '<e>'), chat_template=template)
    config = arithmetic.get_config()
    config.data.chat, config.data.max_prompt_tokens = True, 100
    config.data.options = ConfigDict({'digits': 1, 'count': 4, 'blurts': 0.5, 'wrong': 0.5})
    dataset = data.load(data.DataOptions.from_config(config.data), 'train', tokenizer)
    assert {example.begun for example in dataset.examples} == {begun}
    _, prompts = data.prompts(dataset, [0, 1], 300, 0, '<think>')
    assert prompts.thinking is not None and prompts.thinking.tolist() == [bool(begun)] * 2
    assert data.prompts(dataset, [0, 1], 300, 0)[1].thinking is None
