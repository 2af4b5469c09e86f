"""Strings that the decode loop looks for, to stop or to follow thinking: a byte automaton (Aho-Corasick) reads tokens.

A string may begin in one token and end in another. The automaton's state is the longest end of the text so far that
begins such a string. One look-up in a table [states, V] moves the automaton over a whole token.
"""

from collections.abc import Sequence
import json
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int
import numpy as np

from grpo_jax.sampler.sampling import Sampling
from grpo_jax.types import Array

Tables = dict[str, Any]  # i32[states, V] or its ShapeDtypeStruct, by automaton: 'stop', 'thinking', 'opening'
States = dict[str, Any]  # i32[B] by automaton


def make_automata(sampling: Sampling, tokenizer: Any, vocab_size: int) -> dict[str, np.ndarray]:
    """Makes the automata's tables, i32[states, V] by name, for the strings in Sampling.read_strings."""
    return {
        name: transition_table(strings, bytes_of_tokens(tokenizer, vocab_size, strings))
        for name, strings in sampling.read_strings.items()
    }


def abstract_automata(sampling: Sampling, vocab_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The tables of `make_automata`, abstract: their shapes do not depend on the tokenizer."""
    return {
        name: jax.ShapeDtypeStruct((count_states(strings), vocab_size), jnp.int32)
        for name, strings in sampling.read_strings.items()
    }


def advance(tables: Tables, states: States, token: Int[Array, ' B'], valid: Bool[Array, ' B']) -> States:
    """Moves each automaton over a row's token where the token is valid; returns the new states."""
    return {name: jnp.where(valid, tables[name][state, token], state) for name, state in states.items()}


def is_met(tables: Tables, states: States, name: str) -> Bool[Array, ' B']:
    """bool[B]: whether the automaton `name` is in its last state, since it has met one of its strings."""
    return states[name] == tables[name].shape[0] - 1


def forget_early(tables: Tables, states: States, n: Int[Array, '...'], min_tokens: int) -> States:
    """The states after the token at position n, where a stop string that came before min_tokens is forgotten."""
    if 'stop' not in tables or not min_tokens:
        return states
    early = is_met(tables, states, 'stop') & (n + 1 < min_tokens)
    return states | {'stop': jnp.where(early, 0, states['stop'])}


def follow_thinking(
    tables: Tables, states: States, thinking: Bool[Array, ' B'], n: Int[Array, '...'], thinking_tokens: int
) -> tuple[States, Bool[Array, ' B']]:
    """(states, bool[B], whether a row's thinking is open) after the token at position n.

    Before position thinking_tokens, the string that ends thinking closes it, and the opening string opens it. From
    there on nothing changes: where thinking is open then, decode_segment writes its end, and the bool stays True. An
    automaton that has met its string begins again.
    """
    if not thinking_tokens:
        return states, thinking
    for name in [name for name in ('opening', 'thinking') if name in tables]:
        met = is_met(tables, states, name)
        thinking = jnp.where(met & (n < thinking_tokens), name == 'opening', thinking)
        states = states | {name: jnp.where(met, 0, states[name])}
    return states, thinking


def transition_table(strings: Sequence[str], token_bytes: Sequence[bytes]) -> Int[np.ndarray, 'S V']:
    """The table i32[states, V] of the automaton for these strings: its next state, by its state and a token.

    State 0 is the first one; in the last state a string has been met. strings: none is empty. token_bytes: the bytes of
    each token (see bytes_of_tokens).
    """
    needles, prefixes = [string.encode() for string in strings], _prefixes(strings)
    state_of = {prefix: i for i, prefix in enumerate(prefixes)}
    met = len(prefixes)
    next_state = np.full((met + 1, 256), met, np.int32)
    for prefix, state in state_of.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            if not any(text.endswith(needle) for needle in needles):
                ends = (text[i:] for i in range(len(text) + 1))
                next_state[state, byte] = next(state_of[end] for end in ends if end in state_of)
    lengths = np.array([len(text) for text in token_bytes])
    result = np.repeat(np.arange(met + 1, dtype=np.int32)[:, None], len(token_bytes), 1)
    for position in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > position)
        result[:, tokens] = next_state[result[:, tokens], np.array([token_bytes[int(t)][position] for t in tokens])]
    return result


def count_states(strings: Sequence[str]) -> int:
    """The number of states in the table for these strings."""
    return len(_prefixes(strings)) + 1


def _prefixes(strings):
    """The beginnings of stop strings in bytes, from none to all but the last byte, the shortest first."""
    prefixes = {needle[:n] for needle in (string.encode() for string in strings) for n in range(len(needle))}
    return sorted(prefixes, key=lambda prefix: (len(prefix), prefix))


def bytes_of_tokens(tokenizer: Any, vocab_size: int, strings: Sequence[str] = ()) -> list[bytes]:
    """The bytes that each of vocab_size ids adds to a decoded text.

    Unused ids add no bytes. Special ids add none either, unless one of the strings has their text.
    """
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())['decoder'], ensure_ascii=False)
    special = set(tokenizer.all_special_ids)
    byte_of = _bytes_by_character() if 'ByteLevel' in decoder else None
    pieces = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), vocab_size))))
    texts = []
    for token, piece in enumerate(pieces + [None] * (vocab_size - len(pieces))):
        if piece is None or (token in special and not any(piece in string for string in strings)):
            texts.append(b'')
        elif byte_of and all(character in byte_of for character in piece):
            texts.append(bytes(byte_of[character] for character in piece))
        elif len(piece) == 6 and piece.startswith('<0x') and 'ByteFallback' in decoder:
            texts.append(bytes([int(piece[3:5], 16)]))
        else:
            texts.append(piece.replace('\u2581', ' ').encode() if '\u2581' in decoder else piece.encode())
    return texts


def _bytes_by_character():
    """{character: byte} of byte-level BPE: a printable latin-1 character is its own byte, others begin at 256."""
    printable = [*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
