"""Rollouts of the tiny model: agreement with the learner, where completions end, and whose noise is whose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import learner, sampler
from grpo_jax.models import transformer
from grpo_jax.types import Prompts

STOPS = tuple(range(1, 9))  # 8 of 64 tokens: a random model stops after about 8
PAD = 0
BUDGET = 8


def make_prompts(ids, width=5):
    """Left-padded prompts of 1 to 5 tokens, each a function of its id."""
    texts = [np.random.default_rng(i).integers(9, 64, 1 + 3 * i % 5) for i in ids]
    mask = np.array([[column >= width - len(text) for column in range(width)] for text in texts])
    tokens = np.array([[PAD] * (width - len(text)) + text.tolist() for text in texts])
    return Prompts(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask), jnp.asarray(ids, jnp.int32))


@pytest.fixture(scope='module')
def generate(tiny):
    """generate(prompts, ...) -> Rollout on the host; one program a variant."""
    c, params = tiny

    @functools.cache
    def program(group_size, **options):
        def run(params, prompts, key, step):
            keys = sampler.row_keys(key, step, prompts.ids, group_size)
            return sampler.generate(params, prompts, keys, step, c, sampler.Sampling(**options), {}, block=4)

        return jax.jit(run)

    def call(prompts=None, *, seed=0, step=0, group_size=4, **options):
        settings = dict(max_tokens=BUDGET, temperature=1.0, stop_tokens=STOPS, pad_token=PAD) | options
        prompts = make_prompts(range(4)) if prompts is None else prompts
        return jax.device_get(program(group_size, **settings)(params, prompts, jax.random.key(seed), jnp.int32(step)))

    return call


def completions(rollout):
    """Each row's sampled tokens as a list."""
    width = rollout.prompt_mask.shape[1]
    return [row[width:][mask].tolist() for row, mask in zip(rollout.tokens, rollout.completion_mask, strict=True)]


@pytest.mark.parametrize(
    'temperature, options', [(1.0, {}), (0.7, {}), (1.0, dict(top_p=0.8)), (0.7, dict(top_p=0.8, top_k=20, min_p=0.01))]
)
def test_logprobs_agree_with_the_learners(tiny, generate, temperature, options):
    c, params = tiny
    rollout = generate(temperature=temperature, **options)
    logprobs, _ = learner.completion_logprobs(params, rollout, c, temperature=temperature, chunk=16, remat='none')
    np.testing.assert_allclose(
        rollout.logprobs[rollout.completion_mask], np.asarray(logprobs)[rollout.completion_mask], atol=1e-4
    )


def test_greedy_tokens_are_the_argmax_of_a_whole_forward_pass(tiny, generate):
    c, params = tiny
    rollout = generate(temperature=0.0)
    mask = np.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    hidden = transformer.forward(params, rollout.tokens, transformer.positions_of(mask), mask, c)
    best = np.asarray(jnp.argmax(transformer.unembed(params, hidden, c), -1))[:, 4:-1]
    np.testing.assert_array_equal(rollout.tokens[:, 5:][rollout.completion_mask], best[rollout.completion_mask])


def test_completion_ends_with_its_first_stop_token(generate):
    rollout = generate()
    lengths = []
    for row, mask in zip(rollout.tokens[:, 5:], rollout.completion_mask, strict=True):
        stops = np.flatnonzero(np.isin(row, STOPS))
        length = stops[0] + 1 if stops.size else BUDGET
        np.testing.assert_array_equal(mask, np.arange(BUDGET) < length)
        lengths.append(length)
    assert len(set(lengths)) > 3 and BUDGET in lengths  # the sample holds early, late and cut completions


def test_after_its_end_a_completion_is_padding_with_logprob_zero(generate):
    rollout = generate()
    after = ~rollout.completion_mask
    assert np.all(rollout.tokens[:, 5:][after] == PAD) and np.all(rollout.logprobs[after] == 0)
    assert np.all(rollout.logprobs[~after] < 0)


def test_truncated_rows_are_those_without_a_stop_token(generate):
    rollout = generate()
    np.testing.assert_array_equal(rollout.truncated, ~np.isin(rollout.tokens[:, 5:], STOPS).any(1))
    assert 0 < rollout.truncated.sum() < len(rollout.truncated)


