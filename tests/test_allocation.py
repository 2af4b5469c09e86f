"""Groups of several sizes: who gets completions, by hand and in a run, and what is learned from them."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import algorithms, train
from grpo_jax.algorithms import Grouping, weights
from grpo_jax.collect import allocate, xrpo
from grpo_jax.data.prompt_format import PromptFormat
from grpo_jax.errors import BadInput
from grpo_jax.learner.experience import make_experience
from grpo_jax.rewards import Rewards
from grpo_jax.run.open import open_run
from grpo_jax.sampler import row_keys
from grpo_jax.sharding import mesh as meshes
from grpo_jax.types import Example, Rollout, TrainState
from tests import tiny_run

SPREAD = {
    'pass_rate': dict(collection__allocation='pass_rate', rollout__group_size=12),
    'seeding': dict(
        collection__allocation='uncertainty',
        collection__exploration=0.1,
        collection__seeding=2,
        data__max_prompt_tokens=40,
    ),
}
SHORT = dict(
    steps=3,
    optimizer__learning_rate=1e-3,
    data__prompts_per_step=4,
    rollout__group_size=6,
    checkpoint__every=1,
    data__options={'digits': 1, 'count': 6, 'blurts': 0.5, 'wrong': 0.5},  # so few that steps see them again
)


def even(completion, example):
    """Of every third example, whether an even digit occurs, as in half of a random model's completions; else an 8."""
    return float(any(digit in completion for digit in ('02468' if example.id % 3 == 0 else '8')))


@pytest.fixture
def some_right(monkeypatch):
    monkeypatch.setattr('grpo_jax.rewards.numeric.reward', even)


def spread_config(name, **changes):
    return tiny_run.config(preset='grpo', reward__self_test=1.0, **SHORT | SPREAD[name] | changes)


def test_a_grouping_puts_rows_side_by_side_and_back():
    grouping = Grouping.by_ids(np.array([7, 3, 7, 7]))
    assert grouping.sizes.tolist() == [1, 3]
    spread = grouping.spread(np.array([1.0, 2, 3, 4]), -1)
    assert spread.tolist() == [[2, -1, -1], [1, 3, 4]]
    assert grouping.spread(np.ones(4, bool)).tolist() == [[True, False, False], [True, True, True]]
    assert grouping.gather(spread).tolist() == [1, 2, 3, 4]
    assert [rows.tolist() for rows in grouping.rows_by_size()] == [[[1]], [[0, 2, 3]]]


def test_the_chance_of_contrast_is_that_of_a_pass_rate_of_which_hits_and_misses_are_known():
    # Beta(1, 1): E[p^n] = 1 / (n + 1); Beta(1, 3): E[(1 - p)^2] = 3/5, E[p^2] = 2 / (4 * 5)
    new, missed_twice = allocate.contrast_chance(np.array([0, 0]), np.array([0, 2]), np.array([4, 2]))
    assert new == pytest.approx(1 - 2 / 5)
    assert missed_twice == pytest.approx(1 - 3 / 5 - 1 / 10)


def test_a_budget_goes_to_prompts_whose_groups_may_differ():
    # seldom right, half right, never right in 40, always right in 40
    hits, tries = np.array([1, 4, 0, 40]), np.array([8, 8, 40, 40])
    sizes = allocate.spread_by_pass_rate(hits, tries, 32, 2)
    assert sizes.tolist() == [12, 8, 6, 6]

    def value(sizes):
        return allocate.contrast_chance(hits, tries, np.array(sizes)).sum()

    others = (
        (2 * a, 2 * b, 2 * c, 32 - 2 * (a + b + c)) for a in range(1, 13) for b in range(1, 13) for c in range(1, 13)
    )
    assert value(sizes) == max(value(other) for other in others if min(other) >= 2)


def test_priorities_are_those_of_the_paper():
    # t(0.975) of 1, 2 and 3 degrees of freedom: 12.7062, 4.3027, 3.1824
    stds, sizes = np.array([math.sqrt(0.5), 0.0]), np.array([2, 4])
    assert allocate.half_widths(stds, sizes) == pytest.approx([12.7062 * math.sqrt(0.5) / math.sqrt(2), 0], abs=1e-4)
    bonus = [math.sqrt(math.log(7) / 2), math.sqrt(math.log(7) / 4)]
    one = 12.7062 * 0.5 - 4.3027 * math.sqrt(0.5 / 3)
    assert allocate.priorities(stds, sizes, 1, 1.0) == pytest.approx([one + bonus[0], bonus[1]], abs=1e-3)
    two = 12.7062 * 0.5 - 3.1824 * math.sqrt(0.5 / 4)
    assert allocate.priorities(stds, sizes, 2, 0.5) == pytest.approx([two + bonus[0] / 2, bonus[1] / 2], abs=1e-3)


class Part:
    """What `explore` reads of a select.Group."""

    def __init__(self, values):
        self.rewarded = Rewards(None, None, None, np.array(values), None, None, None)


