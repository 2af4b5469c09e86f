"""The update: cutting a batch changes nothing, bad numbers change nothing, and the optimizer's schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import algorithms, learner
from grpo_jax.algorithms import pieces
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.learner import Learning, Optimization, build_optimizer
from grpo_jax.learner.options import learning_rates
from grpo_jax.learner.update import UpdateSpec, new_aux
from grpo_jax.learner.update import update as learner_update
from grpo_jax.tools import sweep
from grpo_jax.types import TrainState

SECTION = default.get_config('grpo').algorithm
SECTION.weights = 'prompt_mean'  # the weights that hang on most of the batch
METHOD = algorithms.make(SECTION)
SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
ADAM = build_optimizer(Optimization.from_config(default.get_config().optimizer), 10)
SIX_UPDATES = dict(optimizer=ADAM, epochs=3, minibatches=2)


def start(tiny, optimizer):
    params = tiny[1]
    return TrainState(jnp.int32(3), params, optimizer.init(params), None, new_aux(METHOD, params, None))


@pytest.fixture(scope='module')
def run(tiny):
    """run(experience, ...) -> (state before, state after, metrics); programs are compiled once a variant."""

    @functools.cache
    def program(method, optimizer, epochs, minibatches, microbatches):
        learning = Learning(epochs, minibatches, microbatches, chunk=16)
        setup = UpdateSpec(tiny[0], method, learning, optimizer, group_size=2)
        return jax.jit(lambda state, experience: learner_update(state, experience, None, setup))

    def call(experience, *, method=METHOD, optimizer=SGD, epochs=1, minibatches=1, microbatches=1, state=None):
        state = start(tiny, optimizer) if state is None else state
        return state, *program(method, optimizer, epochs, minibatches, microbatches)(state, experience)

    return call


def unchanged(before, after):
    """Whether two trees of arrays have the same bits."""
    return all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    )


def test_microbatches_change_nothing(run, experience, assert_close):
    # rows of 1 to 6 tokens: averaging the microbatches' own means would be wrong by far more than 1e-6
    _, whole, metrics = run(experience)
    _, cut, cut_metrics = run(experience, microbatches=4)
    assert_close(cut.params, whole.params)
    assert_close(cut_metrics, metrics)


def test_update_moves_every_parameter(run, experience):
    before, after, metrics = run(experience)
    assert not any(map(unchanged, jax.tree.leaves(before.params), jax.tree.leaves(after.params)))
    assert (int(after.step), int(after.aux['bad_steps']), float(metrics['finite'])) == (4, 0, 1)


def test_update_descends_the_gradient_of_policy_loss(tiny, run, experience, assert_close):
    # the same thing written out: logprobs of the model, policy_loss, one step of gradient descent
    c, params = tiny

    def loss(params):
        logprobs, entropy = learner.completion_logprobs(
            params, experience.rollout, c, temperature=1.0, chunk=64, remat='none'
        )
        return algorithms.policy_loss(METHOD, logprobs, experience, jax.lax.stop_gradient(entropy))

    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    _, after, found = run(experience)
    assert_close(after.params, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient))
    assert float(found['loss']) == pytest.approx(float(value), abs=1e-6)
    assert float(found['grad_norm']) == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    assert_close({name: found[name] for name in metrics}, metrics)
    parts = {f'gradient_norm/{part}' for part in ('embedding', 'attention', 'mlp', 'norms')}
    observed = {'logprob', 'ratio_p01', 'ratio_p99', 'kl_old_sequence', 'kl_ref_sequence', 'kl_ref_sequence_max'}
    assert set(found) - set(metrics) == {'loss', 'grad_norm', 'finite'} | parts | observed


def test_minibatches_hold_whole_groups(run, experience):
    seen = []

    def spy(mask, group_ids):
        jax.debug.callback(lambda ids: seen.append(ids.tolist()), group_ids)
        return METHOD.weights(mask, group_ids)

    _, after, _ = run(experience, method=METHOD._replace(weights=spy), minibatches=2)
    jax.block_until_ready(after)
    jax.effects_barrier()
    first, second = seen
    assert sorted(first + second) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(ids.count(group) == 2 for ids in seen for group in ids)


def counts(state):
    """The optimizer's counts of updates: Adam's and the schedule's."""
    return [int(x) for _, x in optax.tree_utils.tree_get_all_with_path(state.opt_state, 'count')]