def test_prompts_are_repeated_over_their_groups(generate):
    prompts = make_prompts(range(4))
    rollout = generate(prompts, step=7)
    np.testing.assert_array_equal(rollout.tokens[:, :5], np.repeat(prompts.tokens, 4, 0))
    np.testing.assert_array_equal(rollout.prompt_mask, np.repeat(prompts.mask, 4, 0))
    np.testing.assert_array_equal(rollout.version[rollout.completion_mask], 7)


def test_stop_token_may_come_first(generate):
    greedy = generate(temperature=0.0)
    first = int(greedy.tokens[0, 5])
    rollout = generate(temperature=0.0, stop_tokens=(first,))
    assert completions(rollout)[0] == [first] and not rollout.truncated[0]
    assert np.all(rollout.tokens[0, 6:] == PAD) and np.all(rollout.logprobs[0, 1:] == 0)


def test_budget_of_one_token_is_the_first_token_of_a_longer_one(generate):
    one, more = generate(max_tokens=1), generate()
    np.testing.assert_array_equal(one.tokens[:, 5], more.tokens[:, 5])
    assert one.completion_mask.all()
    np.testing.assert_array_equal(one.truncated, ~np.isin(one.tokens[:, 5], STOPS))


def test_pad_token_that_is_a_stop_token_changes_only_the_padding(generate):
    plain, same = generate(), generate(pad_token=STOPS[0])
    assert completions(same) == completions(plain)
    np.testing.assert_array_equal(same.truncated, plain.truncated)
    np.testing.assert_array_equal(same.logprobs, plain.logprobs)
    assert np.all(same.tokens[:, 5:][~same.completion_mask] == STOPS[0])


def test_same_key_and_step_give_the_same_completions(generate):
    assert completions(generate(seed=3, step=2)) == completions(generate(seed=3, step=2))


@pytest.mark.parametrize('change', [dict(seed=1), dict(step=1)])
def test_other_seed_or_step_gives_other_completions(generate, change):
    assert all(
        a != b
        for a, b in zip(
            by_prompt(generate(), range(4)).values(), by_prompt(generate(**change), range(4)).values(), strict=True
        )
    )


def by_prompt(rollout, ids):
    """Prompt id -> the completions of its group, in order."""
    texts = completions(rollout)
    group = len(texts) // len(ids)
    return {i: texts[n * group : (n + 1) * group] for n, i in enumerate(ids)}


def test_order_of_prompts_does_not_change_a_prompts_completions(generate):
    order = [2, 0, 3, 1]
    assert by_prompt(generate(make_prompts(order)), order) == by_prompt(generate(), range(4))


def test_other_prompts_in_the_batch_do_not_change_a_prompts_completions(generate):
    mixed, base = by_prompt(generate(make_prompts([9, 1, 7, 3])), [9, 1, 7, 3]), by_prompt(generate(), range(4))
    assert (mixed[1], mixed[3]) == (base[1], base[3])


def test_size_of_the_batch_does_not_change_a_prompts_completions(generate):
    assert by_prompt(generate(make_prompts([2, 1])), [2, 1]) == {i: by_prompt(generate(), range(4))[i] for i in (2, 1)}


def test_larger_group_begins_with_the_smaller_one(generate):
    larger = by_prompt(generate(group_size=8), range(4))
    assert {i: group[:4] for i, group in larger.items()} == by_prompt(generate(), range(4))
    assert all(group[:4] != group[4:] for group in larger.values())


def test_more_padding_does_not_change_completions(generate):
    assert completions(generate(make_prompts(range(4), width=8))) == completions(generate())


def test_same_prompt_under_another_id_has_other_noise(generate):
    prompts = make_prompts([1, 1, 1, 1]).replace(ids=jnp.asarray([1, 2, 3, 1]))
    first, second, third, again = by_prompt(generate(prompts), range(4)).values()
    assert first == again and first != second and first != third


def test_no_two_rows_share_a_key():
    data = {
        step: jax.random.key_data(sampler.row_keys(jax.random.key(0), jnp.int32(step), jnp.arange(6), 8))
        for step in (0, 1)
    }
    assert len({tuple(key) for keys in data.values() for key in np.asarray(keys).tolist()}) == 2 * 6 * 8


def test_row_key_is_folded_from_seed_step_prompt_and_sample():
    # the order that a run's noise hangs on: changing it changes every run
    keys = sampler.row_keys(jax.random.key(5), jnp.int32(3), jnp.asarray([11, 4]), 2)
    expected = jax.random.key(5)
    for number in (3, 4, 1):
        expected = jax.random.fold_in(expected, number)
    assert jax.random.key_data(keys[3]).tolist() == jax.random.key_data(expected).tolist()