def test_rounds_go_where_uncertainty_is_and_number_the_completions_of_a_prompt():
    outcomes = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    asked = []

    def draw(carry, owners, first, parts):
        asked.append((owners.tolist(), first.tolist()))
        return [Part(outcomes[owner]) for owner in owners], carry + 1

    parts, rounds = allocate.explore(draw, 0, 3, 3, 2, 0.1)
    assert rounds == len(asked)
    assert asked[0] == ([0, 1, 2], [0, 0, 0])
    # the first unit takes 5.2 off prompt 0; a second and a third 0.3 and 0.1, where the bonus of others is 0.1
    assert asked[1] == ([0, 0, 1], [2, 4, 0 + 2]) or asked[1] == ([0, 0, 0], [2, 4, 6])
    for owner in range(3):
        numbers = sorted(
            first for owners, firsts in asked for other, first in zip(owners, firsts, strict=True) if other == owner
        )
        assert numbers == list(range(0, 2 * len(parts[owner]), 2))
    assert sum(map(len, parts)) == 9


def test_the_noise_of_a_sample_hangs_on_its_number_and_not_on_the_part_that_has_it():
    def data(*arguments):
        return jax.random.key_data(row_keys(jax.random.key(3), jnp.int32(5), *arguments)).tolist()

    whole = data(jnp.array([9]), 6)
    assert data(jnp.array([9, 9]), 2, jnp.array([4, 2])) == [*whole[4:6], *whole[2:4]]


REWARDS = np.array([1.0, 0, 0, 0, 1, 1])  # groups of 4 and 2
HAND = {
    'grpo': [1.5, -0.5, -0.5, -0.5, 0, 0],  # (r - 1/4) / std, std(ddof 1) 1/2; the second group is dead
    'rloo': [1.0, -1 / 3, -1 / 3, -1 / 3, 0, 0],
    'dr_grpo': [0.75, -0.25, -0.25, -0.25, 0, 0],
}


@pytest.mark.parametrize('preset', HAND)
def test_the_estimator_of_unequal_groups_equals_the_hand_numbers(preset):
    from grpo_jax.configs import default

    method = algorithms.make(default.get_config(preset).algorithm)
    grouping, ones = Grouping.by_sizes(np.array([4, 2])), np.ones((6, 3), bool)
    rollout = Rollout(
        tokens=jnp.zeros((6, 5), jnp.int32),
        prompt_mask=jnp.ones((6, 2), bool),
        completion_mask=jnp.asarray(ones),
        forced=jnp.asarray(~ones),
        logprobs=jnp.zeros((6, 3)),
        truncated=jnp.zeros(6, bool),
        version=jnp.zeros((6, 3), jnp.int32),
    )
    state = TrainState(
        jnp.int32(0), {}, None, None, {'coefficients': method.coefficients, 'initial_entropy': jnp.float32(np.nan)}
    )
    rewards, scored = (
        grouping.spread(REWARDS, np.nan),
        dict.fromkeys(('old_logprobs', 'ref_logprobs'), jnp.zeros((6, 3))),
    )
    inputs = {'dead': algorithms.judge_groups('outcome', rewards, rewards), 'correct': rewards}
    experience, row = make_experience(method, state, rollout, scored, rewards, inputs, meshes.make({}), grouping)
    assert np.asarray(experience.advantages)[:, 0] == pytest.approx(HAND[preset], abs=1e-5)
    assert np.asarray(experience.group_ids).tolist() == [0, 0, 0, 0, 1, 1]
    assert np.asarray(experience.correct).tolist() == REWARDS.tolist()
    assert row['reward'] == 0.5 and row['dead_groups'] == 0.5 and row['unscorable'] == 0
    assert row['groups_mixed'] == 0.5 and row['groups_all_right'] == 0.5


def test_a_completion_counts_alike_by_sequence_mean_and_a_prompt_by_prompt_mean():
    mask, group_ids = jnp.ones((6, 3), bool), jnp.array([0, 0, 0, 0, 1, 1])
    assert np.asarray(weights.sequence_mean(mask).sum(1)) == pytest.approx([1 / 6] * 6)
    assert np.asarray(weights.prompt_mean(mask, group_ids).sum(1)) == pytest.approx([1 / 8] * 4 + [1 / 4] * 2)


def read_rollouts(workdir):
    with open(workdir / 'rollouts' / '000000.jsonl', encoding='utf8') as lines:
        return [json.loads(line) for line in lines]


def check_resumed(config, tmp_path):
    """The metrics of a run, which are those of one that was stopped after two steps."""
    straight = train.run(config, str(tmp_path / 'straight'))
    steps, config.steps = config.steps, 2
    train.run(config, str(tmp_path / 'parts'))
    config.steps = steps
    jax.tree.map(np.testing.assert_array_equal, straight, train.run(config, str(tmp_path / 'parts')))
    rows = tiny_run.rows(tmp_path / 'straight')
    assert tiny_run.rows(tmp_path / 'parts') == rows
    return rows


def test_a_run_gives_most_to_prompts_whose_groups_may_differ_and_a_resumed_one_the_same(tmp_path, some_right):
    rows = check_resumed(spread_config('pass_rate'), tmp_path)
    assert {row['seeded'] for row in rows} == {0}
    assert rows[0]['group_size_most'] == 12 == rows[0]['group_size_least']  # nothing is known of them yet
    assert rows[-1]['group_size_most'] > 12 > rows[-1]['group_size_least']


