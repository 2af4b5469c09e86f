"""What a run writes down of its completions: rows with the tokens one by one."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_jax.rewards import Rewards
from grpo_jax.run import rows
from grpo_jax.run.rows import rollout_rows, token_texts
from grpo_jax.types import Example, Experience, Rollout

# two completions of one prompt: 'ab<end>' in full, and 'c' which the budget cut; two columns of prompt before them
TOKENS = np.array([[0, 9, 1, 2, 7], [0, 9, 3, 0, 0]], np.int32)
MASK = np.array([[1, 1, 1], [1, 0, 0]], bool)
LOGPROBS = np.array([[-0.123456, -1.0, 0.0], [-2.0, 0, 0]], np.float32)


class Letters:
    """A tokenizer of which each token is a letter."""

    def encode(self, text, add_special_tokens):
        return [1]

    def decode(self, ids, **options):
        return ''.join({1: 'a', 2: 'b', 3: 'c', 7: '<end>'}[token] for token in ids)

    def batch_decode(self, rows, **options):
        return [self.decode(row) for row in rows]


def dump(advantages, messages=(), logprobs=LOGPROBS, **fields):
    numbers, none = np.array([1.0, 0.0]), np.zeros(2, bool)
    texts, truncated = np.array(['ab', 'c'], object), np.array([False, True])
    rewarded = Rewards(texts, truncated, np.array([3, 1]), numbers, numbers, {'numeric': numbers}, {'expired': none})
    rollout = Rollout(
        TOKENS, np.ones((2, 2), bool), MASK, np.zeros_like(MASK), logprobs, truncated, np.zeros_like(TOKENS)
    )
    experience = Experience(
        rollout, np.array(advantages, np.float32), None, *(fields.pop(f'{x}_logprobs', None) for x in ('old', 'ref')),
        None, **fields,
    )  # fmt: skip
    return rollout_rows([Example('p', '1', 7, {}, messages)], rollout, rewarded, experience, Letters())


@pytest.mark.parametrize(
    'advantages, dumped',
    [
        ([[0.5], [-0.5]], [0.5, -0.5]),
        ([[0.5, 0.25, 0.123456], [-0.5, 9.0, 9.0]], [[0.5, 0.25, 0.1235], [-0.5]]),  # 9 stands behind the end
        ([[float('nan')], [-0.5]], [None, -0.5]),
    ],
)
def test_a_dump_has_the_advantage_of_each_token_where_they_differ(advantages, dumped):
    chat = ({'role': 'system', 'content': 's'}, {'role': 'user', 'content': 'p'})
    rows = dump(advantages, chat)
    assert [row['advantage'] for row in rows] == dumped
    assert [row['messages'] for row in rows] == [chat] * 2
    assert 'messages' not in dump(advantages)[0]


def test_tokens_stand_beside_their_logprobs_with_four_digits():
    first, second = dump([[0.5], [-0.5]])
    assert (first['tokens'], first['logprobs']) == (['a', 'b', '<end>'], [-0.1235, -1.0, 0.0])
    assert (second['tokens'], second['logprobs']) == (['c'], [-2.0])
    assert (first['length'], first['truncated']) == (3, False) and (second['length'], second['truncated']) == (1, True)
    assert not {'entropy', 'old_logprobs', 'ref_logprobs'} & set(first)


def test_what_the_learner_computed_stands_beside_the_tokens():
    rows = dump([[0.5], [-0.5]], old_logprobs=LOGPROBS - 1, ref_logprobs=LOGPROBS - 2, old_entropy=LOGPROBS + 3)
    assert [row['old_logprobs'] for row in rows] == [[-1.1235, -2.0, -1.0], [-3.0]]
    assert rows[1]['ref_logprobs'] == [-4.0] and rows[1]['entropy'] == [1.0]


def test_completions_that_nobody_sampled_have_no_logprobs():
    row, _ = dump([[0.5], [-0.5]], logprobs=np.zeros_like(LOGPROBS))
    assert 'logprobs' not in row and row['tokens'] == ['a', 'b', '<end>']


def test_a_number_that_is_none_can_be_written():
    row, _ = dump([[0.5], [-0.5]], old_logprobs=np.where(MASK, np.nan, 0).astype(np.float32))
    assert row['old_logprobs'] == [None] * 3 and json.dumps(row, allow_nan=False)


def test_the_tokens_of_a_large_dump_stop_at_a_whole_completion(monkeypatch):
    monkeypatch.setattr(rows, 'DETAILED', 3)
    first, second = dump([[0.5], [-0.5]])
    assert len(first['tokens']) == 3
    assert not {'tokens', 'logprobs'} & set(second) and second['completion'] == 'c'


def bytewise(*words):
    """A tokenizer of bytes, as GPT-2's without merges, and of more words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: number for number, name in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_character_of_several_tokens_stands_at_the_first_of_them():
    tokenizer = bytewise()
    ids = np.array(tokenizer.encode('aé日😀b'))
    (texts,) = token_texts(tokenizer, [ids])
    assert texts == ['a', 'é', '', '日', '', '', '😀', '', '', '', 'b']


def test_half_a_character_at_the_end_is_shown_as_such():
    tokenizer = bytewise()
    (texts,) = token_texts(tokenizer, [np.array(tokenizer.encode('a日')[:-1])])
    assert texts[0] == 'a' and set(''.join(texts[1:])) == {'\ufffd'}


def test_the_blank_before_a_word_of_sentencepiece_stays():
    words = {name: number for number, name in enumerate(['▁a', '▁the', '▁cat', 's'])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token='s'))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    (texts,) = token_texts(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [np.array([1, 2, 3])])
    assert texts == [' the', ' cat', 's']
