"""The meters of a step's completions: hand numbers, and texts that nobody would write."""

import re

import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.algorithms import weights
from grpo_jax.grouping import Grouping
from grpo_jax.models import heads, transformer
from grpo_jax.models.lora import LoraOptions
from grpo_jax.rewards import language
from grpo_jax.run import measure
from grpo_jax.sharding import chips
from grpo_jax.types import HeadOutput
from tests.algorithms import fixture

NAN = float('nan')
MEGABYTE = 'a\x00\x1b[31m🙂\ud800﷽̈ 中' * 60_000


def rows(*lists):
    """(tokens, mask) of completions of any lengths."""
    width = max(map(len, lists))
    tokens = np.array([[*row, *[0] * (width - len(row))] for row in lists], np.int32)
    return tokens, np.arange(width) < np.array([len(row) for row in lists])[:, None]


def test_lengths_by_outcome_leave_out_what_the_verifier_cannot_judge():
    found = measure.lengths_by_outcome(np.array([2, 4, 9, 100]), np.array([1.0, 1.0, 0.0, NAN]))
    assert found == {'length_right': 3.0, 'length_wrong': 9.0}


def test_lengths_of_no_completion_are_not_a_number():
    found = measure.lengths_by_outcome(np.array([2]), np.array([1.0]))
    assert found['length_right'] == 2.0 and np.isnan(found['length_wrong'])


def test_pass_rates_are_a_histogram_with_closed_lower_ends():
    # pass rates 0, 1/8, 1/4, 1/2, 3/4, 1, and 1/2 of the two that can be judged, and none
    hits = [0, 1, 2, 4, 6, 8]
    correct = np.array([[1.0] * n + [0.0] * (8 - n) for n in hits] + [[1.0, 0.0] + [NAN] * 6, [NAN] * 8])
    found = measure.pass_rates(correct)
    assert list(found.values()) == [1 / 8, 1 / 8, 2 / 8, 1 / 8]
    assert list(found) == [f'groups_below_{name}' for name in ('quarter', 'half', 'three_quarters', 'all')]


def test_what_groups_of_a_pass_rate_have_of_the_advantage_is_a_share_of_its_sum():
    # pass rates 1/4, 3/4 and 1: |A| sums to 3, 2 and 1, of 6; the last group is in no quarter
    correct = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, NAN, 1.0]])
    sizes = np.array([[1.5, 0.5, 0.5, 0.5], [0.5] * 4, [0.25] * 4])
    found = measure.shares_by_pass_rate('advantage', sizes, correct)
    assert found == {
        'advantage_below_quarter': 0, 'advantage_below_half': 0.5,
        'advantage_below_three_quarters': 0, 'advantage_below_all': pytest.approx(1 / 3),
    }  # fmt: skip
    assert all(np.isnan(share) for share in measure.shares_by_pass_rate('advantage', 0 * sizes, correct).values())


def test_the_pull_at_a_completion_is_its_advantage_by_the_weights_of_its_tokens():
    mask = np.array([[True, False, False, False], [True, True, True, False]])
    advantages, ids = np.array([[0.5], [-0.5]], np.float32), np.array([0, 0], np.int32)
    by_token = measure.advantage_sizes(advantages, mask, ids, weights.token_mean)  # 1 and 3 of 4 tokens
    assert by_token['advantage'].tolist() == [0.5, 0.5] and by_token['gradient'].tolist() == [0.125, 0.375]
    by_row = measure.advantage_sizes(advantages, mask, ids, weights.sequence_mean)
    assert by_row['gradient'] == pytest.approx([0.25, 0.25])
    tokens = np.array([[2.0, 9.0, 9.0, 9.0], [1.0, -1.0, 0.0, 9.0]], np.float32)
    assert measure.advantage_sizes(tokens, mask, ids, weights.token_mean)['advantage'].tolist() == [2, 2]
    assert 'gradient' not in measure.advantage_sizes(advantages, mask, ids, lambda mask, mine: mask)