def test_unsolved_prompts_are_asked_again_behind_solved_ones_and_a_resumed_run_does_the_same(tmp_path, some_right):
    rows = check_resumed(spread_config('seeding', seed=2), tmp_path)  # of which some are right
    assert any(row['group_size_most'] > 6 > row['group_size_least'] for row in rows)
    assert sum(row['seeded'] for row in rows) > 0
    written = read_rollouts(tmp_path / 'straight')
    assert len(written) == 24
    plain = [row['prompt'].split('\n')[-1] for row in written]
    right = {prompt + row['completion'] for prompt, row in zip(plain, written, strict=True) if row['correct']}
    asked = {example: [row for row in written if row['id'] == example] for example in {row['id'] for row in written}}
    seeded = [row for row in written if '\n' in row['prompt']]
    assert len(asked) == 4 and len(seeded) == rows[0]['seeded'] > 0
    for row in seeded:
        *exemplars, own = row['prompt'].split('\n')
        assert set(exemplars) <= right
        first = asked[row['id']][:2]  # which were asked plainly, and are wrong
        assert all(one['prompt'] == own and not one['correct'] for one in first)


def test_mesh_and_microbatches_change_nothing(long, tmp_path, some_right):
    cuts = {
        'alone': {},
        'cut': dict(mesh__data=2, learner__microbatches=2),
        'packed': dict(learner__pack_columns=64),
        'padded': dict(learner__pack_columns=0),
    }
    states = {name: train.run(spread_config('pass_rate', **cut), str(tmp_path / name)) for name, cut in cuts.items()}
    alone = tiny_run.rows(tmp_path / 'alone')
    for name in ('cut', 'packed', 'padded'):
        for row, expected in zip(tiny_run.rows(tmp_path / name), alone, strict=True):
            for key in ('group_size_least', 'group_size_most', 'reward', 'dead_groups', 'length'):
                assert row[key] == pytest.approx(expected[key], abs=1e-6)
        for one, other in zip(*(jax.tree.leaves(states[key].params) for key in (name, 'alone')), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)  # a tenth of what Adam moves in a step
        np.testing.assert_array_equal(states[name].aux['hits'], states['alone'].aux['hits'])


@pytest.mark.parametrize(
    ('changes', 'named'),
    [
        (dict(collection__allocation='evenly'), ['collection.allocation', 'pass_rate']),
        (dict(collection__allocation_unit=5), ['allocation_unit = 5', 'rollout.group_size = 12']),
        (dict(collection__allocation_unit=12), ['allocation_unit = 12', 'smaller']),
        (dict(collection__allocation_unit=1), ['allocation_unit = 1']),
        (dict(collection__seeding=1), ['collection.seeding', "allocation='uncertainty'"]),
        (dict(collection__dead_groups='resample'), ['collection.allocation', 'resample']),
        (dict(collection__source='demonstrations'), ['collection.allocation', 'demonstrations']),
        (dict(algorithm__weights='prompt_mean', learner__minibatches=2), ['learner.minibatches = 2', 'prompt_mean']),
        (dict(learner__old_logprobs='decode'), ['learner.old_logprobs', 'collection.allocation']),
    ],
)
def test_what_groups_of_several_sizes_do_not_go_with_is_refused(changes, named, tmp_path):
    with pytest.raises(BadInput) as refused:
        open_run(spread_config('pass_rate', **changes), str(tmp_path / 'run'))
    assert all(word in str(refused.value) for word in named), str(refused.value)
    assert not (tmp_path / 'run').exists()


def test_exemplars_are_turns_of_a_chat_behind_its_system_message(monkeypatch):
    rendered = []
    monkeypatch.setattr(
        xrpo, 'encode_prompt', lambda tokenizer, text, form, messages: rendered.append((text, messages)) or [1, 2, 3]
    )
    form = PromptFormat(chat=True, system='Answer.', template='Q: {prompt}')
    solved = xrpo.Solved(Example('1+1', '2', 0, {}), [7], 'It is 2')
    example = Example('2+2', '4', 1, {})
    seeded, tokens = xrpo.add_exemplars(None, form, example, [solved], 3)
    roles = [(message['role'], message['content']) for message in seeded.messages]
    assert roles == [('system', 'Answer.'), ('user', 'Q: 1+1'), ('assistant', 'It is 2'), ('user', 'Q: 2+2')]
    assert rendered[0][0] == 'Q: 2+2' and tokens == [1, 2, 3] and seeded.prompt == '2+2'
    assert xrpo.add_exemplars(None, form, example, [solved], 2) is None  # too long


def test_the_nearest_prompt_stands_last():
    many = [xrpo.Solved(Example(str(i), '', i, {}), tokens, '') for i, tokens in enumerate(([1, 2], [1, 2, 3], [9]))]
    assert [one.example.id for one in xrpo.find_nearest(many, [1, 2, 3, 4], 2)] == [0, 1]
