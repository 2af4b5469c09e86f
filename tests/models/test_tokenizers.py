"""Published tokenizers: what comes back from ids, beginnings and ends of texts, stop strings, switches of templates."""

import functools
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import data, sampler
from grpo_jax.data import prompt_format
from grpo_jax.errors import BadInput
from grpo_jax.models import hf
from grpo_jax.sampler import stops
from grpo_jax.types import Prompts

BYTES = ('qwen2.5', 'qwen3', 'smollm2', 'stories260K', 'babyllama-361')  # they spell every text, if need be in bytes
SHAPES = ('characters', 'letters', 'brackets')  # of this repository: an alphabet, and nothing else
TEXTS = {
    'nothing': '',
    'words': "Once upon a time, there was a girl. She didn't say: 'Hi' ?",
    'spaces': '  two  spaces\tand a tab ',
    'lines': '\n\na\r\nb\n',
    'numbers': '12*34=408, 1,000.50 and ½ of Ⅷ',
    'emoji': '😀👩‍👩‍👧🇩🇪',
    'CJK': '日本語 中文 한국어',
    'control': '\x00\x01\x07\x1b[31m\x7f\x85',
    'directions': 'a\u202eb\u200d\ufeff',
    'rare': '\ue000\U0010ffff',
    'other scripts': 'naïve café, мир, שלום, नमस्ते',
}
COMPOSED = {'e\u0301': 'é', '\u212b': 'Å'}  # text -> its normal form C


@pytest.fixture
def tokenizer(request):
    """The tokenizer of that name."""
    name = request.param
    if name in SHAPES:
        return hf.load_tokenizer(os.path.join('configs', 'models', name))
    if name.startswith('qwen'):
        return request.getfixturevalue(name.replace('.', ''))
    if name == 'smollm2':
        return hf.load_tokenizer(request.getfixturevalue('smollm2'))
    return hf.load_tokenizer(os.path.join(request.getfixturevalue('real'), 'models', name))


def named(*names):
    return pytest.mark.parametrize('tokenizer', names, indirect=True)


def plain_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@functools.cache
def texts_of(tokenizer):
    """What the sampler takes each id to say."""
    return stops.bytes_of_tokens(tokenizer, len(tokenizer))


# round trips


@named(*BYTES)
def test_every_text_comes_back_from_its_ids(tokenizer):
    wrong = {
        name: back for name, text in TEXTS.items() if (back := tokenizer.decode(plain_ids(tokenizer, text))) != text
    }
    assert not wrong


@named('smollm2', 'stories260K', 'babyllama-361')
def test_what_is_not_normalized_comes_back_as_it_was(tokenizer):
    assert [tokenizer.decode(plain_ids(tokenizer, text)) for text in COMPOSED] == list(COMPOSED)


@named('qwen2.5', 'qwen3')
def test_qwen_composes_characters_and_loses_nothing_else(tokenizer):
    assert [tokenizer.decode(plain_ids(tokenizer, text)) for text in COMPOSED] == list(COMPOSED.values())


@named(*SHAPES)
def test_an_alphabet_spells_its_own_characters_and_marks_all_others(tokenizer):
    own = [text for text in tokenizer.get_vocab() if text not in tokenizer.all_special_tokens]
    assert all(tokenizer.decode(plain_ids(tokenizer, text)) == text for text in own)
    assert tokenizer.unk_token_id in plain_ids(tokenizer, '日')


@named('stories260K', 'babyllama-361')
def test_sentencepiece_cannot_tell_its_mark_of_a_space_from_one(tokenizer):
    assert tokenizer.decode(plain_ids(tokenizer, 'a\u2581b')) == 'a b'


@named(*BYTES)
def test_the_sampler_reads_the_bytes_of_the_text(tokenizer):
    texts = texts_of(tokenizer)
    # sentencepiece begins a text with a space, which decoding takes away again
    first = b' ' if len(tokenizer) < 1000 else b''
    read = {name: b''.join(texts[token] for token in plain_ids(tokenizer, text)) for name, text in TEXTS.items()}
    assert read == {name: (first if text else b'') + text.encode() for name, text in TEXTS.items()}


# stop strings


def segmentations(texts, text, rng, count):
    """That many random lists of tokens which spell the bytes of a text; texts are the bytes of each token."""
    places = {}
    for token, piece in enumerate(texts):
        places.setdefault(piece, token)
    longest = max(map(len, texts))
    for _ in range(count):
        tokens, rest = [], text
        while rest:
            most = rng.choice([1, 2, longest])  # also the shortest pieces, that is single bytes
            fitting = [n for n in range(1, min(most, len(rest)) + 1) if rest[:n] in places]
            if not fitting:
                fitting = [n for n in range(1, min(longest, len(rest)) + 1) if rest[:n] in places]
            n = rng.choice(fitting)
            tokens.append(places[rest[:n]])
            rest = rest[n:]
        yield tokens