def test_every_minibatch_of_every_epoch_is_one_optimizer_update(run, experience):
    _, after, _ = run(experience, **SIX_UPDATES)
    assert counts(after) == [6, 6]
    assert int(after.step) == 4  # of the loop


def test_two_epochs_are_two_updates_on_the_same_experience(run, experience, assert_close):
    _, first, first_metrics = run(experience)
    _, second, second_metrics = run(experience, state=first)
    _, both, metrics = run(experience, epochs=2)
    assert_close(both.params, second.params)
    assert float(metrics['loss']) == pytest.approx(float(first_metrics['loss'] + second_metrics['loss']) / 2, abs=1e-6)
    assert float(metrics['ratio_max']) == pytest.approx(
        max(float(first_metrics['ratio_max']), float(second_metrics['ratio_max'])), rel=1e-6
    )


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_update_that_is_not_finite_is_skipped_and_counted(run, experience, bad):
    warm = run(experience, **SIX_UPDATES)[1]  # moments that are not zero
    poisoned = experience.replace(advantages=experience.advantages.at[::2].set(bad))  # a row of every group
    before, after, metrics = run(poisoned, state=warm, **SIX_UPDATES)
    assert unchanged((before.params, before.opt_state), (after.params, after.opt_state))
    assert (int(after.aux['bad_steps']), int(after.step), float(metrics['finite'])) == (6, 5, 0)


def test_finite_loss_with_an_infinite_gradient_is_skipped(run, experience):
    # on-policy the ratio is exactly 1; the square root there has value 0 and slope infinity
    method = METHOD._replace(surrogate=lambda ratio, advantages, logprobs: jnp.sqrt(ratio - 1), kl_coef=0.0)
    before, after, metrics = run(experience.replace(old_logprobs=None), method=method)
    assert float(metrics['loss']) == 0 and not np.isfinite(metrics['grad_norm'])
    assert int(after.aux['bad_steps']) == 1 and unchanged(before.params, after.params)


BROKEN = {  # an optimizer, and what the advantages are multiplied by
    'parameters': (optax.scale(1e38), 1000),  # a step beyond the largest float32
    'moments': (optax.GradientTransformation(lambda _: jnp.float32(0), lambda g, *_: (g, jnp.float32(jnp.inf))), 1),
    'no gradient': (optax.clip_by_global_norm(0.0), 0),  # 0 / 0
}


@pytest.mark.parametrize('optimizer, factor', BROKEN.values(), ids=BROKEN)
def test_an_update_to_what_is_not_finite_is_skipped_and_counted(run, experience, optimizer, factor):
    scaled = experience.replace(advantages=factor * experience.advantages)
    method = METHOD._replace(kl_coef=0.0)
    before, after, metrics = run(scaled, optimizer=optimizer, method=method)
    assert np.isfinite(metrics['loss']) and np.isfinite(metrics['grad_norm'])
    assert unchanged((before.params, before.opt_state), (after.params, after.opt_state))
    assert (int(after.aux['bad_steps']), float(metrics['finite'])) == (1, 0)


def test_only_the_minibatch_that_is_not_finite_is_skipped(run, experience):
    poisoned = experience.replace(advantages=experience.advantages.at[:2].set(np.nan))
    before, after, metrics = run(poisoned, **SIX_UPDATES)  # one of two minibatches, in each of three epochs
    assert (int(after.aux['bad_steps']), float(metrics['finite']), counts(after)) == (3, 0.5, [3, 3])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after.params))
    assert not unchanged(before.params, after.params)


