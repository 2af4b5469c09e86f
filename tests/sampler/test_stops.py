"""Stop strings as an automaton over tokens, against plain search in the text."""

import os

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest

from grpo_jax.models import hf
from grpo_jax.sampler import stops


def states(strings, token_bytes, tokens):
    """(state after each token, the state that means a string was met)."""
    table = stops.transition_table(strings, token_bytes)
    state, visited = 0, []
    for token in tokens:
        state = int(table[state, token])
        visited.append(state)
    return visited, len(table) - 1


def first_met(strings, token_bytes, tokens):
    """Index of the token that completes a string, None without one."""
    visited, met = states(strings, token_bytes, tokens)
    return visited.index(met) if met in visited else None


@pytest.mark.parametrize(
    ('strings', 'pieces', 'expected'),
    [
        (['stop'], ['stop'], 0),
        (['stop'], ['s', 't', 'o', 'p'], 3),
        (['stop'], ['no', ' st', 'op!'], 2),  # across a border, with more text behind it
        (['stop'], ['a stop sign'], 0),  # whole, in the middle of a token
        (['stop'], ['sto', 'sto', 'p'], 2),
        (['stop'], ['sto', 'x', 'p'], None),
        (['stop'], ['st', '', 'op'], 2),  # an empty token changes nothing
        (['aab'], ['a', 'a', 'a', 'b'], 3),  # the third a keeps two of them
        (['aab'], ['aaa', 'b'], 1),
        (['abab'], ['aba', 'cab', 'ab'], 2),
        (['abc', 'bd'], ['ab', 'd'], 1),  # the other string has begun within the first
        (['abc', 'bd'], ['ab', 'c'], 1),
        (['abcd', 'abc'], ['ab', 'c'], 1),  # one begins the other
        (['abcd', 'bc'], ['abc'], 0),
        (['Ende', 'é'], ['caf', 'é'], 1),
    ],
)
def test_a_string_is_met_at_the_token_that_completes_it(strings, pieces, expected):
    assert first_met(strings, [piece.encode() for piece in pieces], range(len(pieces))) == expected


def test_a_character_may_be_split_over_tokens():
    first, second = [bytes([byte]) for byte in 'é'.encode()]
    assert first_met(['é'], [first, second, b'e'], [2, 0, 1]) == 2
    assert first_met(['é'], [first, second, b'e'], [1, 0, 2]) is None


def test_a_met_string_stays_met():
    visited, met = states(['b'], [b'a', b'b', b''], [0, 1, 0, 2, 0])
    assert visited == [0, met, met, met, met]


def test_the_table_of_one_string_is_the_hand_made_one():
    # states: '', 'a', 'aa', met
    table = stops.transition_table(['aab'], [b'a', b'b', b'', b'ab', b'c'])
    assert table.tolist() == [[1, 0, 0, 0, 0], [2, 0, 1, 3, 0], [2, 3, 2, 3, 0], [3, 3, 3, 3, 3]]
    assert table.dtype == np.int32


SMALL = strategies.text('ab', max_size=4)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    strings=strategies.lists(strategies.text('ab', min_size=1, max_size=5), min_size=1, max_size=3),
    vocabulary=strategies.lists(SMALL, min_size=1, max_size=5),
    data=strategies.data(),
)
def test_the_automaton_meets_what_search_finds(strings, vocabulary, data):
    tokens = data.draw(strategies.lists(strategies.integers(0, len(vocabulary) - 1), max_size=12))
    visited, met = states(strings, [text.encode() for text in vocabulary], tokens)
    text = ''
    for token, state in zip(tokens, visited, strict=True):
        text += vocabulary[token]
        assert (state == met) == any(string in text for string in strings)


# real tokenizers

STOPS = ['</answer>', '\n\n', ' the', 'ing ', '####', '.\n', 'e, ']
TEXTS = [
    'Once upon a time, there was a little girl named Lily. She said: "Hi!"\n\nThe end.',
    'def f(x):\n    return {x: [1, 22, 333]}  # naïve café 😀 日本語\n',
    '<answer> 3 * 4 = 12 </answer>\n#### 12,000.50',
    '  two  spaces\tand a tab ',
]
DIGITS = ['12*34=408', '0+1=1']