@named(*BYTES)
def test_a_stop_string_is_met_however_it_is_split(tokenizer):
    strings = ['</answer>', '日本', '😀', '\n\nUser:', '\u202e!']
    texts, rng = texts_of(tokenizer), random.Random(0)
    table = stops.transition_table(strings, texts)
    for string in strings:
        spelled = f'It is </answe 日\n\nUse{string} and more'.encode()
        for tokens in segmentations(texts, spelled, rng, 40):
            state, text = 0, b''
            for token in tokens:
                state, text = int(table[state, token]), text + texts[token]
                assert (state == len(table) - 1) == any(other.encode() in text for other in strings), tokens
            assert state == len(table) - 1


# beginnings and ends


@named('qwen2.5', 'qwen3', 'smollm2')
def test_a_tokenizer_that_adds_no_bos_gets_none(tokenizer):
    ids = data.encode_prompt(tokenizer, 'Hi', data.PromptFormat(False, '', '{prompt}'))
    assert ids == plain_ids(tokenizer, 'Hi') and not {*ids} & {*tokenizer.all_special_ids}


@named('stories260K', 'babyllama-361')
def test_a_tokenizer_that_adds_bos_adds_one(tokenizer):
    ids = data.encode_prompt(tokenizer, 'Hi', data.PromptFormat(False, '', '{prompt}'))
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert ids[-1] != tokenizer.eos_token_id


@named('smollm2')
def test_a_chat_whose_template_writes_bos_has_it_once_a_message(tokenizer):
    ids = data.encode_prompt(tokenizer, 'Hi', data.PromptFormat(True, 'Be brief.', '{prompt}'))
    assert tokenizer.decode(ids) == (
        '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    )
    assert ids.count(tokenizer.bos_token_id) == 3  # <|im_start|> opens each message, and nothing comes before it


@named('smollm2')
def test_a_stop_token_that_is_the_padding_too_is_one(tokenizer, smollm2):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert hf.stop_tokens(smollm2, tokenizer) == (tokenizer.eos_token_id,)


def test_where_padding_is_the_end_token_the_mask_tells_them_apart(tiny):
    c, params = tiny
    prompts = Prompts(jnp.full((1, 4), 5), jnp.ones((1, 4), bool), jnp.array([0]))
    keys = sampler.row_keys(jax.random.key(0), jnp.int32(0), prompts.ids, 64)
    options = sampler.Sampling(temperature=1.0, max_tokens=24, pad_token=7, stop_tokens=(7,))
    rollout = sampler.generate(params, prompts, keys, version=0, c=c, sampling=options, tables={}, block=32)
    tokens, mask = np.asarray(rollout.tokens)[:, 4:], np.asarray(rollout.completion_mask)
    ended = ~np.asarray(rollout.truncated)
    assert 5 < ended.sum() < 64
    assert (tokens[~mask] == 7).all()
    assert (((tokens == 7) & mask).sum(1) == ended).all()
    assert all(row[n - 1] == 7 for row, n in zip(tokens[ended], mask[ended].sum(1), strict=True))


# switches of thinking


def switched(thinking, chat=True):
    return data.PromptFormat(chat, '', '{prompt}', thinking)


@named('qwen3')
def test_qwen3_thinks_or_not_as_the_switch_says(tokenizer):
    opened = '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    for thinking, after in [('auto', ''), ('on', ''), ('off', '<think>\n\n</think>\n\n')]:
        ids = data.encode_prompt(tokenizer, 'Hi', switched(thinking))
        assert tokenizer.decode(ids) == opened + after
    prompt_format.check_chats(tokenizer, switched('off'), [])


@named('qwen2.5', 'smollm2')
def test_a_switch_that_the_template_does_not_read_is_refused(tokenizer):
    with pytest.raises(BadInput, match=r"^data\.thinking = 'off': the chat template of .* reads none of enable_think"):
        prompt_format.check_chats(tokenizer, switched('off'), [])
    prompt_format.check_chats(tokenizer, switched('auto'), [])


def test_a_template_with_the_other_name_of_the_switch_is_given_it_too():
    tokenizer = hf.load_tokenizer('configs/models/characters')
    tokenizer.chat_template = '{{ messages[0].content }}{% if thinking %}!{% endif %}'
    assert [tokenizer.decode(data.encode_prompt(tokenizer, '1', switched(one))) for one in ('on', 'off')] == ['1!', '1']


def test_the_switch_without_a_chat_template_is_refused():
    with pytest.raises(BadInput, match=r'^data\.thinking = .*set data\.chat=True'):
        switched('on', chat=False).check()
