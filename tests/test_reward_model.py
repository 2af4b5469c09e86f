"""Reward models: losses and figures by hand, what they learn, folders that rewards load, and exact resumption."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import data, reward_model, statistics
from grpo_jax.errors import BadInput
from grpo_jax.learner import Learning, build_optimizer
from grpo_jax.learner.programs import make_reward_learner
from grpo_jax.learner.reward_model import labelled, pairwise
from grpo_jax.models import hf
from grpo_jax.rewards import model, process
from grpo_jax.run.open import make_policy, open_config, open_split
from grpo_jax.run.settings import RewardModelOptions
from grpo_jax.sharding import batches
from grpo_jax.types import Example
from tests import small_model, tiny_run

STEPS = dict(
    data__name='arithmetic_steps',
    reward_model__objective='steps',
    reward_model__separator=' ',
    supervised__updates=6,
    supervised__optimizer__warmup=0,
    evaluation__prompts=12,
)
OPTIONS = dict(dtype='float32', batch=8, device=0, park=True)


@pytest.fixture(scope='module', autouse=True)
def small(tmp_path_factory):
    STEPS['model__path'] = small_model.write(tmp_path_factory.mktemp('small'))


def config(**changes):
    made = tiny_run.config(**STEPS | changes)
    if made.data.name == 'arithmetic_steps':
        made.data.options = {'digits': 1, 'count': 40, 'blurts': 0.3, 'wrong': 0.5, 'slips': 0.5}
    return made


def letters(folder, count=96):
    """Pairs of completions of which the better one holds an a, as a run's rollouts."""
    rng, rows = np.random.default_rng(0), []
    for i in range(count):
        good, bad = (list(rng.choice(list('bcd'), 4)) for _ in range(2))
        good[rng.integers(4)] = 'a'
        rows += [
            {'prompt': f'{i}=', 'answer': '', 'completion': ''.join(text), 'reward': reward}
            for text, reward in ((good, 1.0), (bad, 0.0))
        ]
    (folder / '000000.jsonl').write_text('\n'.join(map(json.dumps, rows)), encoding='utf8')
    return {'folder': str(folder), 'least': 1.0}


def read(run, objective, split):
    """The labelled examples of a Run's split."""
    settings, tokenizer = run.settings, run.model.tokenizer
    most, name = settings.sampling.max_tokens, settings.data.name
    return reward_model.read_labelled(open_split(run, split), objective, tokenizer, settings.reward_model, most, name)


# losses


def test_losses_by_hand():
    mask = jnp.array([[True, False], [False, True]])
    pair = pairwise(jnp.array([[1.0, 9.0], [9.0, 0.5]]), None, mask)
    np.testing.assert_allclose(pair, [[0.474077], [0.474077]], rtol=1e-5)  # -log sigmoid(0.5)
    losses = labelled(jnp.array([[0.0, 2.0, -1.0]]), jnp.array([[1.0, 0.0, 0.25]]), None)
    # ln 2; log(1 + e^2); -(0.25 log sigmoid(-1) + 0.75 log sigmoid(1))
    np.testing.assert_allclose(losses, [[0.693147, 2.126928, 0.563262]], rtol=1e-5)


def test_microbatches_change_nothing_and_part_no_pair(tmp_path):
    made = config(reward_model__objective='pairwise', data__name='rollouts')
    made.data.options = letters(tmp_path)
    run, objective = open_config(made, str(tmp_path / 'run')), reward_model.OBJECTIVES['pairwise']
    shapes, pad_token = run.settings.shapes(8, objective.completions), run.settings.sampling.pad_token
    examples = read(run, objective, 'train')
    batch = batches.put_rows(reward_model.labelled_batch(examples, np.arange(8), shapes, pad_token), run.mesh)
    updated = []
    for microbatches, remat, offload in ((1, 'none', ()), (4, 'dots', ('optimizer',))):
        learning = Learning(microbatches=microbatches, remat=remat, offload=frozenset(offload))
        optimizer = build_optimizer(run.settings.supervised.optimizer, 1)
        learner = make_reward_learner(run.model.config, objective.loss, optimizer, run.mesh, shapes, learning)
        state = learner.initial(make_policy(run))
        # a head of zeros sends no gradient to the decoder
        state = state.replace(params=state.params | {'value_head': jnp.linspace(-0.1, 0.1, run.model.config.width)})
        updated.append(jax.device_get(learner.update(state, batch)[1]))
    metrics, again = updated
    assert metrics['loss'] == pytest.approx(again['loss'], abs=1e-6)
    assert metrics['grad_norm'] == pytest.approx(again['grad_norm'], rel=1e-5) and metrics['grad_norm'] > 1e-3


