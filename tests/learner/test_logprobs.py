"""Chunked logprobs against log_softmax over whole logits."""

import dataclasses

import jax
from jax.extend.core import jaxprs_in_params
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import learner
from grpo_jax.learner import logprobs, programs
from grpo_jax.models import transformer
from grpo_jax.sharding import chips, mesh


def naive(params, rollout, c, temperature=1.0):
    """(logprobs, entropy) from all logits of all positions at once."""
    queries = rollout.prompt_mask.shape[1]
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    hidden = transformer.forward(params, rollout.tokens, transformer.positions_of(mask), mask, c)
    all_logprobs = jax.nn.log_softmax(transformer.unembed(params, hidden, c) / temperature, -1)[:, queries - 1 : -1]
    picked = jnp.take_along_axis(all_logprobs, rollout.tokens[:, queries:, None], -1)[..., 0]
    return picked, -jnp.sum(jnp.exp(all_logprobs) * all_logprobs, -1)


def chunked(params, rollout, c, *, temperature=1.0, chunk=7, remat='none', **options):
    return learner.completion_logprobs(params, rollout, c, temperature=temperature, chunk=chunk, remat=remat, **options)


def valid(values, rollout):
    """The values at sampled tokens; the rest is not meaningful."""
    return np.asarray(values)[np.asarray(rollout.completion_mask)]


def pulled(function, rollout):
    """Gradient in the parameters of a signed sum of the function's (logprobs, entropy) at sampled tokens."""
    signs = jnp.where(
        rollout.completion_mask,
        jnp.sin(jnp.arange(rollout.completion_mask.size) * 1.0).reshape(rollout.completion_mask.shape),
        0.0,
    )
    return jax.jit(jax.grad(lambda params: sum(jnp.sum(signs * x) for x in function(params))))


@pytest.mark.parametrize('chunk', [1, 7, 1000])
def test_any_chunk_gives_the_naive_logprobs_and_entropy(tiny, rollout, chunk):
    # 8 rows of 6 tokens are 48: 7 does not divide it, 1000 is more than there is
    c, params = tiny
    for actual, expected in zip(chunked(params, rollout, c, chunk=chunk), naive(params, rollout, c), strict=True):
        assert actual.dtype == jnp.float32 and actual.shape == rollout.completion_mask.shape
        np.testing.assert_allclose(valid(actual, rollout), valid(expected, rollout), atol=1e-5)


@pytest.mark.parametrize('chunk, remat', [(7, 'none'), (1000, 'full')])
def test_gradient_is_the_naive_one(tiny, rollout, assert_close, chunk, remat):
    c, params = tiny
    assert_close(
        pulled(lambda p: chunked(p, rollout, c, chunk=chunk, remat=remat)[:1], rollout)(params),
        pulled(lambda p: naive(p, rollout, c)[:1], rollout)(params),
        atol=1e-5,
    )


def test_entropy_has_a_gradient_only_on_request(tiny, rollout, assert_close):
    c, params = tiny
    asked = pulled(lambda p: chunked(p, rollout, c, entropy_gradient=True)[1:], rollout)(params)
    assert_close(asked, pulled(lambda p: naive(p, rollout, c)[1:], rollout)(params), atol=1e-5)
    silent = pulled(lambda p: chunked(p, rollout, c)[1:], rollout)(params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(silent))


@pytest.mark.parametrize('temperature', [0.7, 1.3])
def test_temperature_divides_the_logits(tiny, rollout, temperature):
    c, params = tiny
    hot = chunked(params, rollout, c, temperature=temperature)
    for actual, expected in zip(hot, naive(params, rollout, c, temperature), strict=True):
        np.testing.assert_allclose(valid(actual, rollout), valid(expected, rollout), atol=1e-5)
    assert np.max(np.abs(valid(hot[0] - naive(params, rollout, c)[0], rollout))) > 0.01


def test_temperature_zero_scores_at_temperature_one(tiny, rollout):
    c, params = tiny
    np.testing.assert_array_equal(chunked(params, rollout, c, temperature=0)[0], chunked(params, rollout, c)[0])


def test_entropy_of_equal_logits_is_the_log_of_the_vocabulary(tiny, rollout):
    c, params = tiny
    flat = params | {'embed': jnp.ones_like(params['embed'])}  # tied: all logits of a position are equal
    np.testing.assert_allclose(valid(chunked(flat, rollout, c)[1], rollout), np.log(c.vocab_size), atol=1e-4)


