"""The critic: its loss by hand, what it sees, and that it learns returns that a state foretells."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.learner import Learning
from grpo_jax.learner import critic as critics

LEARNING = Learning(value_clip=0.2)


def test_clipped_value_loss_by_hand():
    # v .9 -> 1 from .5: .01 / 2, clipped .7: .09 / 2; v .2 -> 0: .04 / 2, clipped .3: .09 / 2; mean .045
    loss = critics.value_loss(jnp.array([0.9, 0.2]), jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0]), 0.2)
    assert float(loss.mean()) == pytest.approx(0.045)
    plain = critics.value_loss(jnp.array([0.9, 0.2]), jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0]), 0.0)
    np.testing.assert_allclose(plain, [0.005, 0.02], rtol=1e-6)


def test_explained_variance():
    mask = jnp.array([[True, True, True, False]])
    returns = jnp.array([[1.0, 2.0, 3.0, 99.0]])
    assert float(critics.explained_variance(returns, returns, mask)) == 1
    assert float(critics.explained_variance(jnp.full((1, 4), 2.0), returns, mask)) == 0
    assert float(critics.explained_variance(jnp.array([[3.0, 2.0, 1.0, 0.0]]), returns, mask)) == pytest.approx(-3)
    assert float(critics.explained_variance(returns, jnp.ones((1, 4)), mask)) == 0


def test_a_value_sees_only_what_came_before_its_token(tiny, rollout):
    c, params = tiny
    critic = critics.new_params(params) | {
        'value_head': jax.random.normal(jax.random.key(0), params['final_norm'].shape)
    }
    values = jax.jit(functools.partial(critics.values, model_config=c, remat='none', dtype=jnp.float32))
    before = values(critic, rollout)
    queries = rollout.prompt_mask.shape[1]
    after = values(critic, rollout.replace(tokens=rollout.tokens.at[:, queries + 2].set(9)))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    long = np.asarray(rollout.completion_mask[:, 3])
    assert np.all(np.asarray(before != after)[long, 3])


def test_a_new_critic_expects_nothing_and_shares_no_array_with_the_policy(tiny, rollout):
    c, params = tiny
    critic = critics.new_params(params)
    assert 'lm_head' not in critic
    assert np.all(np.asarray(critics.values(critic, rollout, c, remat='none', dtype=jnp.float32)) == 0)
    assert critic['embed'] is not params['embed']


def test_the_critic_learns_a_return_that_the_tokens_foretell(tiny, experience):
    # the return of a row is whether its prompt's last token is even: to be learnt from what the critic sees
    c, params = tiny
    queries = experience.rollout.prompt_mask.shape[1]
    even = (experience.rollout.tokens[:, queries - 1] % 2).astype(jnp.float32)
    returns = jnp.broadcast_to(even[:, None], experience.rollout.completion_mask.shape)
    optimizer = optax.adam(3e-3)
    body = critics.new_params(params)
    critic = {'params': body, 'opt_state': optimizer.init(body)}

    @jax.jit
    def learn(critic):
        values = critics.values(critic['params'], experience.rollout, c, remat='none', dtype=jnp.float32)
        known = experience.replace(values=values, returns=returns)
        return critics.update_critic(critic, known, c, optimizer, LEARNING, LEARNING.minibatching(2))

    rows = []
    for _ in range(60):
        critic, _, metrics = learn(critic)
        rows.append(metrics)
    assert float(rows[0]['explained_variance']) == pytest.approx(0, abs=1e-6)
    assert float(rows[-1]['explained_variance']) > 0.9
    assert float(rows[-1]['loss']) < 0.1 * float(rows[0]['loss'])


def test_microbatches_change_nothing(tiny, experience, assert_close):
    c, params = tiny
    rng = np.random.default_rng(0)
    known = experience.replace(
        values=jnp.asarray(rng.normal(size=experience.old_logprobs.shape), jnp.float32),
        returns=jnp.asarray(rng.normal(size=experience.old_logprobs.shape), jnp.float32),
    )
    optimizer, body = optax.sgd(0.1), critics.new_params(params)
    critic = {'params': body, 'opt_state': optimizer.init(body)}
    whole, cut = (
        jax.jit(lambda cut=cut: critics.update_critic(critic, known, c, optimizer, cut, cut.minibatching(2)))()
        for cut in (LEARNING, LEARNING._replace(microbatches=4))
    )
    assert_close(cut, whole)