@pytest.fixture(scope='module', params=['stories260K', 'qwen3', 'characters'])
def vocabulary(request):
    """(tokenizer, bytes of its tokens, sample texts that it can spell)."""
    if request.param == 'qwen3':
        tokenizer = request.getfixturevalue('qwen3')
    elif request.param == 'characters':
        tokenizer = hf.load_tokenizer('configs/models/characters')
    else:
        tokenizer = hf.load_tokenizer(os.path.join(request.getfixturevalue('real'), 'models', 'stories260K'))
    texts = DIGITS if request.param == 'characters' else TEXTS
    return tokenizer, stops.bytes_of_tokens(tokenizer, len(tokenizer) + 3), texts


def text_of(tokenizer, tokens):
    """The text that the tokens add to a longer one: some tokenizers strip a space at the beginning of all."""
    anchor = tokenizer.convert_tokens_to_ids('0') if len(tokenizer) > 1000 else tokenizer.convert_tokens_to_ids('1')
    return tokenizer.decode([anchor, *tokens], skip_special_tokens=True)[1:]


def test_joined_bytes_of_tokens_are_the_decoded_text(vocabulary):
    tokenizer, token_bytes, texts = vocabulary
    for text in texts:
        tokens = tokenizer.encode(text)
        joined = b''.join(token_bytes[token] for token in tokens)
        # a sentencepiece tokenizer puts a space before the text and takes it away again
        assert joined.decode() in (text, f' {text}') and tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_special_and_unused_ids_add_no_bytes(vocabulary):
    tokenizer, token_bytes, _ = vocabulary
    assert token_bytes[-3:] == [b''] * 3
    assert tokenizer.all_special_ids and all(token_bytes[token] == b'' for token in tokenizer.all_special_ids)


def first_found(strings, tokenizer, tokens):
    """Index of the first token after which the decoded text holds a string, None without one."""
    for n in range(len(tokens)):
        text = text_of(tokenizer, tokens[: n + 1])
        if any(string in text for string in strings):
            return n
    return None


def test_random_tokens_meet_a_string_where_the_decoded_text_first_holds_it(vocabulary):
    tokenizer, token_bytes, texts = vocabulary
    strings = ['2=', '40', '+1', '9'] if texts is DIGITS else STOPS
    rng, found = np.random.default_rng(0), []
    # pieces of the strings, tokens that hold one, and any token at all
    plain = [
        t
        for t, piece in enumerate(token_bytes)
        if piece and t < len(tokenizer) and not tokenizer.convert_ids_to_tokens(t).startswith('<0x')
    ]
    pieces = [t for t in plain if any(token_bytes[t].decode(errors='replace') in string for string in strings)]
    whole = [t for t in plain if any(string.encode() in token_bytes[t] for string in strings)]
    table = stops.transition_table(strings, token_bytes)
    for _ in range(60):
        pool = [rng.choice(plain, 12), rng.choice(pieces, 24), rng.choice(whole or plain, 1)]
        tokens = rng.permutation(np.concatenate(pool)).tolist()
        state, met = 0, None
        for n, token in enumerate(tokens):
            state = table[state, token]
            if state == len(table) - 1:
                met = n
                break
        assert met == first_found(strings, tokenizer, tokens)
        found.append(met)
    assert len(set(found)) > 10


def test_a_text_with_a_stop_string_is_met_where_it_ends(vocabulary):
    tokenizer, token_bytes, texts = vocabulary
    strings = ['4=4', '=1'] if texts is DIGITS else ['little girl', '</answer>', '  # n', 'd  two']
    for text in texts[:-1] if texts is TEXTS else texts:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert first_met(strings, token_bytes, tokens) == first_found(strings, tokenizer, tokens) is not None


def test_a_special_token_is_met_where_a_string_names_it(vocabulary):
    tokenizer, _, texts = vocabulary
    special = tokenizer.all_special_ids[0]
    piece, before = tokenizer.convert_ids_to_tokens(special), tokenizer.encode(texts[0], add_special_tokens=False)
    for string in (piece, f'{texts[0][-1]}{piece}'):
        token_bytes = stops.bytes_of_tokens(tokenizer, len(tokenizer), [string, 'x'])
        assert first_met([string, 'x'], token_bytes, [*before, special]) == len(before)
        assert first_met([string], token_bytes, before) is None


def test_a_string_that_is_met_too_early_begins_anew():
    tables = {'stop': stops.transition_table(['ab'], [b'a', b'b'])}
    states, met = {'stop': np.zeros(1, np.int32)}, []
    for n, token in enumerate([0, 1, 1, 0, 1]):
        states = stops.advance(tables, states, np.array([token]), np.array([True]))
        states = stops.forget_early(tables, states, np.array(n), 3)
        met.append(bool(stops.is_met(tables, states, 'stop')[0]))
    assert met == [False] * 4 + [True]  # the first ab ends at the second of three tokens that must come