# figures


def test_figures_by_hand():
    train = [(np.zeros(2), np.array([1.0, 0.0])), (np.array([2.0]), np.array([1.0])), (np.zeros(1), np.array([1.0]))]
    test = [
        (np.array([3.0, -1.0]), np.array([1.0, 0.0])),
        (np.array([-2.0, -3.0]), np.array([1.0, 0.0])),
        (np.array([1.0]), np.array([0.0])),
    ]
    results = reward_model.judge(train, test, 'steps')
    # train says right (3 of 4 labels), and wrong at the second step
    assert results['examples'] == 3 and results['labels'] == 5 and results['wrong'] == 3
    assert results['accuracy'] == pytest.approx(3 / 5) and results['majority'] == pytest.approx(2 / 5)
    assert results['position'] == pytest.approx(4 / 5)
    assert results['over_majority'] == pytest.approx(1 / 5) and results['over_position'] == pytest.approx(-1 / 5)
    # -1, -2 and -3 are called wrong, two of them rightly
    assert (results['wrong_precision'], results['wrong_recall']) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert results['auc'] == pytest.approx((3 + 1) / 6)  # 3 beats -1, -3 and 1; -2 beats -3
    assert results['train_mean'] == pytest.approx(0.5) and results['train_std'] == pytest.approx(0.75**0.5)
    # by example: +1, 0 and 0 of 2, 2 and 1 labels
    assert results['over_majority_low'] == 0 and results['over_majority_high'] == pytest.approx(1 / 2)


def test_figures_of_pairs_by_hand():
    test = [(np.array([s, t]), np.array([1.0, 0.0])) for s, t in [(1, 0), (-1, -2), (0, 0), (3, 4)]]
    results = reward_model.judge(test, test, 'pairwise')
    assert results['accuracy'] == 0.5 and results['majority'] == 0.5 and results['over_majority'] == 0
    assert results['auc'] == pytest.approx((3 + 1 + (1 + 0.5 + 0.5) + 3) / 16)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=2, max_size=12))
@settings(max_examples=100, deadline=None)
def test_auc_is_the_chance_that_a_right_one_scores_higher(rows):
    values, right = np.array([v for v, _ in rows], float), np.array([r for _, r in rows])
    pairs = [(a > b) + 0.5 * (a == b) for a in values[right] for b in values[~right]]
    area = statistics.auc(values, right)
    assert area == (pytest.approx(np.mean(pairs)) if pairs else None)


# data


def test_what_follows_the_first_wrong_step_is_masked_or_wrong():
    tokenizer = hf.load_tokenizer('configs/models/characters')
    example = Example('1+2=', '3', 0, {'steps': ['1+2=4', '5', '6'], 'labels': [1.0, 0.0, None]})
    for after_error, labels in [('masked', [1.0, 0.0]), ('wrong', [1.0, 0.0, 0.0])]:
        (row,), (marks,) = reward_model.OBJECTIVES['steps'].encode(
            example, tokenizer, RewardModelOptions('steps', ' ', 0.1, after_error)
        )
        assert [label for _, label in marks] == labels
        assert tokenizer.decode(row) == '1+2=4 5 6 '
        texts = [tokenizer.decode(row[: place + 1]) for place, _ in marks]
        assert texts == ['1+2=4 ', '1+2=4 5 ', '1+2=4 5 6 '][: len(labels)]


def test_a_whole_completion_is_labelled_at_its_stop_token():
    tokenizer, stop = hf.load_tokenizer('configs/models/characters'), 1
    example = Example('1+2=', '3', 0, {'demonstration': '3', 'rejected': '40', 'label': 0.25})
    good, bad = tokenizer.encode('3'), tokenizer.encode('40')
    encode = {name: reward_model.OBJECTIVES[name].encode for name in ('pairwise', 'pointwise')}
    assert encode['pairwise'](example, tokenizer, {}) == ([[*good, stop], [*bad, stop]], [[(1, 1.0)], [(2, 0.0)]])
    assert encode['pointwise'](example, tokenizer, {}) == ([[*good, stop]], [[(1, 0.25)]])


