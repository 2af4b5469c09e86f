"""What a run writes down of its completions: rows with the tokens one by one."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_jax import rewards, train
from grpo_jax.algorithms import Grouping
from grpo_jax.configs import default
from grpo_jax.rewards import Rewards
from grpo_jax.run import rows
from grpo_jax.run.open import make_algorithm
from grpo_jax.run.rows import rollout_rows, token_texts
from grpo_jax.types import Example, Experience, Rollout
from tests import tiny_run

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
    return rollout_rows([Example('p', '1', 7, {}, messages)], rollout, rewarded, experience, Letters(), functions())


def functions(**changes):
    """The rewards of a config, for a budget of four tokens."""
    section = default.get_config().reward
    section.parts, section.verifier = (('numeric', 1.0),), 'numeric'
    section.update(changes)
    return rewards.build(rewards.RewardOptions.from_config(section), 4)


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


# what was learned from


def paid(reward_functions, texts=('7', '8', 'x', '7'), truncated=(False, True, False, False), lengths=(1, 4, 2, 3)):
    """Terms and rewards of four completions of one prompt whose answer is 7, as a step learns from them."""
    example = Example('p', '7', 0, {})
    with reward_functions:
        rewarded = rewards.compute_rewards(reward_functions, [example], list(texts), truncated, lengths)
    grouping = Grouping.by_sizes(np.array([4]))
    learned = grouping.gather(rewards.shape_rewards(reward_functions, rewarded, grouping))
    rewarded = rewarded._replace(learned=learned)
    return [rewards.list_terms(reward_functions, example, rewarded, row) for row in range(4)], learned


def test_the_terms_of_a_reward_are_its_parts_the_truncation_and_the_length():
    # overlong with margin 2 of 4 tokens: 0 up to 2, -0.5 at 3, -1 at 4; its weight is 0.5
    changes = {'length_shaping': 'overlong', 'length_shaping_weight': 0.5, 'truncated_reward': -0.2}
    options = default.get_config().reward.options
    options.overlong.margin = 2
    terms, learned = paid(functions(**changes, options=options))
    assert terms == [
        {'numeric': (1.0, 1.0), 'overlong': (0.0, 0.5)},
        {'numeric': (0.0, 1.0), 'truncated_reward': (1.0, -0.2), 'overlong': (pytest.approx(-1.0), 0.5)},
        {'numeric': (0.0, 1.0), 'overlong': (0.0, 0.5)},
        {'numeric': (1.0, 1.0), 'overlong': (-0.5, 0.5)},
    ]
    np.testing.assert_allclose(learned, [1.0, -0.7, 0.0, 0.75])


def test_a_part_that_only_measures_has_weight_0_and_one_that_cannot_tell_leaves_no_reward(tmp_path):
    judge = tmp_path / 'judge.py'
    judge.write_text("""def judge(completion, example):
    return None if completion == 'x' else 0.5