def test_tokens_after_a_completion_do_not_matter(run, experience, assert_close):
    rollout = experience.rollout
    spoilt = jnp.concatenate([rollout.tokens[:, :5], jnp.where(rollout.completion_mask, rollout.tokens[:, 5:], 11)], 1)
    _, plain, metrics = run(experience)
    _, after, spoilt_metrics = run(experience.replace(rollout=rollout.replace(tokens=spoilt)))
    assert_close(after.params, plain.params, atol=1e-7)
    assert_close(spoilt_metrics, metrics)


def test_masked_completion_gives_no_gradient(run, experience, assert_close):
    # a group left out of the mask, as dead_groups = drop does: its advantages and tokens may then be anything
    rollout = experience.rollout.replace(completion_mask=experience.rollout.completion_mask.at[2:4].set(False))
    _, plain, _ = run(experience.replace(rollout=rollout))
    other = experience.replace(
        rollout=rollout.replace(tokens=rollout.tokens.at[2:4].set(7)),
        advantages=experience.advantages.at[2:4].set(100.0),
    )
    _, after, _ = run(other)
    assert_close(after.params, plain.params, atol=1e-7)


def test_forced_tokens_are_read_but_carry_no_loss(run, experience, assert_close):
    forced = experience.rollout.forced.at[:, 1].set(True)
    rollout = experience.rollout.replace(forced=forced)
    _, plain, _ = run(experience.replace(rollout=rollout))
    old = experience.old_logprobs.at[:, 1].set(-9.0)
    _, after, _ = run(experience.replace(rollout=rollout, old_logprobs=old))
    assert_close(after.params, plain.params, atol=1e-7)
    other = rollout.replace(tokens=rollout.tokens.at[:, 5 + 1].set(11))
    _, reread, _ = run(experience.replace(rollout=other))
    assert not unchanged(reread.params, plain.params)


def data_of(preset):
    """What the update of a preset reads, and what besides its formulas it is traced from."""
    method = algorithms.make(default.get_config(preset).algorithm)
    reads = sorted({*method.reads, *pieces.reads(method.weights)})
    needs = algorithms.is_by_token(method), method.needs_values, method.needs_teacher
    return repr((reads, needs, method.adapting, method.ratio_base, method.denominator))