@pytest.mark.parametrize(
    ('meta', 'words'),
    [
        ({'steps': ['1 + 1', '2'], 'labels': [1, 1]}, 'separator'),
        ({'steps': [' ', '2'], 'labels': [1, 1]}, 'blank'),
        ({'steps': ['1', '2'], 'labels': [1.0]}, 'one for each of 2'),
        ({'steps': ['1'], 'labels': [2]}, 'lie in'),
        ({'steps': ['1'], 'labels': ['yes']}, 'lie in'),
    ],
)
def test_labels_that_do_not_fit_are_refused(meta, words):
    with pytest.raises(BadInput, match=words):
        reward_model.OBJECTIVES['steps'].encode(
            Example('1', '', 7, meta),
            hf.load_tokenizer('configs/models/characters'),
            RewardModelOptions('steps', ' ', 0.1, 'masked'),
        )


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (dict(supervised__updates=0), 'supervised.updates'),
        (dict(reward_model__objective='listwise'), 'pairwise, pointwise or steps'),
        (dict(reward_model__after_error='kept'), 'masked or wrong'),
        (dict(data__name='arithmetic'), 'steps and labels'),
        (dict(learner__microbatches=3), 'choose a divisor'),
        (dict(mesh__data=8, supervised__batch=12), 'mesh.data'),
    ],
)
def test_bad_input_leaves_no_trace(tmp_path, changes, words):
    made = config(**changes)
    if 'data__name' in changes:
        made.data.options = {'digits': 1, 'count': 40, 'blurts': 0.5, 'wrong': 0.5}
    with pytest.raises(BadInput, match=words):
        reward_model.run(made, str(tmp_path / 'run'))
    assert not (tmp_path / 'run').exists()


# whole runs


def test_it_learns_what_the_text_foretells_and_scores_as_a_reward(tmp_path):
    made = config(
        data__name='rollouts',
        supervised__updates=40,
        supervised__batch=32,
        data__max_prompt_tokens=8,
        reward_model__objective='pairwise',
        evaluation__prompts=100,
    )
    made.data.options = letters(tmp_path)
    reward_model.run(made, str(tmp_path / 'run'))
    results = json.loads((tmp_path / 'run' / 'evaluation.json').read_text())
    assert results['accuracy'] > 0.9 and results['over_majority_low'] > 0.2 and results['auc'] > 0.9
    better, worse = model.reward(
        ['bcad', 'bccd'],
        [Example('200=', '', 0, {})] * 2,
        transform='raw',
        mean=results['train_mean'],
        std=results['train_std'],
        cap=0.0,
        source=model.Source(str(tmp_path / 'run' / 'reward_model'), **OPTIONS),
        models={},
    )
    assert better > 0 > worse


def test_a_stopped_run_goes_on_exactly_and_its_folder_scores_as_it_did(tmp_path, monkeypatch):
    made = config()
    straight = reward_model.run(made, str(tmp_path / 'straight'))
    genuine, calls = reward_model.labelled_batch, []

    def fails(*arguments):
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return genuine(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reward_model, 'labelled_batch', fails)
        reward_model.run(made, str(tmp_path / 'stopped'))
    resumed = reward_model.run(made, str(tmp_path / 'stopped'))
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    for name in ('metrics.jsonl', 'evaluation.json', 'reward_model/model.safetensors', 'reward_model/config.json'):
        assert (tmp_path / 'stopped' / name).read_bytes() == (tmp_path / 'straight' / name).read_bytes(), name

    again = reward_model.run(made, str(tmp_path / 'straight'))  # finished: judged once more, and no step made
    jax.tree.map(np.testing.assert_array_equal, again, straight)

    loaded = model.load({}, model.Source(str(tmp_path / 'straight' / 'reward_model'), **OPTIONS))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, straight.params)
    assert loaded.prompt_format == data.PromptFormat(chat=False, system='', template='{prompt}')
    assert loaded.separator == ' '


def test_a_completion_is_read_as_it_was_in_training(tmp_path):
    run = open_config(config(), str(tmp_path / 'fresh'))
    examples = read(run, reward_model.OBJECTIVES['steps'], 'test')
    for example, (row,), (marks,) in zip(*examples.dataset[:1], examples.completions, examples.marks, strict=True):
        text = ' '.join(example.meta['steps'])
        ids, last = process.tokenize(run.model.tokenizer, [step for step, _ in process.split(text, ' ')], ' ')
        assert row == ids and [place for place, _ in marks] == last[: len(marks)]
