"""The probe and the observed KL: they move by what the policy moved, and nothing learns from them."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import train
from grpo_jax.collect.draw import Draw
from grpo_jax.collect.select import make_collector
from grpo_jax.learner import completion_logprobs
from grpo_jax.run import checkpoint, observers
from grpo_jax.run.open import make_run_learner, open_run, open_splits
from grpo_jax.run.settings import Settings
from grpo_jax.types import Experience, Rollout
from tests import tiny_run

NAN = float('nan')
OBSERVED = dict(log__probe_every=1, log__probe_prompts=3, log__kl_every=2)


def config(**changes):
    quick = dict(checkpoint__every=1, checkpoint__keep=9)
    cold = dict(supervised__updates=40, supervised__optimizer__learning_rate=1e-2)
    return tiny_run.config(**dict(steps=5) | quick | cold | changes)


@pytest.fixture(scope='module')
def probed(tmp_path_factory):
    """(workdir, state) of a run whose probe is looked at in each step, and its reference in each second."""
    workdir = str(tmp_path_factory.mktemp('probed') / 'run')
    return workdir, train.run(config(**OBSERVED), workdir)


def test_the_kl_is_measured_where_a_reward_model_pays_and_no_verifier_looks():
    """0 is never, and a number is taken as it is."""

    def every(parts, **changes):
        return Settings.from_config(tiny_run.config(reward__parts=parts, **changes)).log.kl_every

    model, rule = (('model', 1.0),), (('repetition', 1.0),)
    assert every(model, reward__verifier='') == 10
    assert every((('model', 0.0), *rule), reward__verifier='') == every(rule, reward__verifier='') == 0
    assert every((*model, ('numeric', 0.0))) == 0  # the verifier looks, with whatever weight
    assert every(model, reward__verifier='', log__kl_every=0) == 0
    assert every(model, reward__verifier='', log__kl_every=3) == 3


def aux_of(state):
    return jax.device_get(state.aux['probe'])


def test_right_completions_are_those_of_the_verifier_or_the_best_of_a_group():
    rewards = np.array([[0.5, 1.0], [1.0, 1.0], [NAN, 2.0]])
    correct = np.array([[1.0, 0.0], [NAN, 1.0], [NAN, NAN]])
    assert observers.mark_right(correct, rewards).tolist() == [[True, False], [False, True], [False, False]]
    unknown = np.full((3, 2), NAN)
    assert observers.mark_right(unknown, rewards).tolist() == [[False, True], [False, False], [False, False]]


def test_the_shared_prefix_is_the_longest_with_a_different_completion():
    tokens = np.array([[5, 6, 7], [5, 6, 7], [5, 6, 9], [5, 8, 0], [5, 6, 7]])
    mask = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]], bool)
    assert observers.shared_prefix_length(tokens, mask, 0) == 2  # with rows 2 and 4; row 1 is the same completion
    assert observers.shared_prefix_length(tokens, mask, 3) == 1
    assert observers.shared_prefix_length(tokens, mask, 4) == 2  # it begins rows 0 and 1, which are longer
    assert observers.shared_prefix_length(tokens[:2], mask[:2], 0) == 0


def test_changes_are_means_over_the_tokens_of_the_rows_that_are_there():
    mask = np.array([[True, True, False], [True, True, True], [True, True, True]])
    before = np.array([[-1.0, -2.0, 9.0], [-1.0, -1.0, -1.0], [-5.0, -5.0, -5.0]], np.float32)
    empty = np.zeros((3, 3), np.int32)
    rollout = Rollout(empty, empty[:, :0] > 0, mask, empty > 0, before, empty[:, 0] > 0, empty)
    kept = {'rollout': rollout, 'size': np.int32(2), 'shared': np.array([1, 0, 0])}
    now = before + np.array([[1.0, 0.5, 70.0], [-1.0, -0.5, 0.0], [9.0, 9.0, 9.0]], np.float32)
    found = observers.compare(kept, now)
    # tokens of the first two rows: 1 .5, -1 -.5 0; the first alone is shared
    assert found['probe_logprob_change'] == pytest.approx(0.0, abs=1e-7)
    assert found['probe_prefix_change'] == pytest.approx(1.0)
    assert found['probe_rest_change'] == pytest.approx(-0.25)
    assert found['probe_logprob'] == pytest.approx((0 - 1.5 - 2 - 1.5 - 1) / 5)
    nothing = observers.compare(kept | {'size': np.int32(0)}, now)
    assert nothing['probe_size'] == 0 and np.isnan(nothing['probe_logprob_change'])


def test_the_probe_holds_first_right_completions_of_different_prompts(probed):
    workdir, state = probed
    kept, rows = aux_of(state), tiny_run.rows(workdir)
    assert kept['size'] == 3 == len(set(kept['ids'].tolist())) and rows[-1]['probe_size'] == 3
    dumped = tiny_run.rows(workdir, 'rollouts/000000.jsonl')
    right = {row['id']: row['completion'] for row in reversed(dumped) if row['correct']}
    at_once = [i for i in range(3) if kept['rollout'].version[i][0] == 0]
    assert at_once, 'the cold start solves something'
    assert all(kept['ids'][i] in right for i in at_once)


def test_with_one_update_a_rollout_the_probe_moves_and_the_ratio_does_not(probed):
    rows = tiny_run.rows(probed[0])
    assert rows[0]['probe_logprob_change'] == 0  # before the first update, bit for bit
    assert rows[-1]['probe_logprob_change'] != 0
    assert all(row['logprob_change_better'] == 0 == row['kl_old'] for row in rows)


def opened(workdir):
    """(Run, learner, its Observers) of the probed run."""
    run = open_run(config(**OBSERVED), workdir)
    learner = make_run_learner(run, make_collector(run, open_splits(run)).aux)
    return run, learner, observers.make_observers(run, learner)


def test_a_change_of_the_policy_by_hand_moves_the_meter_by_the_computed_amount(probed):
    run, _, observing = opened(probed[0])
    kept = aux_of(probed[1])
    assert kept['size'] == 3, 'no row is looked for'
    # without its last norm's scale every logit is 0, and each token has the chance 1 / V
    params = dict(probed[1].params, final_norm=jnp.zeros_like(probed[1].params['final_norm']))
    state = probed[1].replace(step=jnp.int32(11), params=params)
    after, row = observing.observe(state, Experience(*[None] * 6), None, Draw([], kept['rollout'], lambda: None))
    mask, uniform = kept['rollout'].loss_mask, -np.log(run.model.config.vocab_size)
    change = uniform - kept['rollout'].logprobs
    shared = np.arange(mask.shape[1]) < kept['shared'][:, None]
    assert row['probe_logprob'] == pytest.approx(uniform, rel=1e-6)
    assert row['probe_logprob_change'] == pytest.approx(change[mask].mean(), rel=1e-5)
    assert row['probe_prefix_change'] == pytest.approx(change[mask & shared].mean(), rel=1e-5)
    assert row['probe_rest_change'] == pytest.approx(change[mask & ~shared].mean(), rel=1e-5)
    assert after is state, 'a full probe stays as it is'


def test_the_meter_is_what_the_policy_of_a_checkpoint_says(probed):
    workdir, state = probed
    kept, row = aux_of(state), tiny_run.rows(workdir)[4]
    run, learner, _ = opened(workdir)
    params = checkpoint.read_tree(
        checkpoint.path_of(workdir, 4), {'params': learner.abstract_state.params}, partial=True
    )['params']
    now = completion_logprobs(
        params, kept['rollout'], run.model.config, temperature=1.0, chunk=64, remat='none'
    ).logprobs
    mask = kept['rollout'].loss_mask
    assert row['probe_logprob'] == pytest.approx(np.mean(np.asarray(now)[mask]), abs=1e-5)
    assert row['probe_logprob_change'] == pytest.approx(
        np.mean((np.asarray(now) - kept['rollout'].logprobs)[mask]), abs=1e-5
    )


def test_the_observed_kl_comes_every_so_many_steps_and_grows_from_nothing(probed):
    rows = tiny_run.rows(probed[0])
    assert [row['step'] for row in rows if 'kl_ref' in row] == [0, 2, 4]
    assert rows[0]['kl_ref'] == rows[0]['kl_ref_sequence_max'] == 0
    assert 0 < rows[2]['kl_ref'] < rows[4]['kl_ref']
    assert rows[4]['kl_ref'] < rows[4]['kl_ref_sequence'] <= rows[4]['kl_ref_sequence_max']


def goes_on(workdir, folder, step, **changes):
    """(workdir, state) of a copy of the run that goes on from the checkpoint of a step."""
    copy = str(folder / 'copy')
    shutil.copytree(workdir, copy)
    for later in checkpoint.steps(copy):
        if later > step:
            shutil.rmtree(checkpoint.path_of(copy, later))
    return copy, train.run(config(**OBSERVED | changes), copy)


def same(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_a_resumed_run_says_the_same_bit_for_bit(probed, tmp_path):
    workdir, state = probed
    copy, resumed = goes_on(workdir, tmp_path, 1)
    assert same(resumed.aux, state.aux) and same(resumed.params, state.params)
    with open(os.path.join(workdir, 'metrics.jsonl')) as one, open(os.path.join(copy, 'metrics.jsonl')) as two:
        assert one.read() == two.read()


def test_what_is_observed_changes_no_parameter_and_can_be_switched_off(probed, tmp_path, caplog):
    workdir, state = probed
    copy, plain = goes_on(workdir, tmp_path, 4, log__probe_every=0, log__kl_every=0)
    assert same(plain.params, state.params) and same(plain.opt_state, state.opt_state)
    assert 'probe' not in plain.aux and plain.ref_params is None
    assert not {'kl_ref', 'probe_size'} & set(tiny_run.rows(copy)[4])
    assert 'not used any more: the probe' in caplog.text


def test_what_is_observed_can_be_switched_on(long, probed, tmp_path, caplog):
    copy, _ = goes_on(probed[0], tmp_path, 4, log__probe_every=0, log__kl_every=0)
    again = train.run(config(**OBSERVED | dict(steps=12)), copy)  # enough for a right completion, whatever the machine
    rows = tiny_run.rows(copy)
    assert rows[11]['probe_size'] > 0 and 'begins anew: the probe' in caplog.text
    assert rows[10]['kl_ref'] > 0 and again.ref_params is not None