@pytest.mark.parametrize('preset', {data_of(preset): preset for preset in sweep.choose_presets('all')}.values())
def test_update_of_every_preset_keeps_the_shapes_of_the_state(tiny, experience, preset):
    # traced, not compiled, one of those that read the same: tests/algorithms holds the formulas of all against numbers
    c, params = tiny
    method = algorithms.make(default.get_config(preset).algorithm)
    learning = Learning(2, 2, 2, chunk=16, remat='full', dtype='bfloat16', value_clip=0.2)
    setup = UpdateSpec(c, method, learning, ADAM, ADAM, group_size=2)
    floats = experience.old_logprobs
    known = experience.replace(
        old_entropy=floats,
        values=floats,
        returns=floats,
        teacher_logprobs=floats,
        advantages=floats if algorithms.is_by_token(method) else experience.advantages,
    )
    state = TrainState(jnp.int32(3), params, ADAM.init(params), None, new_aux(method, params, ADAM))
    after, metrics = jax.eval_shape(
        lambda state, experience: learner_update(state, experience, None, setup), state, known
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert all(x.shape == () for x in metrics.values())
    assert ('critic/explained_variance' in metrics) == (preset in ('ppo', 'vapo'))


def test_the_critic_learns_alone_at_first(tiny, experience):
    c, params = tiny
    method, optimizer = algorithms.make(default.get_config('ppo').algorithm), optax.sgd(0.1)
    rng = np.random.default_rng(0)
    values, returns, advantages = (
        jnp.asarray(rng.normal(size=experience.old_logprobs.shape), jnp.float32) for _ in range(3)
    )
    known = experience.replace(values=values, returns=returns, advantages=advantages)
    state = TrainState(jnp.int32(0), params, optimizer.init(params), None, new_aux(method, params, optimizer))
    learning = Learning(chunk=16, value_clip=0.2, critic_warmup=1)
    setup = UpdateSpec(c, method, learning, optimizer, optimizer, group_size=2)
    once = jax.jit(lambda state: learner_update(state, known, None, setup)[0])
    first = once(state)
    assert unchanged(state.params, first.params) and int(first.aux['bad_steps']) == 0
    assert not unchanged(state.aux['critic']['params'], first.aux['critic']['params'])
    assert not unchanged(first.params, once(first).params)


def test_batch_without_tokens_changes_nothing(run, experience):
    empty = experience.rollout.replace(completion_mask=jnp.zeros_like(experience.rollout.completion_mask))
    before, after, metrics = run(experience.replace(rollout=empty))
    assert (float(metrics['loss']), float(metrics['grad_norm']), int(after.aux['bad_steps'])) == (0, 0, 0)
    assert unchanged(before.params, after.params)


def test_momentum_does_not_act_where_a_batch_has_no_tokens(run, experience):
    empty = experience.rollout.replace(completion_mask=jnp.zeros_like(experience.rollout.completion_mask))
    _, moving, _ = run(experience, optimizer=MOMENTUM)
    _, after, _ = run(experience.replace(rollout=empty), optimizer=MOMENTUM, state=moving)
    assert unchanged(moving.params, after.params) and unchanged(moving.opt_state, after.opt_state)


# the optimizer


def optimization(**changes):
    section = default.get_config().optimizer
    section.update(changes)
    return Optimization.from_config(section)


@pytest.mark.parametrize(
    'kind, warmup, expected',
    [
        # 10 updates, peak 2: warm-up counts from peak / warmup, so that no update is without effect
        ('constant', 0, {0: 2, 5: 2, 10: 2}),
        ('constant', 1, {0: 2, 1: 2, 9: 2}),
        ('constant', 4, {0: 0.5, 1: 1, 2: 1.5, 3: 2, 4: 2, 9: 2}),
        ('linear', 0, {0: 2, 5: 1, 10: 0}),
        ('linear', 2, {0: 1, 1: 2, 2: 2, 6: 1, 10: 0}),
        ('cosine', 2, {0: 1, 2: 2, 4: 1 + np.cos(np.pi / 4), 6: 1, 10: 0}),
    ],
)
def test_schedule_warms_up_and_then_decays(kind, warmup, expected):
    rate = learning_rates(optimization(schedule=kind, warmup=warmup, learning_rate=2.0), 10)
    for update, value in expected.items():
        assert float(rate(update)) == pytest.approx(value, abs=1e-6), update


def test_unknown_schedule_is_refused_with_the_choices():
    with pytest.raises(BadInput, match=r"optimizer.schedule = 'step': must be constant, cosine or linear"):
        optimization(schedule='step')


@pytest.mark.parametrize('scale, norm', [(1.0, 0.5), (0.01, 0.05)])
def test_gradient_is_clipped_to_its_global_norm(scale, norm):
    # gradients (3, 4) have norm 5; Adam's first moment after one update is (1 - b1) times what came through the clip
    optimizer = build_optimizer(optimization(max_grad_norm=0.5, b1=0.9), 10)
    params = {'a': jnp.zeros(1), 'b': jnp.zeros(1)}
    gradient = {'a': 3 * scale * jnp.ones(1), 'b': 4 * scale * jnp.ones(1)}
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    moments = optax.tree_utils.tree_get(state, 'mu')
    np.testing.assert_allclose([moments['a'][0], moments['b'][0]], [0.06 * norm, 0.08 * norm], rtol=1e-5)


def test_first_update_is_adamw_by_hand():
    # bias correction makes the first step learning_rate * (g / |g| + weight_decay * p) = .1 * (1 + .5 * 2)
    optimizer = build_optimizer(optimization(learning_rate=0.1, weight_decay=0.5, eps=1e-12), 10)
    params = jnp.array([2.0])
    changes, _ = optimizer.update(jnp.array([0.3]), optimizer.init(params), params)
    np.testing.assert_allclose(changes, [-0.2], rtol=1e-5)


def test_a_warmup_may_be_a_share_of_all_updates():
    for warmup, ratio in [(4, 0.4), (3, 0.29), (0, 0.04)]:
        by_share = learning_rates(optimization(schedule='cosine', warmup_ratio=ratio), 10)
        by_number = learning_rates(optimization(schedule='cosine', warmup=warmup), 10)
        assert [float(by_share(i)) for i in range(11)] == [float(by_number(i)) for i in range(11)]
    with pytest.raises(BadInput, match=r'optimizer\.warmup_ratio = 0\.1: is a second warm-up'):
        optimization(warmup=3, warmup_ratio=0.1)


@pytest.mark.parametrize('decays, norms', [('all', 0.0), ('matrices', 1.0)])
def test_weight_decay_may_leave_out_norms_and_biases(tiny, decays, norms):
    # without gradients, a parameter that decays is multiplied by 1 - learning_rate * weight_decay = 0
    optimizer = build_optimizer(optimization(learning_rate=1.0, weight_decay=1.0, decays=decays), 10)
    body = {
        'wq': jnp.ones((2, 3)),
        'wo': {'a': jnp.ones(3), 'b': jnp.ones(3)},
        'bq': jnp.ones(3),
        'q_norm': jnp.ones(3),
    }
    params = {'embed': jnp.ones(3), 'layers': body, 'final_norm': jnp.ones(3), 'value_head': jnp.ones(3)}
    changes, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    new = optax.apply_updates(params, changes)
    left = {'bq': norms, 'q_norm': norms, 'final_norm': norms, 'value_head': norms}
    for path, leaf in jax.tree_util.tree_leaves_with_path(new):
        assert float(leaf.ravel()[0]) == next((left[key.key] for key in path if key.key in left), 0.0), path


def test_learning_rate_follows_the_schedule_by_update():
    optimizer = build_optimizer(optimization(learning_rate=1.0, warmup=4, eps=1e-12), 10)
    params = jnp.array([0.0])
    state, steps = optimizer.init(params), []
    for _ in range(5):
        change, state = optimizer.update(jnp.array([0.5]), state, params)
        steps.append(-float(change[0]))
    np.testing.assert_allclose(steps, [0.25, 0.5, 0.75, 1, 1], rtol=1e-4)  # a constant gradient: Adam steps by the rate


def test_numbers_that_adapt_are_in_the_metrics_as_the_step_has_used_them(tiny, run, experience):
    method = METHOD._replace(kl_coef=0.5, kl_target=0.1, kl_horizon=100.0, entropy_coef=0.02, entropy_target=1.0)
    state = start(tiny, SGD).replace(aux=new_aux(method, tiny[1], None))
    _, after, metrics = run(experience, method=method, state=state)
    assert (float(metrics['kl_coef']), float(metrics['entropy_acts'])) == (0.5, 1)
    assert float(metrics['entropy_coef']) == pytest.approx(0.02)
    _, _, later = run(experience, method=method, state=after)
    assert float(later['kl_coef']) == float(after.aux['coefficients']['kl_coef']) != 0.5
    assert 'kl_coef' not in run(experience)[2]  # a constant is in the config


def test_the_learning_rate_of_a_step_is_in_the_metrics(tiny, experience):
    # warm-up over 4 updates to 0.4, one update a step: 0.1, 0.2, 0.3
    optimization = Optimization(learning_rate=0.4, warmup=4)
    setup = UpdateSpec(
        tiny[0], METHOD, Learning(chunk=16), build_optimizer(optimization, 9), group_size=2,
        learning_rate=learning_rates(optimization, 9),
    )  # fmt: skip
    update = jax.jit(lambda state, experience: learner_update(state, experience, None, setup))
    state, rates = start(tiny, setup.optimizer), []
    for _ in range(3):
        state, metrics = update(state, experience)
        rates.append(float(metrics['learning_rate']))
    assert rates == pytest.approx([0.1, 0.2, 0.3])
