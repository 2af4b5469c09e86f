"""learner.old_logprobs='decode': in bfloat16 too, a step's logprobs are the sampler's, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.collect.policies import check_decoded, make_decode_scorer
from grpo_jax.errors import BadInput
from grpo_jax.learner.options import Learning
from grpo_jax.learner.update import anchor_logprobs
from grpo_jax.run.open import make_policy, make_run_learner, make_run_sampler, open_run
from grpo_jax.types import Experience, Prompts
from tests import tiny_run

DECODE = dict(
    model__dtype='bfloat16',
    learner__old_logprobs='decode',
    optimizer__learning_rate=3e-3,
    reward__parts=(('coin', 1.0),),  # a random model is right too seldom
    reward__verifier='',
)


def run(folder, **changes):
    """The rows of a run of two steps in bfloat16."""
    train.run(tiny_run.config(**dict(steps=2, evaluation__prompts=1, evaluation__samples=1) | changes), str(folder))
    return tiny_run.rows(folder)


@pytest.mark.parametrize('rank', [0, 2])
def test_in_bfloat16_sampler_and_learner_agree_exactly_and_the_ratio_is_one(rank, tmp_path):
    changes = DECODE | dict(preset='grpo', algorithm__kl_coef=0.04, model__lora__rank=rank)
    if rank:
        changes |= dict(supervised__updates=1, log__rollouts=0)  # a cold start samples nothing
    rows = run(tmp_path / 'decode', **changes)
    exact = dict(sampler_gap_mean=0, sampler_gap_p99=0, sampler_gap_max=0, sampler_ess=1, ratio_mean=1, ratio_max=1)
    assert [{name: row[name] for name in exact} for row in rows] == [exact] * 2
    assert rows[0]['kl_ref'] == 0 < rows[1]['kl_ref']  # the reference is decoded too, and is the policy at first
    assert all(row['grad_norm'] > 0 for row in rows) and rows[0]['entropy'] != rows[1]['entropy']
    if rank:  # of the policy, and not of the reference, which is decoded after it
        assert rows[0]['sampler/merged_share'] == 0 < rows[1]['sampler/merged_share']


def test_with_more_updates_in_packed_rows_the_first_begins_where_the_sampler_was(long, tmp_path):
    changes = dict(learner__minibatches=2, learner__pack_columns=96)
    rows = run(tmp_path, **DECODE | changes)
    assert [row['sampler_gap_max'] for row in rows] == [0, 0]
    assert all(0.5 < row['ratio_mean'] < 2 and row['ratio_max'] != 1 for row in rows)


def test_another_policy_than_the_samplers_is_seen(tmp_path):
    config = tiny_run.config(**DECODE | dict(rollout__max_tokens=6, learner__minibatches=2))
    opened = open_run(config, str(tmp_path))
    settings, algorithm, shapes = opened.settings, opened.algorithm, opened.settings.step_shapes(opened.algorithm)
    check_decoded(settings.learning, settings.sampling, settings.collection, algorithm)
    sample, params, key = make_run_sampler(opened, shapes), make_policy(opened), jax.random.key(settings.seed)
    size = (shapes.prompts, shapes.queries)
    prompts = Prompts(jnp.full(size, 5), jnp.ones(size, bool), jnp.arange(shapes.prompts))
    rollout = sample(params, prompts, key, 0)
    learner = make_run_learner(opened, {})  # of which the update is compiled by nobody
    state = learner.initial(jax.tree.map(jnp.copy, params))
    again = make_decode_scorer(sample, key, shapes.group_size, opened.mesh, algorithm.needs_reference)
    packed = learner.pack(rollout)
    same = again(state, rollout, packed)
    np.testing.assert_array_equal(same['old_logprobs'], rollout.logprobs)
    forward = learner.logprobs(state, rollout, packed)['forward_logprobs']
    assert np.abs(forward - rollout.logprobs).max() > 1e-4  # what another order of sums makes of bfloat16
    other = again(state.replace(params=jax.tree.map(lambda p: 1.05 * p, params)), rollout, packed)
    assert np.abs(other['old_logprobs'] - rollout.logprobs).max() > 1e-3


def experience(**fields):
    ones = jnp.ones((1, 2))
    rest = dict(
        rollout=None, advantages=ones, rewards=ones[0, :1], ref_logprobs=None, group_ids=jnp.zeros(1, jnp.int32)
    )
    return Experience(**rest | fields)


def test_values_are_the_samplers_plus_what_the_learners_have_changed_and_gradients_the_learners():
    old, ours = jnp.array([[-1.25, -2.0]]), jnp.array([[-1.5, -2.5]])
    learning = Learning(old_logprobs='decode')
    first = experience(old_logprobs=old)
    assert anchor_logprobs(ours, first, learning).tolist() == [[-1.25, -2.0]]
    later = experience(old_logprobs=old, forward_logprobs=jnp.array([[-1.0, -2.5]]))
    assert anchor_logprobs(ours, later, learning).tolist() == [[-1.75, -2.0]]  # -1.25 + (-1.5 + 1), -2 + 0
    for one in (first, later):
        slope = jax.grad(lambda x, one=one: jnp.sum(jnp.array([3.0, 5.0]) * anchor_logprobs(x, one, learning)))(ours)
        assert slope.tolist() == [[3, 5]]
    assert anchor_logprobs(ours, first, Learning()) is ours


@pytest.mark.parametrize(
    ('changes', 'setting'),
    [
        (dict(rollout__cache_dtype='int8', rollout__accept_bias=True), 'rollout.cache_dtype = int8'),
        (dict(rollout__weights_dtype='int8', rollout__accept_bias=True), 'rollout.weights_dtype = int8'),
        (dict(collection__dead_groups='resample'), 'collection.dead_groups = resample'),
        (dict(preset='rft'), 'collection.source = reference'),
    ],
)
def test_what_the_policy_does_not_sample_at_once_is_refused(tmp_path, changes, setting):
    config = tiny_run.config(**dict(learner__old_logprobs='decode') | changes)
    with pytest.raises(BadInput, match=rf"^learner\.old_logprobs = 'decode': is for rollouts .*, or change {setting}"):
        open_run(config, str(tmp_path))