def test_a_group_of_equal_texts_has_one_distinct_completion():
    # 1 of 4 differs, then 3 of 4: mean 1/2; the groups lie in any order
    texts, owner = ['a', 'b', 'a', 'c', 'a', 'b', 'a', 'd'], np.array([0, 1, 0, 1, 0, 1, 0, 1])
    assert measure.distinct_share(texts, Grouping.by_ids(owner)) == pytest.approx((1 / 4 + 3 / 4) / 2)
    assert measure.distinct_share(texts, Grouping.by_ids(np.arange(8))) == 1


def test_completions_look_back_by_the_phrases_of_the_literature():
    texts = [
        'Wait, wait. Wait. That is an aha moment', 'Actually, 7', 'Let me re-check: 8', 'This calculation seems wrong.',
        'She waited; actualized gains', '7',
    ]  # fmt: skip
    found = measure.reflection_metrics(texts, np.array([1.0, 1.0, 0.0, NAN, 1.0, 0.0]), ('wait', 'aha'))
    # three and one phrases of six texts; three texts take something back, of which one of two judged ones is right
    assert found == {'reflection': 4 / 6, 'self_correction': 3 / 6, 'self_correction_right': 1 / 2}
    assert np.isnan(measure.reflection_metrics(['7'], np.array([1.0]), ())['self_correction_right'])


def test_pairs_have_a_margin_and_are_told_apart_where_it_is_above_0():
    """Logprobs less the reference's sum to 0.1, -0.1 in rows 0, 1 and to 0, -0.1 in rows 4, 7; beta is 0.1."""
    advantages = np.zeros((8, 1), np.float32)
    advantages[[0, 1, 4, 7], 0] = 1, -1, 1, -1  # margins 0.02 and 0.01
    dpo, output = fixture.algorithm('dpo'), HeadOutput(fixture.LOGPROBS.astype(np.float32), fixture.ENTROPY)
    found = algorithms.pooled_metrics(dpo, output, fixture.experience(advantages))
    assert found['pair_margin'].value == pytest.approx(0.015, abs=1e-6) and found['pair_accuracy'].value == 1
    advantages[[4, 7], 0] = -1, 1  # -0.01
    found = algorithms.pooled_metrics(dpo, output, fixture.experience(advantages))
    assert found['pair_margin'].value == pytest.approx(0.005, abs=1e-6) and found['pair_accuracy'].value == 0.5
    advantages[4:] = 1  # no worse one: no pair
    assert algorithms.pooled_metrics(dpo, output, fixture.experience(advantages))['pair_accuracy'].value == 1
    assert 'pair_margin' not in algorithms.pooled_metrics(
        fixture.algorithm('grpo'), output, fixture.experience(advantages)
    )


def test_the_correlation_is_that_within_groups():
    # between the groups long is right, within each short is: centred lengths -1 1 -1 1, rewards .5 -.5 .5 -.5
    lengths, rewards = np.array([[1, 3], [11, 13]]), np.array([[1.0, 0.0], [6.0, 5.0]])
    assert measure.correlation_in_groups(lengths, rewards) == pytest.approx(-1)
    # -1 1 0 0 with .5 -.5 .5 -.5: -1 / sqrt(2 x 1)
    assert measure.correlation_in_groups(np.array([[1, 3], [5, 5]]), rewards) == pytest.approx(-(2**-0.5))


@pytest.mark.parametrize(
    'lengths, rewards', [([[1, 3]], [[1.0, 1.0]]), ([[2, 2]], [[0.0, 1.0]]), ([[1, 3]], [[NAN, 1.0]])]
)
def test_without_variance_there_is_no_correlation(lengths, rewards):
    assert np.isnan(measure.correlation_in_groups(np.array(lengths), np.array(rewards)))


def test_unscorable_completions_do_not_correlate():
    lengths, rewards = np.array([[1, 3, 900]]), np.array([[1.0, 0.0, NAN]])
    assert measure.correlation_in_groups(lengths, rewards) == pytest.approx(-1)


def test_conflicting_tokens_are_those_of_right_and_wrong_completions():
    # 5 6 7 right, 5 8 7 wrong: 5 from the front and 7 from the end conflict, 6 and 8 do not: 4 of 6 tokens
    tokens, mask = rows([5, 6, 7], [5, 8, 7])
    forced = np.zeros_like(mask)
    share = measure.conflicting_share(tokens[None], mask[None], forced[None], np.array([[1.0, -1.0]]))
    assert share == pytest.approx(4 / 6)
    # the first was forced in both: 7 alone of the 2 sampled tokens of each
    forced[:, 0] = True
    share = measure.conflicting_share(tokens[None], mask[None], forced[None], np.array([[1.0, -1.0]]))
    assert share == pytest.approx(2 / 4)