def test_padding_does_not_matter(tiny, rollout):
    # 3 more columns of prompt padding and 2 of completion padding, all holding tokens that nobody must read
    c, params = tiny
    junk = jnp.full((len(rollout.tokens), 3), 9)
    padded = rollout.replace(
        tokens=jnp.concatenate([junk, rollout.tokens, junk[:, :2]], 1),
        prompt_mask=jnp.pad(rollout.prompt_mask, ((0, 0), (3, 0))),
        completion_mask=jnp.pad(rollout.completion_mask, ((0, 0), (0, 2))),
    )
    for actual, expected in zip(chunked(params, padded, c), chunked(params, rollout, c), strict=True):
        np.testing.assert_allclose(valid(actual, padded), valid(expected, rollout), atol=1e-5)


@pytest.mark.parametrize('row', [0, 3])
def test_row_of_a_batch_is_as_if_it_were_alone_without_padding(tiny, rollout, row):
    c, params = tiny
    prompt = rollout.tokens[row, :5][rollout.prompt_mask[row]]
    completion = rollout.tokens[row, 5:][rollout.completion_mask[row]]
    tokens = jnp.concatenate([prompt, completion])[None]
    hidden = transformer.forward(params, tokens, jnp.arange(tokens.size)[None], jnp.ones_like(tokens, bool), c)
    logprobs = jax.nn.log_softmax(transformer.unembed(params, hidden, c))[0, prompt.size - 1 : -1]
    np.testing.assert_allclose(
        chunked(params, rollout, c)[0][row, : completion.size],
        logprobs[jnp.arange(completion.size), completion],
        atol=1e-5,
    )


def largest_float(jaxpr):
    """Size of the largest floating array that a jaxpr or any jaxpr within it makes."""
    largest = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            if jnp.issubdtype(variable.aval.dtype, jnp.floating):
                largest = max(largest, variable.aval.size)
        for inner in jaxprs_in_params(equation.params):
            largest = max(largest, largest_float(inner))
    return largest


@pytest.mark.parametrize('chunk, whole', [(8, False), (48, True)])
def test_logits_of_all_tokens_never_exist_when_the_chunk_is_small(tiny, rollout, chunk, whole):
    # backward pass included: saved logits would show as a stacked output of the loop. The vocabulary is large enough
    # for the logits (8 x 6 x 512) to outweigh every other array; with one chunk they are there, so the search works
    c = dataclasses.replace(tiny[0], vocab_size=512)
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), c))
    backward = pulled(lambda p: chunked(p, rollout, c, chunk=chunk, entropy_gradient=True), rollout)
    assert (largest_float(jax.make_jaxpr(backward)(params).jaxpr) >= 8 * 6 * 512) == whole


@pytest.mark.parametrize(
    'asked, kind, tensor, vocab, chunk',
    [
        (0, 'TPU v5 lite', 1, 151936, 512),  # 15.75 GiB / 32 / (4 * 151936) = 869
        (0, 'TPU v5 lite', 4, 151936, 2048),  # 3479
        (0, 'TPU v5', 1, 151936, 4096),  # 5286, and no more than 4096 are chosen
        (0, 'cpu', 1, 49152, 2048),
        (0, 'cpu', 1, 151936, 512),  # 512 MiB / (4 * 151936) = 883
        (0, 'cpu', 1, 10**7, 128),
        (768, 'TPU v5 lite', 1, 151936, 768),
    ],
)
def test_a_chunk_is_chosen_by_the_vocabulary_and_the_memory(monkeypatch, asked, kind, tensor, vocab, chunk):
    chip = chips.lookup(kind)
    monkeypatch.setattr(chips, 'lookup', lambda _: chip)
    assert programs.choose_chunk(asked, vocab, mesh.make({'tensor': tensor})) == chunk


@pytest.mark.parametrize(
    'count, most, size',
    [(4352, 1024, 896), (2304, 512, 384), (8192, 1024, 1024), (96, 4096, 96), (48, 7, 7), (1030, 1024, 640)],
)
def test_chunks_waste_few_tokens(count, most, size):
    assert logprobs.chunk_size(count, most) == size <= most and -count % size <= -count % most
