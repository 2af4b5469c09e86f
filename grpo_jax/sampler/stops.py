"""Stop strings inside the decode loop: a byte automaton (Aho-Corasick) lifted to tokens.

A stop string may begin in one token and end in another. The automaton's state is the longest end of the
text so far that begins a stop string; one look-up in a [states, V] table moves it over a whole token.
"""

import json

import numpy as np


def table(strings, token_bytes):
    """i32[states, V]: the state after a token; start in state 0, the last state means that a string was met.

    strings are non-empty; token_bytes has one bytes object a token (see bytes_of_tokens).
    """
    needles, prefixes = [string.encode() for string in strings], _prefixes(strings)
    number = {prefix: i for i, prefix in enumerate(prefixes)}
    found = len(prefixes)
    of_byte = np.full((found + 1, 256), found, np.int32)
    for prefix, state in number.items():
        for byte in range(256):
            text = prefix + bytes([byte])
            if not any(text.endswith(needle) for needle in needles):
                of_byte[state, byte] = next(number[text[i:]] for i in range(len(text) + 1) if text[i:] in number)
    lengths = np.array([len(text) for text in token_bytes])
    result = np.repeat(np.arange(found + 1, dtype=np.int32)[:, None], len(token_bytes), 1)
    for position in range(lengths.max(initial=0)):
        tokens = np.flatnonzero(lengths > position)
        result[:, tokens] = of_byte[result[:, tokens], np.array([token_bytes[t][position] for t in tokens])]
    return result


def states(strings):
    """The number of states of the table for these strings."""
    return len(_prefixes(strings)) + 1


def _prefixes(strings):
    """What may stand before a stop string's last byte, the shortest first."""
    found = {needle[:n] for needle in (string.encode() for string in strings) for n in range(len(needle))}
    return sorted(found, key=lambda prefix: (len(prefix), prefix))


def bytes_of_tokens(tokenizer, vocab_size):
    """The bytes that each of vocab_size ids adds to a decoded text; special and unused ids add none."""
    decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str())['decoder'], ensure_ascii=False)
    special = set(tokenizer.all_special_ids)
    of_character = _byte_level() if 'ByteLevel' in decoder else None
    texts = []
    for token in range(vocab_size):
        piece = None if token in special or token >= len(tokenizer) else tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            texts.append(b'')
        elif of_character and all(character in of_character for character in piece):
            texts.append(bytes(of_character[character] for character in piece))
        elif len(piece) == 6 and piece.startswith('<0x') and 'ByteFallback' in decoder:
            texts.append(bytes([int(piece[3:5], 16)]))
        else:
            texts.append(piece.replace('\u2581', ' ').encode() if '\u2581' in decoder else piece.encode())
    return texts


def _byte_level():
    """Character -> byte of the byte-level BPE alphabet: printable latin-1 stands for itself, the rest for 256 on."""
    plain = [*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}
