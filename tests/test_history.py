"""Baselines of earlier rewards: what a step reads, what it adds, and that a resumed run has the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms, train
from grpo_jax.configs import default
from grpo_jax.learner.experience import abstract_history, read_history
from grpo_jax.types import TrainState
from tests import tiny_run

NAN = np.nan


def algorithm(advantage, decay=0.5):
    config = default.get_config('reinforce_moving')
    config.algorithm.advantage, config.algorithm.baseline_decay = advantage, decay
    return algorithms.make(config.algorithm)


def read(method, steps):
    """(what each step reads, aux after the last) of steps of (places of the prompts, rewards [P, G])."""
    aux = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_history(method, 3))
    state, found = TrainState(jnp.int32(0), None, None, None, aux), []
    for places, rewards in steps:
        state, baselines = read_history(method, state, np.array(places), np.array(rewards, float))
        found.append(baselines)
    return found, state.aux


@pytest.mark.parametrize(
    'decay, expected',
    [
        (0.5, [0, 0.25, 0.75, 0.75]),  # then (.5 x .25 + 1) / 1.5
        (1.0, [0, 0.25, 0.625, 0.625]),  # the mean of both
        (0.0, [0, 0.25, 1.0, 1.0]),  # the newest
    ],
)
def test_the_runs_baseline_is_a_moving_average_of_earlier_steps(decay, expected):
    # means .25 (of four known), 1 (of one), and nothing known, which changes nothing
    steps = [((0, 1), [[1, 0], [0, 0]]), ((1, 2), [[1, NAN], [NAN, NAN]]), ((0, 1), [[NAN, NAN]] * 2), ((2,), [[0, 0]])]
    found, _ = read(algorithm('moving_mean', decay), steps)
    assert [list(baselines) for baselines in found] == [['run_baseline']] * 4
    assert [baselines['run_baseline'] for baselines in found] == pytest.approx(expected)


def test_a_prompts_baseline_is_that_of_its_own_visits_and_at_first_the_runs():
    steps = [
        ((0, 1), [[1, 0], [0, 0]]),  # means .5 and 0, of the run .25
        ((0, 2), [[1, 1], [1, NAN]]),  # read .5, and of a new prompt .25
        ((0, 1), [[NAN, NAN], [1, 0]]),  # read (.5 x .5 + 1) / 1.5 and 0
        ((0, 2, 2), [[0, 0], [1, 1], [0, 0]]),  # an unscorable visit was none; a prompt twice in a step reads the same
        ((2,), [[0, 0]]),  # 1, 1, 0 with weights .25, .5, 1
    ]
    found, aux = read(algorithm('prompt_moving_mean'), steps)
    of_prompts = [baselines['prompt_baselines'] for baselines in found]
    expected = [[0, 0], [0.5, 0.25], [5 / 6, 0], [5 / 6, 1, 1], [3 / 7]]
    for baselines, (_, rewards), values in zip(of_prompts, steps, expected, strict=True):
        np.testing.assert_allclose(baselines, np.repeat(np.array(values)[:, None], np.shape(rewards)[1], 1), rtol=1e-6)
    np.testing.assert_allclose(aux['history']['prompt_baselines']['weight'], [1.75, 1.5, 1.875])


def test_an_advantage_that_compares_a_group_keeps_no_history():
    config = default.get_config('grpo')
    method = algorithms.make(config.algorithm)
    state = TrainState(jnp.int32(0), None, None, None, {'position': jnp.int32(0)})
    assert abstract_history(method, 3) == {}
    assert read_history(method, state, np.array([0]), np.ones((1, 2))) == (state, {})


@pytest.mark.parametrize('mesh', [{}, {'mesh__data': 2}])
def test_a_resumed_run_has_the_same_baselines(long, mesh, tmp_path, monkeypatch):
    # every prompt twice in 5 steps; whether an 8 occurs is rewarded
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: float('8' in completion))
    data = {'digits': 1, 'count': 10, 'blurts': 0.5, 'wrong': 0.5}
    config = tiny_run.config(
        preset='reinforce_moving', steps=5, reward__self_test=1.0,
        algorithm__advantage='prompt_moving_mean', optimizer__learning_rate=1e-3, data__options=data, **mesh,
    )  # fmt: skip
    straight = train.run(config, str(tmp_path / 'straight'))
    for stop in (3, 5):
        config.steps = stop
        resumed = train.run(config, str(tmp_path / 'parts'))
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)
    rows = tiny_run.rows(tmp_path / 'straight')
    assert tiny_run.rows(tmp_path / 'parts') == rows
    # by hand from the rewards of the rows: a step's mean, and 9 tenths of the weight of what was before
    rewards = [row['reward'] for row in rows]
    for step in range(5):
        weights = 0.9 ** np.arange(step)[::-1]
        expected = np.sum(weights * rewards[:step]) / weights.sum() if step else 0
        assert rows[step]['run_baseline'] == pytest.approx(expected, abs=1e-6)
    assert rows[1]['prompt_baselines'] == rows[1]['run_baseline'] != rows[4]['run_baseline'] > 0
    assert rows[4]['prompt_baselines'] != rows[4]['run_baseline']
