"""What a teacher adds, held against hand numbers and against the KL over a whole vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms
from grpo_jax.types import HeadOutput
from tests.algorithms import fixture

OLD = np.log([[0.5, 0.25, 0.5], [0.2, 0.4, 0.1]])
TEACHER = np.log([[0.25, 0.5, 0.5], [0.8, 0.1, 0.9]])
MASK = np.array([[True, True, True], [True, True, False]])

LOGITS = np.array([0.3, -1.0, 0.8, 0.0, -0.4])  # of a policy over 5 tokens, in one place
TAUGHT = jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.7, 0.1, -2.0]))
VOCABULARY = len(LOGITS)


def test_a_tokens_advantage_is_what_the_teacher_finds_likelier():
    # ln(.25 / .5) = -.693147, ln(.5 / .25) = .693147, ln 1 = 0; ln 4 = 1.386294, ln(.1 / .4) = -1.386294, masked
    method = fixture.algorithm('opd')
    data = dict(mask=MASK[:, None], teacher_logprobs=TEACHER[:, None], old_logprobs=OLD[:, None])
    advantages = algorithms.compute_advantages(method, [[1.0], [0.0]], **data)
    np.testing.assert_allclose(advantages, [[-0.693147, 0.693147, 0], [1.386294, -1.386294, 0]], atol=1e-6)


@pytest.mark.parametrize('preset', ['opd', 'opd_reward'])
def test_a_teacher_teaches_also_where_no_reward_is(preset):
    method = fixture.algorithm(preset)
    data = dict(mask=MASK[None], teacher_logprobs=TEACHER[None], old_logprobs=OLD[None])
    advantages = algorithms.compute_advantages(method, [[np.nan, np.nan]], **data)
    np.testing.assert_allclose(advantages, np.where(MASK, TEACHER - OLD, 0), atol=1e-6)


def test_a_reward_and_a_teacher_are_added():
    # rewards 1 and 0 of one prompt: +.5 and -.5; half of the numbers above
    method = fixture.algorithm('opd_reward', teacher_coef=0.5)
    data = dict(mask=MASK[None], teacher_logprobs=TEACHER[None], old_logprobs=OLD[None])
    advantages = algorithms.compute_advantages(method, [[1.0, 0.0]], **data)
    np.testing.assert_allclose(advantages, [[0.153426, 0.846574, 0.5], [0.193147, -1.193147, -0.5]], atol=1e-6)


def test_a_group_of_equal_rewards_still_learns_from_the_teacher():
    method = fixture.algorithm('opd_reward')
    data = dict(mask=MASK[None], teacher_logprobs=TEACHER[None], old_logprobs=OLD[None])
    advantages = algorithms.compute_advantages(method, [[1.0, 1.0]], **data)
    np.testing.assert_allclose(advantages, np.where(MASK, TEACHER - OLD, 0), atol=1e-6)


def exact(logits):
    policy = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(policy) * (policy - TAUGHT))


def every_token(top_k):
    """An Experience whose row v sampled token v, and the ids of the teacher's likeliest tokens."""
    rows = fixture.experience(
        np.zeros((VOCABULARY, 1)),
        **dict.fromkeys(('old', 'ref', 'entropy')),
        group_ids=np.arange(VOCABULARY),
        mask=np.ones((VOCABULARY, 1), bool),
        sampler=np.zeros((VOCABULARY, 1)),
    )
    tokens = jnp.stack([jnp.zeros(VOCABULARY, jnp.int32), jnp.arange(VOCABULARY)], 1)
    rows = rows.replace(rollout=rows.rollout.replace(tokens=tokens), teacher_logprobs=TAUGHT[:, None])
    if not top_k:
        return rows, None
    top, ids = (jnp.tile(x, (VOCABULARY, 1, 1)) for x in jax.lax.top_k(TAUGHT, top_k))
    return rows.replace(teacher_top=top, teacher_ids=ids), ids


@pytest.mark.parametrize('top_k', [0, 1, 3, VOCABULARY])
def test_every_form_of_the_loss_has_the_kl_and_its_gradient_in_expectation(top_k):
    method = fixture.algorithm('sft', regularizers=('distill',), teacher_top_k=top_k)
    experience, ids = every_token(top_k)
    prepared = algorithms.prepare(method, experience)

    def terms(logits):
        policy = jax.nn.log_softmax(logits)
        top = None if ids is None else policy[ids]
        logprobs = policy[:, None]
        output = HeadOutput(logprobs, jnp.zeros_like(logprobs), top)
        parts = algorithms.loss_terms(method, output, experience, prepared, method.coefficients)
        return parts['distill'][:, 0]

    logits = jnp.asarray(LOGITS)
    chance = jax.nn.softmax(logits)
    np.testing.assert_allclose(chance @ terms(logits), exact(logits), rtol=1e-5)
    np.testing.assert_allclose(chance @ jax.jacobian(terms)(logits), jax.grad(exact)(logits), atol=1e-6)
    spread = np.ptp(terms(logits))
    assert spread < 1e-6 if top_k == VOCABULARY else spread > 0.1  # over the whole vocabulary nothing depends on luck


def test_the_advantage_has_the_gradient_of_the_kl_in_expectation():
    method, (experience, _) = fixture.algorithm('opd'), every_token(0)
    policy = np.asarray(jax.nn.log_softmax(jnp.asarray(LOGITS)))
    data = dict(mask=np.ones((VOCABULARY, 1, 1), bool), teacher_logprobs=TAUGHT[:, None, None])
    advantages = algorithms.compute_advantages(
        method, np.zeros((VOCABULARY, 1)), old_logprobs=policy[:, None, None], **data
    )
    experience = experience.replace(advantages=jnp.asarray(advantages), old_logprobs=jnp.asarray(policy[:, None]))
    prepared = algorithms.prepare(method, experience)

    def terms(logits):
        logprobs = jax.nn.log_softmax(logits)[:, None]
        output = HeadOutput(logprobs, jnp.zeros_like(logprobs))
        parts = algorithms.loss_terms(method, output, experience, prepared, method.coefficients)
        return parts['surrogate'][:, 0]

    logits = jnp.asarray(LOGITS)
    expected = jax.nn.softmax(logits) @ jax.jacobian(terms)(logits)
    np.testing.assert_allclose(expected, jax.grad(exact)(logits), atol=1e-6)
