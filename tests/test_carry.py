"""Rows that go on in the next step: which groups a step learns from, and that a resumed run does the same."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import data, rewards, train
from grpo_jax.collect import pending
from grpo_jax.collect.draw import Drawer
from grpo_jax.collect.select import make_collector
from grpo_jax.errors import BadInput
from grpo_jax.rewards import RewardStream
from grpo_jax.run import branch, checkpoint
from grpo_jax.run.open import make_policy, make_run_sampler, open_run, open_splits
from grpo_jax.run.steering import Steering
from grpo_jax.sampler import engine as engines
from grpo_jax.tools import provenance
from grpo_jax.types import TrainState
from tests import tiny_run

CARRIED = dict(
    preset='grpo', algorithm__correction='truncated', collection__in_flight=4, rollout__max_tokens=24,
    supervised__updates=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cut(monkeypatch):
    """Steps may end after each 4 tokens, so that rows of 24 tokens are carried."""
    monkeypatch.setattr(engines, 'CUT', 4)


def open_collector(tmp_path, **changes):
    """(the Run of a tiny config, its Collector, a first TrainState with the policy alone)."""
    run = open_run(tiny_run.config(**CARRIED | changes), str(tmp_path))
    collector = make_collector(run, open_splits(run))
    aux = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), collector.aux)
    return run, collector, TrainState(jnp.int32(0), make_policy(run), None, None, aux)


def collect_steps(collector, state, count):
    """(the Draws of so many steps whose updates change nothing, the state behind them)."""
    draws = []
    for step in range(count):
        draw, state = collector.collect(state.replace(step=jnp.int32(step)), lambda *_: None)
        draws.append(draw)
    return draws, state


def rows_by_prompt(draws):
    """{(id, visit): the rows of a prompt's group} of draws."""
    groups, visits = {}, {}
    for draw in draws:
        rollout = jax.device_get(draw.rollout)
        size = len(rollout.truncated) // len(draw.examples)
        for place, example in enumerate(draw.examples):
            rows = slice(place * size, (place + 1) * size)
            visits[example.id] = visits.get(example.id, -1) + 1
            groups[example.id, visits[example.id]] = jax.tree.map(lambda x, rows=rows: x[rows], rollout)
    return groups


def test_a_row_gets_the_tokens_that_it_would_have_had_without_the_pause(tmp_path):
    # the policy does not change, so rows that were carried equal rows that one call samples to their end
    run, collector, state = open_collector(tmp_path)
    draws, state = collect_steps(collector, state, 5)
    groups = rows_by_prompt(draws)
    assert any((rows.version != rows.version[:, :1]).any() for rows in groups.values()), 'nothing was carried'
    waiting = make_run_sampler(run, run.settings.step_shapes(run.algorithm)._replace(prompts=1))
    splits, settings = open_splits(run), run.settings
    places = {example.id: index for index, example in enumerate(splits.train.examples)}
    for (number, _), rows in list(groups.items())[:6]:
        _, prompts = data.prompts(splits.train, [places[number]], 6, settings.sampling.pad_token)
        since = int(rows.version[0, 0])
        whole = jax.device_get(waiting(state.params, prompts, jax.random.key(settings.seed), since))
        np.testing.assert_array_equal(whole.tokens, rows.tokens)
        np.testing.assert_array_equal(whole.completion_mask, rows.completion_mask)
        np.testing.assert_allclose(whole.logprobs, rows.logprobs, atol=1e-4)


def test_groups_are_taken_in_the_order_of_admission_and_none_is_lost(tmp_path):
    _, collector, state = open_collector(tmp_path)
    order = data.indices(0, 0, 4 * 6 + 4, 40).tolist()
    learned = []
    for step in range(6):
        draw, state = collector.collect(state.replace(step=jnp.int32(step)), lambda *_: None)
        taken = [order.index(index) for index in draw.chosen.indices]
        assert taken == sorted(taken)  # the first complete ones, in order
        learned += taken
        under_way = [order.index(group.index) for group in state.pending.value.groups]
        assert under_way == sorted(under_way)
        assert sorted(learned + under_way) == list(range(4 * (step + 1) + 4))  # admitted = learned + under way
        complete = [group.complete for group in state.pending.value.groups]
        # a complete group that waits was admitted behind all that were taken
        assert all(place > max(taken) for place, done in zip(under_way, complete, strict=True) if done)
        rewarded = draw.finish_rewards()
        assert np.isfinite(rewarded.rewards).all() and (rewarded.lengths > 0).all()
    assert draw.counts['carried_rows'] > 0 and draw.counts['prefilled_again'] > 0
    assert draw.stats.peak_bytes >= collector.engine.schedule.opening_bytes


def test_the_next_completions_are_sampled_before_the_rewards_of_the_last_ones_are_there(tmp_path, monkeypatch):
    _, collector, state = open_collector(tmp_path, collection__staleness=1)
    waited, results = [], RewardStream.results
    monkeypatch.setattr(RewardStream, 'results', lambda stream: waited.append(stream) or results(stream))
    draws, state = collect_steps(collector, state, 2)
    assert not waited
    for draw in draws:
        assert np.isfinite(draw.finish_rewards().rewards).all()
    assert len(waited) == 2
    state.pending.pack()
    assert len(waited) == 3


def test_an_old_group_is_finished_before_a_step_ends(tmp_path):
    _, collector, state = open_collector(tmp_path, collection__max_age=1)
    draws, state = collect_steps(collector, state, 5)
    assert max(draw.counts['group_age_most'] for draw in draws) == 1
    assert all(group.since == 4 for group in state.pending.value.groups if not group.complete)


def test_four_devices_take_the_same_groups_as_one(tmp_path):
    taken = {}
    for devices in (1, 4):
        _, collector, state = open_collector(tmp_path / str(devices), mesh__data=devices)
        draws, _ = collect_steps(collector, state, 3)
        taken[devices] = [(draw.chosen.indices.tolist(), jax.device_get(draw.rollout.tokens)) for draw in draws]
    for (one, tokens), (four, other) in zip(taken[1], taken[4], strict=True):
        assert one == four
        np.testing.assert_array_equal(tokens, other)


def test_draws_are_sampled_ahead_by_the_policy_of_the_schedule(tmp_path):
    _, collector, state = open_collector(tmp_path, collection__in_flight=0, collection__staleness=2)
    draws, state = collect_steps(collector, state, 4)
    versions = [np.unique(draw.rollout.version[draw.rollout.completion_mask]).tolist() for draw in draws]
    assert versions == [[0], [0], [0], [1]]
    waiting = state.pending.value.draws
    assert len(waiting) == 2
    _, plain, first = open_collector(tmp_path / 'plain', collection__in_flight=0)
    alike, _ = collect_steps(plain, first, 4)  # the noise is that of the step that learns from it
    for draw, other in zip(draws, alike, strict=True):
        np.testing.assert_array_equal(draw.rollout.tokens, other.rollout.tokens)


@pytest.mark.parametrize(
    'changes, named',
    [
        (dict(algorithm__correction='none'), 'add --config.algorithm.correction=truncated'),
        (dict(collection__source='reference'), 'collection.source'),
        (dict(learner__old_logprobs='decode', collection__in_flight=0, collection__staleness=1), 'old_logprobs'),
        (dict(rollout__cache_gib=1e-5), 'collection.in_flight'),
        (dict(mesh__data=4, collection__in_flight=6), 'collection.in_flight'),
    ],
    ids=['no correction', 'another source', 'decode', 'no room', 'devices'],
)
def test_what_cannot_be_carried_is_refused(changes, named, tmp_path):
    with pytest.raises(BadInput, match=named):
        open_collector(tmp_path, **changes)


def test_dead_groups_give_their_places_to_later_prompts_and_unfinished_ones_go_on(tmp_path):
    # a digit that few completions begin with, so that about half of the groups are dead
    (tmp_path / 'mine.py').write_text("def sevens(completion, example):\n    return float('7' in completion[:4])\n")
    changes = dict(
        collection__dead_groups='resample', collection__max_draws=4, reward__verifier='',
        reward__parts=((f'{tmp_path}/mine.py:sevens', 1.0),),
        data__options={'digits': 2, 'count': 400, 'blurts': 0.5, 'wrong': 0.5},
    )  # fmt: skip
    run, collector, state = open_collector(tmp_path / 'run', **changes)
    places = {example.id: index for index, example in enumerate(open_splits(run).train.examples)}
    order, learned, draws = data.indices(0, 0, 200, 400).tolist(), [], []
    for step in range(3):
        before = int(state.aux['position'])
        draw, state = collector.collect(state.replace(step=jnp.int32(step)), lambda *_: None)
        draws.append(draw.counts['draws'])
        assert int(state.aux['position']) - before == 4 * draws[-1] + 4 * (step == 0)  # each draw admits P
        rewarded = draw.finish_rewards().rewards.reshape(4, 4)
        alive = (rewarded != rewarded[:, :1]).any(1)
        assert alive.all() or draws[-1] == 4
        assert alive.tolist() == sorted(alive, reverse=True)
        learned += [order.index(places[example.id]) for example in draw.examples]
        under_way = [group.index for group in state.pending.value.groups]
        assert len(under_way) == 4 and not {*under_way} & {order[place] for place in learned[-4:]}
    assert max(draws) > 1 and len(learned) == len({*learned})


def test_a_changed_shape_is_refused_and_a_branch_draws_again_what_was_under_way(tmp_path):
    config = tiny_run.config(steps=2, **CARRIED)
    train.run(config, str(tmp_path / 'run'))
    before = (tmp_path / 'run' / 'config.json').read_text()
    assert not [*provenance.verify(str(tmp_path / 'run'))]  # bytes have the digest that they were saved with
    config.rollout.max_tokens, config.steps = 32, 3
    for start in (train.check, train.run):
        with pytest.raises(BadInput, match=r'^--amend = .*are under way in the checkpoint'):
            start(config, str(tmp_path / 'run'), steering=Steering(amend=True))
    assert (tmp_path / 'run' / 'config.json').read_text() == before
    recorded = checkpoint.recorded_pending(checkpoint.path_of(str(tmp_path / 'run'), 2))
    assert list(recorded) == ['carried']
    state = train.run(config, str(tmp_path / 'run'), steering=Steering(branch=str(tmp_path / 'branch')))
    # the third step admits 4 + 4 prompts from the oldest one that was under way
    assert int(state.aux['position']) < 4 * 2 + 4 + 8


def test_a_branch_drops_the_groups_that_draws_sampled_ahead_have_kept(monkeypatch):
    monkeypatch.setattr(checkpoint, 'recorded_pending', lambda path: {'0': None})
    monkeypatch.setattr(checkpoint, 'read_tree', lambda path, abstract, partial: abstract)
    monkeypatch.setattr(pending, 'oldest_position', lambda under_way: 5)
    kept = {'since': jnp.array([1, 2, 3, 0]), 'filled': jnp.array([1, 1, 1, 0])}
    state = TrainState(jnp.int32(2), {}, None, None, {'position': jnp.int32(9), 'kept': kept})
    aux = branch.draw_pending_again(state, '', set()).aux
    assert int(aux['position']) == 5 and aux['kept']['filled'].tolist() == [1, 0, 0, 0]


def test_ages_count_from_the_step_in_which_a_draw_ahead_was_sampled(tmp_path):
    _, collector, state = open_collector(tmp_path, collection__staleness=2)
    draws, _ = collect_steps(collector, state, 4)
    assert [draw.counts['token_age_most'] for draw in draws[:3]] == [0, 1, 2]  # by the first policy
    assert draws[3].counts['token_age_most'] >= 2


@pytest.mark.parametrize(
    'changes',
    [
        dict(),
        dict(collection__in_flight=0, collection__staleness=1),
        dict(collection__staleness=2, collection__retire_above=0.5),
        dict(collection__in_flight=0, collection__staleness=1, preset='dapo', collection__max_draws=2),
        dict(collection__dead_groups='resample', collection__max_draws=3, collection__max_staleness=1),
        dict(collection__dead_groups='replay', collection__max_staleness=3, collection__staleness=1),
    ],
    ids=['carried', 'stale', 'both', 'resampled', 'resampled and carried', 'replayed, carried and stale'],
)
def test_a_resumed_run_is_the_same(changes, tmp_path, request):
    if 'collection__retire_above' not in changes:  # that case has carried rows and waiting draws
        request.getfixturevalue('long')
    config = tiny_run.config(steps=6, **CARRIED | changes)
    straight = train.run(config, str(tmp_path / 'straight'))
    for config.steps in (2, 4, 6):
        resumed = train.run(config, str(tmp_path / 'parts'))
    assert tiny_run.rows(tmp_path / 'parts') == tiny_run.rows(tmp_path / 'straight')
    jax.tree.map(np.testing.assert_array_equal, straight.replace(pending=None), resumed.replace(pending=None))
    jax.tree.map(np.testing.assert_array_equal, straight.pending.pack(), resumed.pending.pack())


def test_what_takes_how_long_changes_nothing(tmp_path, monkeypatch):
    # rewards and checkpoints sleep at random, differently in each run
    save = checkpoint.save

    def run(name, moments):
        def slow(completion, example):
            time.sleep(moments.uniform(0, 0.05))
            return float('8' in completion)

        def save_late(*arguments):
            time.sleep(moments.uniform(0, 0.3))
            return save(*arguments)

        monkeypatch.setattr(checkpoint, 'save', save_late)
        changes = dict(collection__staleness=1, reward__parts=(('slow', 1.0),), reward__verifier='')
        config = tiny_run.config(steps=5, **CARRIED | changes)
        state = train.run(config, str(tmp_path / name), functions={'slow': slow})
        return state.params, tiny_run.rows(tmp_path / name)

    (one, rows), (other, others) = (run(str(seed), np.random.default_rng(seed)) for seed in (1, 2))
    assert rows == others
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_an_outage_does_not_last_in_what_it_has_left_under_way(tmp_path):
    changes, away = dict(collection__in_flight=0, collection__staleness=1), []

    def mine(completion, example):
        if away:
            raise KeyError('the service is away')
        return float('8' in completion)

    config = tiny_run.config(steps=3, checkpoint__every=100, reward__retries=0, **CARRIED | changes)
    config.reward.parts, config.reward.verifier = (('mine', 1.0),), ''
    with pytest.raises(rewards.RewardsMissing):  # in step 2, whose completions are sampled in step 1
        train.run(config, str(tmp_path), functions={'mine': mine}, on_step=lambda step, row: away.append(step))
    assert checkpoint.steps(str(tmp_path)) == [2]
    away.clear()
    train.run(config, str(tmp_path), functions={'mine': mine})
    assert [row['reward_missing'] for row in tiny_run.rows(tmp_path)] == [0, 0, 0]


@pytest.mark.parametrize('in_flight', [0, 4])
def test_a_reward_that_ends_the_run_loses_no_step_that_was_finished(in_flight, tmp_path, monkeypatch):
    """Its completions wait unjudged in the checkpoint, and are judged by the run that goes on."""
    changes, spent, results = dict(collection__in_flight=in_flight, collection__staleness=1), [], RewardStream.results

    def wait(stream):
        if spent and stream._reward_functions.step >= 3:
            raise BadInput('reward.options.judge.most_calls', 3, 'is spent; raise it')
        return results(stream)

    def train_in(workdir, **options):
        config = tiny_run.config(steps=6, checkpoint__every=100, **CARRIED | changes)
        return train.run(config, str(tmp_path / workdir), **options)

    monkeypatch.setattr(RewardStream, 'results', wait)
    with pytest.raises(BadInput, match='is spent'):
        train_in('stopped', on_step=lambda step, row: spent.append(step))
    assert checkpoint.steps(str(tmp_path / 'stopped')) == [3]
    path = checkpoint.path_of(str(tmp_path / 'stopped'), 3)
    saved = checkpoint.read_tree(path, {'pending': checkpoint.recorded_pending(path)}, partial=True)['pending']
    data_set = open_splits(open_run(tiny_run.config(**CARRIED), str(tmp_path / 'none'))).train
    for packed in saved.values():  # of step 3, and the groups that go on
        groups = pending.unpack_groups(packed, data_set, 0)[0]
        assert any((pending.ended_rows(group.rollout) & ~group.judged).any() for group in groups)
    spent.clear()
    states = [train_in(name) for name in ('stopped', 'straight')]
    assert tiny_run.rows(tmp_path / 'stopped') == tiny_run.rows(tmp_path / 'straight')
    jax.tree.map(np.testing.assert_array_equal, *[state.replace(pending=None) for state in states])
    jax.tree.map(np.testing.assert_array_equal, *[state.pending.pack() for state in states])


def test_rewards_that_an_outage_has_left_under_way_are_computed_again_by_the_step_that_learns(tmp_path, monkeypatch):
    away, asked, judge = [], [], Drawer.judge

    def mine(completion, example):
        if away and len(completion) < 20:
            raise KeyError('the service is away')
        return float('8' in completion)

    def judge_again(drawer, examples, rollout, step):
        asked.append((len(examples), step))
        return judge(drawer, examples, rollout, step)

    monkeypatch.setattr(Drawer, 'judge', judge_again)
    config = tiny_run.config(reward__retries=0, reward__most_missing=0.99, **CARRIED)
    config.reward.parts, config.reward.verifier, functions = (('mine', 1.0),), '', {'mine': mine}
    config.steps = 3  # in steps 1 and 2 no short completion is rewarded
    changing = {0: lambda: away.append(0), 1: lambda: None, 2: away.clear}
    train.run(config, str(tmp_path), functions=functions, on_step=lambda step, row: changing[step]())
    assert tiny_run.rows(tmp_path)[2]['reward_missing'] > 0.1 and not asked
    config.steps, config.reward.most_missing = 5, 0.0
    train.run(config, str(tmp_path), functions=functions)
    assert [row['reward_missing'] for row in tiny_run.rows(tmp_path)[3:]] == [0, 0]
    assert asked and set(asked) <= {(4, 3), (4, 4)}  # all P groups of the step, by its number


@pytest.mark.parametrize('in_flight', [0, 4])
def test_a_run_that_begins_at_a_later_step_has_sampled_nothing_before(in_flight, tmp_path):
    # as a branch does, and a run whose data has changed
    _, collector, state = open_collector(tmp_path, collection__in_flight=in_flight, collection__staleness=2)
    for step, oldest in zip(range(5, 9), (5, 5, 5, 5 if in_flight else 6), strict=True):
        draw, state = collector.collect(state.replace(step=jnp.int32(step)), lambda *_: None)
        version = jax.device_get(draw.rollout.version)[jax.device_get(draw.rollout.completion_mask)]
        assert version.min() == oldest and version.max() <= step
        assert not in_flight or draw.counts['token_age_most'] == step - oldest >= draw.counts['group_age']
        state = state.replace(pending=state.pending.pack())  # what begins is remembered


def test_a_branch_counts_ages_from_its_first_step(tmp_path):
    config = tiny_run.config(steps=2, **CARRIED | dict(collection__in_flight=0, collection__staleness=1))
    train.run(config, str(tmp_path / 'run'))
    config.steps = 5
    train.run(config, str(tmp_path / 'run'), steering=Steering(branch=str(tmp_path / 'branch')))
    assert [row['staleness'] for row in tiny_run.rows(tmp_path / 'branch')] == [0, 1, 1]