""")
    measured = functions(parts=(('numeric', 1.0), (f'{judge}:judge', 0.0)))
    terms, learned = paid(measured)
    assert terms[0] == {'numeric': (1.0, 1.0), 'judge': (0.5, 0.0)} and learned[2] == 0.0
    assert np.isnan(terms[2]['judge'][0]) and 'other' not in terms[2]
    terms, learned = paid(functions(parts=(('numeric', 1.0), (f'{judge}:judge', 0.2))))
    assert terms[1]['judge'] == (0.5, 0.2) and learned[1] == 0.1 and np.isnan(learned[2])


@pytest.mark.parametrize(
    'row, words',
    [
        ({'reward': 1.0, 'terms': {'numeric': [1.0, 1.0]}, 'correct': True}, '1'),
        ({'reward': 0.4, 'terms': {'numeric': [1.0, 1.0], 'overlong': [-1.2, 0.5]}, 'correct': True},
         '0.4 = numeric 1 + 0.5 x overlong -1.2, right'),
        ({'reward': None, 'terms': {'numeric': [1.0, 1.0], 'judge': [None, 0.5]}, 'correct': False},
         'no reward = numeric 1 + 0.5 x judge unknown, wrong'),
        ({'reward': 1.0, 'terms': {'numeric': [1.0, 1.0]}, 'learned_from': ['step_rewards']},
         '1, learned from step rewards'),
        ({'reward': 0.0, 'correct': False, 'learned_from': ['teacher']}, '0, learned from teacher'),
        ({'reward': 0.0, 'learned_from': []}, '0, learned from no reward'),
        ({'reward': 0.5, 'parts': {'numeric': 0.5}}, '0.5'),  # of a dump without terms
    ],
)  # fmt: skip
def test_a_reward_in_words_says_its_terms_and_a_verdict_that_differs(row, words):
    assert rows.describe_reward(row) == words


def test_a_run_dumps_the_reward_from_which_its_advantages_come(tmp_path):
    config = tiny_run.config(
        seed=2, steps=2, log__rollouts=1, reward__length_shaping='overlong',
        reward__truncated_reward=-0.25, reward__length_shaping_weight=0.5,
        reward__parts=(('numeric', 1.0), ('format', 0.1)),
    )  # fmt: skip
    config.reward.options.overlong.margin = 11
    train.run(config, str(tmp_path))
    metrics = tiny_run.rows(tmp_path)
    for step in range(2):
        dumped = tiny_run.rows(tmp_path, f'rollouts/{step:06d}.jsonl')
        paid = np.array([row['reward'] for row in dumped])
        sums = [sum(value * weight for value, weight in row['terms'].values()) for row in dumped]
        np.testing.assert_allclose(paid, sums, atol=1e-6)
        np.testing.assert_allclose(paid.mean(), metrics[step]['reward'], rtol=1e-6)
        shaping = [row['terms']['overlong'][0] * 0.5 for row in dumped]
        np.testing.assert_allclose(np.mean(shaping), metrics[step]['reward/length_shaping'], rtol=1e-6)
        groups = paid.reshape(4, 4)
        by_group = np.array([row['advantage'] for row in dumped]).reshape(4, 4)
        alive = np.abs(by_group).sum(1) > 0  # dr_grpo: the reward less its group's mean; groups equal unshaped are dead
        np.testing.assert_allclose(by_group[alive], (groups - groups.mean(1, keepdims=True))[alive], atol=1e-6)
        assert np.std(paid) > 0 and {tuple(row['learned_from']) for row in dumped} == {('reward',)}


def test_a_run_that_pays_steps_dumps_their_rewards(tmp_path):
    config = tiny_run.config(steps=1, preset='grpo_process', log__rollouts=1, reward__step_rewards='calculator')
    train.run(config, str(tmp_path))
    dumped = tiny_run.rows(tmp_path, 'rollouts/000000.jsonl')
    assert {tuple(row['learned_from']) for row in dumped} == {('step_rewards',)}
    assert all(len(row['step_rewards']) == row['length'] for row in dumped)


@pytest.mark.parametrize(
    'preset, sources',
    [
        ('grpo', ('reward',)),
        ('maxrl', ('correct',)),
        ('grpo_process', ('step_rewards',)),
        ('opd', ('teacher',)),
        ('opd_reward', ('reward', 'teacher')),
        ('sft', ()),
    ],
)
def test_an_algorithm_knows_what_it_learns_from(preset, sources):
    config = default.get_config(preset)
    assert make_algorithm(config).learns_from == sources


def test_a_truncated_completion_that_is_dropped_has_no_advantage(tmp_path):
    config = tiny_run.config(steps=1, log__rollouts=1, collection__truncated='drop', reward__truncated_reward=-0.5)
    train.run(config, str(tmp_path))
    dumped = tiny_run.rows(tmp_path, 'rollouts/000000.jsonl')
    cut = [row for row in dumped if row['truncated']]
    assert cut and all(row['advantage'] == 0 for row in cut)