@pytest.mark.parametrize('signs', [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0], [1.0, 0.0]])
def test_nothing_conflicts_in_groups_of_one_outcome(signs):
    tokens, mask = rows([5, 6], [5, 6])
    assert measure.conflicting_share(tokens[None], mask[None], ~mask[None], np.array([signs])) == 0


def test_without_any_token_no_share_conflicts():
    tokens, mask = rows([5], [5])
    none = np.zeros_like(mask)
    assert np.isnan(measure.conflicting_share(tokens[None], none[None], none[None], np.array([[1.0, -1.0]])))


def test_outcomes_without_a_verifier_are_sides_of_the_groups_mean():
    unknown = np.full((2, 3), NAN)
    signs = measure.outcome_signs(unknown, np.array([[0.0, 3.0, 0.0], [2.0, 2.0, NAN]]))
    assert signs.tolist() == [[-1, 1, -1], [0, 0, 0]]
    verdicts = measure.outcome_signs(np.array([[1.0, 0.0, NAN]]), np.array([[0.0, 9.0, 9.0]]))
    assert verdicts.tolist() == [[1, -1, 0]]


def test_the_variance_of_advantages_counts_completions_or_their_tokens():
    mask = np.array([[True, False], [True, True], [True, True]])
    known = np.array([True, True, False])
    assert measure.advantage_variance(np.array([[1.0], [-1.0], [50.0]]), mask, known) == 1
    # tokens 3, 0, 0: mean 1, variance (4 + 1 + 1) / 3
    by_token = np.array([[3.0, 9.0], [0.0, 0.0], [50.0, 50.0]])
    assert measure.advantage_variance(by_token, mask, known) == pytest.approx(2)
    assert np.isnan(measure.advantage_variance(np.array([[1.0]]), mask[:1], known[2:]))


def test_staleness_is_the_mean_age_of_tokens():
    version, mask = np.array([[7, 5], [7, 0]]), np.array([[True, True], [True, False]])
    assert measure.staleness(version, mask, 8) == pytest.approx(5 / 3)  # ages 1, 3, 1
    assert np.isnan(measure.staleness(version, mask & False, 8))


def test_a_completion_is_repetitive_from_half_of_its_runs_on():
    loop, text = [1, 2] * 5, list(range(10))
    # 1 2 3 4 5 6 7 8 9 9 9 9: 9 runs, all distinct; one token alone: 1 of 9; under 8 tokens: never
    tokens, mask = rows(loop, text, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9], [4] * 12, [4] * 7)
    assert measure.are_repetitive(tokens, mask.sum(1)).tolist() == [True, False, False, True, False]


def test_repetition_is_that_of_counting_runs():
    rng = np.random.default_rng(0)
    tokens, lengths = rng.integers(0, 2, (200, 40)).astype(np.int32), rng.integers(0, 41, 200)
    expected = [
        n >= 8 and 2 * len({tuple(row[i : i + 4]) for i in range(n - 3)}) < n - 3
        for row, n in zip(tokens, lengths, strict=True)
    ]
    assert 20 < sum(expected) < 180
    assert measure.are_repetitive(tokens, lengths).tolist() == expected


def test_what_stands_behind_a_completion_does_not_repeat():
    tokens, _ = rows([3] * 40, [3] * 40)
    assert not measure.are_repetitive(tokens, np.array([7, 0])).any()
    assert not measure.are_repetitive(tokens[:, :4], np.array([4, 4])).any()


def test_letters_are_counted_by_script():
    names = measure.script_names()
    counts = dict(zip(names, measure.count_scripts('abc é 12 +-= дa 中文 ひ ²ℝ→ Ա'), strict=True))
    assert {name: n for name, n in counts.items() if n} == {
        'latin': 5, 'cyrillic': 1, 'han': 2, 'kana': 1, 'other': 1,
    }  # fmt: skip


