"""Experience for the learner's tests: ragged prompts and completions of random tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.types import Experience, Rollout


def make_rollout(c, prompts, group_size, queries, length):
    """A Rollout of random tokens; prompts have 1 to `queries` tokens, completions 1 to `length`."""
    rng = np.random.default_rng(0)
    rows = prompts * group_size
    prompt_lengths = np.repeat(1 + np.arange(prompts) * 3 % queries, group_size)
    lengths = 1 + np.arange(rows) * 5 % length
    prompt_mask = np.arange(queries) >= queries - prompt_lengths[:, None]
    completion_mask = np.arange(length) < lengths[:, None]
    of_prompts = np.repeat(rng.integers(2, c.vocab_size, (prompts, queries)), group_size, 0)
    tokens = np.where(
        np.concatenate([prompt_mask, completion_mask], 1),
        np.concatenate([of_prompts, rng.integers(2, c.vocab_size, (rows, length))], 1),
        0,
    )
    return Rollout(
        tokens=jnp.asarray(tokens, jnp.int32),
        prompt_mask=jnp.asarray(prompt_mask),
        completion_mask=jnp.asarray(completion_mask),
        logprobs=jnp.where(completion_mask, -rng.uniform(3, 5, (rows, length)), 0).astype(jnp.float32),
        truncated=jnp.asarray(lengths == length),
        version=jnp.zeros((rows, length), jnp.int32),
        forced=jnp.zeros((rows, length), bool),
    )


def make_experience(rollout, group_size):
    """Experience with old and reference logprobs near those of a fresh model, and advantages of both signs."""
    rng = np.random.default_rng(1)
    rows, length = rollout.completion_mask.shape
    near = -np.log(64) + 0.2 * rng.normal(size=(2, rows, length))
    return Experience(
        rollout=rollout,
        advantages=jnp.asarray(rng.normal(size=(rows, 1)), jnp.float32),
        rewards=jnp.zeros(rows),
        old_logprobs=jnp.asarray(near[0], jnp.float32),
        ref_logprobs=jnp.asarray(near[1], jnp.float32),
        group_ids=jnp.arange(rows, dtype=jnp.int32) // group_size,
    )


@pytest.fixture(scope='session')
def rollout(tiny):
    """4 prompts of up to 5 tokens, 2 completions each of up to 6."""
    return make_rollout(tiny[0], 4, 2, 5, 6)


@pytest.fixture(scope='session')
def experience(rollout):
    return make_experience(rollout, 2)


@pytest.fixture(scope='session')
def wide_experience(tiny):
    """8 prompts, 2 completions each: rows for every mesh of 8 devices."""
    return make_experience(make_rollout(tiny[0], 8, 2, 6, 10), 2)


@pytest.fixture
def assert_close():
    """Compares two pytrees of arrays, leaf by leaf."""

    def compare(actual, expected, atol=1e-6, rtol=1e-5):
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=atol, rtol=rtol, err_msg=jax.tree_util.keystr(path))

    return compare
