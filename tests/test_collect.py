"""Drawing until groups differ, replay, the curriculum, and completions that come from the data."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms, train
from grpo_jax.collect.draw import find_retired
from grpo_jax.collect.options import CollectOptions
from grpo_jax.collect.select import Group, find_dead, make_collector, replay, resample
from grpo_jax.configs import default, distill
from grpo_jax.errors import BadInput
from grpo_jax.rewards import Rewards
from grpo_jax.run.open import open_run, open_splits
from grpo_jax.run.settings import Settings
from grpo_jax.types import TrainState
from tests import tiny_run

SHORT = dict(steps=3, optimizer__learning_rate=1e-3)
PLAIN = SHORT | dict(supervised__updates=0)
# a random model hits one-digit sums in a few completions of a hundred
RARE = dict(data__prompts_per_step=8, data__options={'digits': 1, 'count': 30, 'blurts': 0.5, 'wrong': 0.5})


def test_a_prompt_retires_at_the_pass_rate_itself():
    options = CollectOptions(retire_above=0.75)
    aux = {'tries': np.array([4, 4, 4, 0]), 'hits': np.array([4, 3, 2, 0])}
    assert find_retired(options, aux, 4).tolist() == [True, True, False, False]
    assert not find_retired(CollectOptions(), aux, 4).any()


def test_resample_draws_until_its_groups_differ_or_the_cap(long, tmp_path):
    config = tiny_run.config(preset='dapo', collection__max_draws=3, **PLAIN | RARE)
    state = train.run(config, str(tmp_path))
    rows = tiny_run.rows(tmp_path)
    assert all(1 <= row['draws'] <= 3 for row in rows)
    assert int(state.aux['position']) == 8 * sum(row['draws'] for row in rows)
    for row in rows:
        # fewer than 8 groups differed only when the cap was reached
        assert row['dead_groups'] == 0 or row['draws'] == 3
        assert row['wasted_tokens'] >= 0


def run_and_resume(config, steps, tmp_path):
    """(state, rows) of a run; the same after stopping in between."""
    config.steps = steps
    straight = train.run(config, str(tmp_path / 'straight'))
    for stop in (steps - 2, steps):
        config.steps = stop
        resumed = train.run(config, str(tmp_path / 'parts'))
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)
    rows = tiny_run.rows(tmp_path / 'straight')
    assert tiny_run.rows(tmp_path / 'parts') == rows
    return straight, rows


@pytest.mark.parametrize('policy', ['resample', 'replay'])
def test_groups_of_earlier_steps_return_and_a_resumed_run_does_the_same(long, policy, tmp_path, monkeypatch):
    config = tiny_run.config(
        preset='dapo',
        collection__dead_groups=policy,
        collection__max_staleness=2,
        collection__max_draws=4,
        algorithm__correction='truncated',
        reward__self_test=1.0,
        **PLAIN | RARE,
    )
    # whether an 8 occurs: about half of the groups differ, so some are left over and some steps want more
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: float('8' in completion))
    _, rows = run_and_resume(config, 5, tmp_path)
    assert rows[0]['groups_of_earlier_steps'] == 0
    assert sum(row['groups_of_earlier_steps'] for row in rows) > 0
    if policy == 'replay':
        assert all(row['draws'] == 1 for row in rows)


def test_prompts_that_are_solved_retire(tmp_path, monkeypatch):
    # every completion is right: after one visit a prompt is retired, and the next steps see others
    config = tiny_run.config(preset='dr_grpo', collection__retire_above=0.9, reward__self_test=1.0, **PLAIN)
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: 1.0)
    state = train.run(config, str(tmp_path))
    tries = np.asarray(state.aux['tries'])
    assert set(tries.tolist()) == {0, config.rollout.group_size} and int((tries > 0).sum()) == 12
    np.testing.assert_array_equal(tries, state.aux['hits'])
    assert [row['retired'] * len(tries) for row in tiny_run.rows(tmp_path)] == pytest.approx([4, 8, 12])


def test_retired_prompts_are_revisited_and_come_back_when_they_are_forgotten(tmp_path, monkeypatch):
    # demonstrations, 4 prompts a step with one completion each; judged right in steps 0 and 1, wrong in step 2
    config = tiny_run.config(
        preset='sft', collection__retire_above=0.9, collection__revisit=0.25, data__prompts_per_step=1, **PLAIN
    )
    judged = {'right': 1.0}
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: judged['right'])
    opened = open_run(config, str(tmp_path))
    splits = open_splits(opened)
    collector = make_collector(opened, splits)
    count = len(collector.examples)
    aux = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), collector.aux)
    state = TrainState(step=jnp.int32(0), params=None, opt_state=None, ref_params=None, aux=aux)
    seen, rows = [], []
    for step, judged['right'] in enumerate((1.0, 1.0, 0.0)):
        # another Collector draws the same from the state
        resumed, _ = make_collector(opened, splits).collect(state, print)
        draw, state = collector.collect(state, print)
        assert draw.examples == resumed.examples
        seen.append([example.id for example in draw.examples])
        rows.append(draw.counts | {'position': int(state.aux['position'])})
        state = state.replace(step=jnp.int32(step + 1))
    assert [row['position'] for row in rows] == [4, 7, 10]  # 4 fresh, then 3 beside a revisited one
    assert [row['revisited'] for row in rows] == [0, 1, 1]
    assert np.isnan(rows[0]['revisited_pass_rate'])
    assert [row['revisited_pass_rate'] for row in rows[1:]] == [1, 0]
    assert seen[1][0] in seen[0] and seen[2][0] in seen[0] + seen[1] and all(len(set(ids)) == 4 for ids in seen)
    # 4, then 7; in step 2 none of 3 fresh ones, and the revisited one, right once in 2 or twice in 3 visits, is back
    assert [row['retired'] * count for row in rows] == pytest.approx([4, 7, 6])
    back = [example.id for example in collector.examples].index(seen[2][0])
    visits = sum(ids.count(seen[2][0]) for ids in seen)
    assert (int(state.aux['tries'][back]), int(state.aux['hits'][back])) == (visits, visits - 1)


def test_a_resumed_run_revisits_the_same_prompts(long, tmp_path, monkeypatch):
    config = tiny_run.config(
        preset='dapo', collection__retire_above=0.5, collection__revisit=0.4, collection__dead_groups='resample',
        collection__max_draws=2, reward__self_test=1.0, **PLAIN,
    )  # fmt: skip
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: float('8' in completion))
    state, rows = run_and_resume(config, 5, tmp_path)
    revisited = sum(row['revisited'] for row in rows)
    assert 1 <= revisited <= 8  # 4 x 5 x 0.4 places, where as many prompts were retired
    assert int(state.aux['position']) == 4 * sum(row['draws'] for row in rows) - revisited


@pytest.mark.parametrize(
    'changes, words',
    [
        (dict(collection__retire_above=0.9, reward__verifier=''), ['retire_above = 0.9', 'reward.verifier']),
        (dict(collection__revisit=0.1), ['revisit = 0.1', 'collection.retire_above']),
        (dict(collection__retire_above=0.9, collection__revisit=1.0), ['revisit = 1.0', 'below 1']),
        (dict(collection__max_draws=0), ['max_draws = 0']),
        (dict(collection__gate='outcome', reward__verifier=''), ["gate = 'outcome'", 'reward.verifier']),
        (dict(collection__gate='all'), ["gate = 'all'", 'outcome, reward or none']),
        (dict(collection__dead_groups='replay'), ['max_staleness = 0', 'at least 1']),
        (dict(collection__dead_groups='resample', collection__max_staleness=2), ['max_staleness = 2', 'truncated']),
    ],
)
def test_what_cannot_be_collected_is_refused_before_anything_is_written(changes, words, tmp_path):
    with pytest.raises(BadInput) as error:
        train.run(tiny_run.config(preset='dr_grpo', **PLAIN | changes), str(tmp_path / 'run'))
    assert all(word in str(error.value) for word in words)
    assert not (tmp_path / 'run').exists()


def group(rewards, since=0):
    unknown = np.full(len(rewards), np.nan)
    rewarded = Rewards([], [], [1] * len(rewards), np.array(rewards), unknown, {}, {})
    dead = find_dead(CollectOptions().gate, rewarded)[0]
    return Group(None, None, since, rewarded, bool(dead))


def test_a_replayed_group_has_its_spread_as_its_priority():
    assert group([1.0, 1, 1]).priority == group([np.nan, 1, np.nan]).priority == 0
    assert group([0.0, 1]).priority == pytest.approx(0.5) and group([0.0, 2]).priority == pytest.approx(2.0)


def test_resample_stops_at_enough_groups_or_at_the_cap():
    alive, dead = group([0.0, 1.0]), group([1.0, 1.0])
    draws = [[dead, alive], [alive, alive], [alive, dead]]
    selection, seen = resample(lambda seen, index: (draws[index], [*seen, index]), [], [], prompts=2, max_draws=3)
    assert (len(selection.alive), len(selection.dead), len(selection.kept), selection.draws) == (3, 1, 1, 2)
    assert seen == [0, 1]
    # at the cap there are too few, and a kept group counts as drawn
    selection, _ = resample(lambda carry, index: ([dead, dead], carry), None, [alive], prompts=2, max_draws=3)
    assert (selection.alive, len(selection.dead), selection.kept, selection.draws) == ([alive], 6, [], 3)


def test_replay_fills_the_places_of_dead_groups_and_keeps_the_best():
    drawn, old, older = group([0.0, 1.0], since=5), group([0.0, 2.0], since=4), group([0.0, 3.0], since=3)
    draw = [drawn, group([1.0, 1.0])]
    selection, carry = replay(lambda *_: (draw, 'moved on'), '', [old, older], 2, np.random.default_rng(0))
    assert carry == 'moved on'
    assert selection.alive[0] is drawn and selection.alive[1] in (old, older) and selection.draws == 1
    assert selection.kept == [older, old]  # by priority, of as many as a step has
    # nothing kept: nothing to fill with
    assert replay(lambda *_: ([drawn], None), None, [], 2, np.random.default_rng(0))[0].alive == [drawn]


@pytest.mark.parametrize('preset', ['grpo', 'dr_grpo', 'default_rlvr', 'scalerl', 'deepseek_r1'])
def test_groups_are_judged_by_their_rewards_unless_a_config_says_otherwise(preset):
    """As in TRL and verl: format, a judge, partial credit teach where no answer is right."""
    assert Settings.from_config(tiny_run.config(preset=preset)).collection.gate == 'reward'
    alone = np.array([[0.2, 0.0], [0.0, 0.0]]), np.zeros((2, 2))  # the format is paid where all are wrong
    assert algorithms.judge_groups(CollectOptions().gate, *alone).tolist() == [False, True]
    taught = algorithms.compute_advantages(algorithms.make(default.get_config(preset).algorithm), alone[0],
                                           mask=np.ones((2, 2, 1), bool), correct=alone[1])  # fmt: skip
    assert taught[0] > 0 > taught[1] and not taught[2:].any()


def test_dapo_filters_by_correctness_as_its_paper_does():
    config = tiny_run.config(preset='dapo')
    assert Settings.from_config(config).collection.gate == algorithms.make(config.algorithm, config.collection).gate
    assert Settings.from_config(config).collection.gate == 'outcome'


def test_by_outcome_groups_that_differ_in_format_alone_are_drawn_again():
    unknown = np.full(2, np.nan)
    rewarded = Rewards([], [], [1, 1], np.array([0.1, 0.0]), np.array([0.0, 0.0]), {}, {})
    assert find_dead('outcome', rewarded).tolist() == [True]
    assert find_dead('reward', rewarded).tolist() == [False]
    known_to_none = rewarded._replace(correct=unknown)
    assert find_dead('outcome', known_to_none).tolist() == [False]


def test_sft_takes_as_many_rows_and_its_loss_falls(long, tmp_path):
    config = tiny_run.config(preset='sft', **PLAIN | dict(steps=8))
    train.run(config, str(tmp_path))
    rows = tiny_run.rows(tmp_path)
    assert rows[-1]['loss'] < rows[0]['loss'] - 0.1
    assert 'sampler/steps' not in rows[0]


def test_a_runs_completions_teach_another_policy_by_sft_and_by_dpo(long, tmp_path):
    """Distillation in two commands: the rollouts that one run wrote are the data of the next."""
    teacher = tiny_run.config(preset='dr_grpo', log__rollouts=1, **SHORT | RARE | dict(steps=6))
    train.run(teacher, str(tmp_path / 'teacher'))
    dumped = [
        row
        for path in (tmp_path / 'teacher' / 'rollouts').iterdir()
        for row in map(json.loads, path.read_text(encoding='utf8').splitlines())
    ]
    right = {(row['prompt'], row['completion']) for row in dumped if row['correct']}
    assert right and all(row['correct'] == (row['reward'] == 1) for row in dumped)
    rollouts = dict(folder=str(tmp_path / 'teacher' / 'rollouts'))
    data = dict(data__name='rollouts', data__options=rollouts, rollout__max_tokens=16)
    assert set(distill.get_config().data.options) == set(rollouts)
    student = tiny_run.config(preset='sft', **data, **PLAIN | dict(steps=6, data__prompts_per_step=2))
    train.run(student, str(tmp_path / 'student'))
    losses = [row['loss'] for row in tiny_run.rows(tmp_path / 'student')]
    assert losses[-1] < losses[0]
    pairs = tiny_run.config(
        preset='dpo', collection__source='pairs', **data, **PLAIN | dict(steps=6, data__prompts_per_step=2)
    )
    train.run(pairs, str(tmp_path / 'pairs'))
    losses = [row['loss'] for row in tiny_run.rows(tmp_path / 'pairs')]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4) and losses[-1] < losses[0]


def test_rft_samples_the_frozen_policy(long, tmp_path, monkeypatch):
    # a run that learns draws the same completions as one that does not
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: float('8' in completion))
    drawn, states = [], []
    for rate in (0.0, 1e-2):
        folder = tmp_path / str(rate)
        config = tiny_run.config(
            preset='rft', log__rollouts=1, reward__self_test=1.0, **PLAIN | dict(optimizer__learning_rate=rate)
        )
        states.append(train.run(config, str(folder)))
        drawn.append(
            [
                json.loads(line)['completion']
                for path in sorted((folder / 'rollouts').iterdir())
                for line in path.read_text(encoding='utf8').splitlines()
            ]
        )
    assert drawn[0] == drawn[1]
    still, moved = (jax.tree.leaves(state.params) for state in states)
    assert not any(np.array_equal(a, b) for a, b in zip(still, moved, strict=True))


@pytest.mark.parametrize(
    'preset, changes, words',
    [
        ('rft', dict(reward__verifier=''), ['reward.verifier is empty', 'reward.correct_at']),
        ('vapo', dict(reward__verifier=''), ['reward.verifier is empty']),
        ('xrpo', dict(reward__verifier=''), ['reward.verifier is empty']),
        ('maxrl', dict(reward__truncated_reward=-0.5), ['reward.truncated_reward = -0.5', 'correct']),
        ('grpo_process', dict(reward__length_shaping='kimi'), ["reward.length_shaping = 'kimi'", 'step_rewards']),
        ('grpo', dict(algorithm__advantage='gdpo', reward__truncated_reward=-0.5), ['truncated_reward', 'parts']),
        ('grpo', dict(reward__verifier='', reward__length_shaping='kimi'), ["length_shaping = 'kimi'", 'verifier']),
        (
            'grpo',
            dict(reward__step_rewards='', reward__steps_with_outcome=True),
            ['steps_with_outcome', 'step_rewards'],
        ),
    ],
)
def test_what_the_algorithm_could_not_read_is_refused(preset, changes, words, tmp_path):
    with pytest.raises(BadInput) as error:
        train.run(tiny_run.config(preset=preset, **PLAIN | changes), str(tmp_path / 'run'))
    assert all(word in str(error.value) for word in words)
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('allocation', ['equal', 'pass_rate'])
def test_a_prompt_that_comes_twice_in_a_draw_gets_other_completions(allocation, tmp_path):
    few = dict(data__options={'digits': 1, 'count': 3, 'blurts': 0.5, 'wrong': 0.5}, data__prompts_per_step=6)
    made = tiny_run.config(preset='dr_grpo', collection__allocation=allocation, log__rollouts=1, **PLAIN | few)
    made.steps = 1
    train.run(made, str(tmp_path))
    with open(tmp_path / 'rollouts' / '000000.jsonl', encoding='utf8') as lines:
        rows = [json.loads(line) for line in lines]
    groups = [tuple(row['completion'] for row in rows[i : i + 4]) for i in range(0, len(rows), 4)]
    assert len(groups) == 6 and len({row['prompt'] for row in rows}) < 6 and len(set(groups)) == 6


def test_kept_groups_that_other_rewards_make_dead_are_dropped(tmp_path, monkeypatch):
    options = dict(collection__dead_groups='replay', collection__max_staleness=2, algorithm__correction='truncated')
    made = tiny_run.config(preset='dapo', reward__self_test=1.0, **options, **PLAIN | RARE)
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: float('8' in completion))
    made.steps = 1
    assert train.run(made, str(tmp_path)).aux['kept']['filled'].any()
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', lambda completion, example: 0.0)
    made.steps = 2
    train.run(made, str(tmp_path))
    assert tiny_run.rows(tmp_path)[1]['groups_of_earlier_steps'] == 0