def test_the_table_of_scripts_is_that_of_the_language_reward():
    for name, letters in language.SCRIPTS.items():
        text = ''.join(re.findall(f'[{letters}]', ''.join(map(chr, range(0x110000)))))
        assert measure.count_scripts(text)[measure.script_names().index(name)] == len(text), name


def test_a_completion_mixes_languages_beyond_a_tenth_of_its_letters():
    texts = ['abcdefghi中', 'abcdefgh中文', '漢字とかな', '1 + 1 = 2', '']
    found = measure.script_metrics(texts)
    assert found['language_mixed'] == 1 / 5  # the second alone
    assert found['script/latin'] == 17 / 25 and 'script/greek' not in found  # 9 + 8 of 10 + 10 + 5
    assert measure.script_metrics(['', '1']) == {'language_mixed': 0}


def test_phrases_are_counted_as_whole_words_in_any_case():
    phrases = ('wait', 'let me check')
    assert measure.count_phrases('Wait, waiter! Let me  check... let me check. WAIT', phrases) == 3
    assert measure.count_phrases('wait', ()) == 0


def test_a_megabyte_of_signs_that_nobody_writes_is_measured():
    found = measure.script_metrics([MEGABYTE, '\ud800', '\x00'])
    assert found['script/latin'] > 0 and found['script/arabic'] > 0 and found['script/han'] > 0
    assert measure.count_phrases(MEGABYTE, ('wait', '(a+)+$')) == 0


def model(**changes):
    values = dict(vocab_size=10, width=4, layers=2, heads=2, kv_heads=1, head_dim=2, mlp=3, norm_eps=0.0)
    values |= dict(rope_theta=1.0, rope_scaling=(), qk_norm=True, qkv_bias=False, out_bias=False, mlp_bias=False)
    return transformer.ModelConfig(**values | dict(tie_embeddings=True) | changes)


def test_every_parameter_belongs_to_a_part_of_the_model():
    biases = dict(qkv_bias=True, out_bias=True, mlp_bias=True)
    table = heads.param_table(model(**biases)) | transformer.param_table(model(**biases, tie_embeddings=False))
    names = [*table, *table['layers']]
    assert {name for name in names if transformer.part_of(name) == 'other'} == {'layers'}
    assert transformer.part_of('layers/q_norm') == 'norms' and transformer.part_of('value_head') == 'head'


def test_operations_of_an_update_are_counted_by_hand():
    # weights of products: 2 layers x (q 16 + k 8 + v 8 + o 16 + 3 x 12) = 168; head 4 x 10
    prompts, completions = np.array([3]), np.array([[1, 2]])
    # rows of 4 and 5 tokens: 6 x 168 x 9; head 6 x 40 x 3; pairs (16 + 25) / 2 x 12 x 2 layers x 2 heads x 2
    padded = 6 * 168 * 9 + 6 * 40 * 3 + 12 * 2 * 2 * 2 * 41 / 2
    assert measure.update_operations(model(), prompts, completions) == padded
    # the prompt once: 6 tokens, pairs (16 + 25 - 9) / 2
    shared = 6 * 168 * 6 + 6 * 40 * 3 + 12 * 2 * 2 * 2 * 32 / 2
    assert measure.update_operations(model(), prompts, completions, shared=True) == shared
    critic = measure.update_operations(model(), prompts, completions, critic=True)
    assert critic == 2 * padded - 6 * 40 * 3
    # adapters of rank 1: 2 layers x (q 4 + 4, k and v 4 + 2, o 4 + 4, mlp 3 x (4 + 3)) = 98; frozen weights count 4
    adapters = measure.update_operations(model(), prompts, completions, adapters=LoraOptions(rank=1))
    assert adapters == (4 * 168 + 6 * 98) * 9 + 4 * 40 * 3 + 12 * 2 * 2 * 2 * 41 / 2


def test_the_memory_of_the_process_is_known():
    before = measure.host_mib()
    block = np.ones(2**24)  # 128 MiB
    assert 100 < measure.host_mib() - before < 160 and block[0] == 1


def test_peaks_of_chips_are_those_of_their_makers():
    assert chips.lookup('NVIDIA H100 80GB HBM3').flops == 989e12
    assert all(chip.flops and chip.bandwidth for chip in chips.KINDS.values())
