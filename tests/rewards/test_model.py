"""Rewards by a model: what is scored and where, in any order and shape; bounds; steps of a text."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from grpo_jax import rewards
from grpo_jax.configs import default
from grpo_jax.errors import BadInput
from grpo_jax.learner import critic
from grpo_jax.models import hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.rewards import model, process
from grpo_jax.types import Example
from tests import small_model

OPTIONS = dict(dtype='float32', batch=4, device=0, park=True)
PLAIN = dict(transform='raw', mean=0.0, std=1.0, cap=0.0)
MODELS = {}
TEXTS = ['4', '12', 'x' * 100, '', '7+5=12 132', '4']
EXAMPLES = [Example('2+2=', '4', 0, {}), Example('5+7=', '12', 1, {})] * 3


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A reward model of random weights that reads characters; its steps are parted by a space."""
    bare, whole = (tmp_path_factory.mktemp(name) for name in ('bare', 'whole'))
    model_config = families.load_config(small_model.write(bare, max_position_embeddings=160))
    params = critic.new_params(jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), model_config))
    params['value_head'] = jax.random.normal(jax.random.key(1), (model_config.width,))
    hf.save(str(whole), str(bare), params, model_config, np.float32, pad_token_id=0)
    (whole / model.TEXTS_FILE).write_text(
        json.dumps({'chat': False, 'system': '', 'template': 'Q: {prompt}', 'separator': ' '}), encoding='utf8'
    )
    return str(whole)


def source(folder, **changes):
    return model.Source(folder, **OPTIONS | changes)


def reward(texts, examples, folder, **changes):
    """model.reward with PLAIN, except for changes of it or of OPTIONS."""
    place = {name: value for name, value in changes.items() if name in OPTIONS}
    options = PLAIN | {name: value for name, value in changes.items() if name not in OPTIONS}
    return model.reward(texts, examples, source=source(folder, **place), models=MODELS, **options)


def steps_of(folder, texts, examples, centred=False):
    return process.steps(texts, examples, source=source(folder), models=MODELS, centred=centred)


def alone(folder, ids):
    """Values of tokens in a row of their own, behind the padding."""
    loaded, padding = model.load(MODELS, source(folder)), 160 - len(ids)
    tokens, mask = np.pad([ids], ((0, 0), (padding, 0))), np.arange(160)[None] >= padding
    return np.asarray(loaded.values(loaded.params, tokens, mask))[0, padding:]


def tokens_of(folder, text):
    return hf.load_tokenizer(folder).encode(text)


def test_a_completion_is_scored_at_its_stop_token_behind_the_models_prompt(folder):
    stop = hf.load_tokenizer(folder).eos_token_id
    found = reward(TEXTS, EXAMPLES, folder)
    for text, example, value in zip(TEXTS, EXAMPLES, found, strict=True):
        ids = tokens_of(folder, f'Q: {example.prompt}{text}')
        assert value == pytest.approx(alone(folder, [*ids, stop])[-1], abs=1e-5)
    assert len(set(found)) == len(found)


def test_blocks_and_their_order_change_no_score(folder):
    found = reward(TEXTS, EXAMPLES, folder)
    again = reward(TEXTS[::-1], EXAMPLES[::-1], folder, batch=5)
    np.testing.assert_allclose(again[::-1], found, atol=1e-5)


def test_a_text_that_the_model_cannot_read_has_no_score(folder):
    longest = 160 - len('Q: 2+2=') - 1
    texts = ['x' * longest, 'x' * (longest + 1), '12' * 50_000, '4']
    found = reward(texts, EXAMPLES[:1] * 4, folder)
    assert [value is None for value in found] == [False, True, True, False]
    assert steps_of(folder, texts[1:], EXAMPLES[:1] * 3)[:2] == [[], []]


def test_few_shapes_are_compiled(folder):
    loaded = model.load({}, source(folder))
    shapes = set()

    def record(params, tokens, mask):
        shapes.add(tokens.shape)
        return loaded.values(params, tokens, mask)

    recorded = loaded._replace(values=record)
    for rows in ([[5] * n for n in range(1, 161)], [[5]], [[5] * 70] * 9):
        model.compute_values(recorded, rows)
    assert shapes == {(4, 64), (4, 128), (4, 160)}


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        (dict(), lambda s: s),
        (dict(transform='sigmoid'), lambda s: 1 / (1 + math.exp(-s))),
        (dict(mean=0.5, std=0.25), lambda s: (s - 0.5) / 0.25),
        (dict(cap=0.125), lambda s: max(min(s, 0.125), -0.125)),
        (dict(mean=0.5, std=0.25, cap=1.5), lambda s: max(min((s - 0.5) / 0.25, 1.5), -1.5)),
    ],
)
def test_scores_are_normalized_and_then_capped(folder, options, expected):
    raw = reward(TEXTS, EXAMPLES, folder)
    found = reward(TEXTS, EXAMPLES, folder, **options)
    np.testing.assert_allclose(found, [expected(s) for s in raw], rtol=1e-6)
    assert options == {} or found != raw


def test_parked_weights_lie_in_the_hosts_memory_and_score_alike(folder):
    parked, on_device = (model.load(MODELS, source(folder, device=3, park=park)) for park in (True, False))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(parked.params))
    assert all(leaf.devices() == {jax.devices()[3]} for leaf in jax.tree.leaves(on_device.params))
    assert model.load(MODELS, source(folder, device=3)) is parked
    a, b = (reward(TEXTS, EXAMPLES, folder, device=3, park=p) for p in (True, False))
    assert a == b == reward(TEXTS, EXAMPLES, folder)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(device=99), 'choose one of 0 to 7'),
        (dict(folder='no/such'), 'no such folder'),
        (dict(folder=''), 'no such folder'),
        (dict(folder='configs/models/characters'), 'model.safetensors'),
    ],
)
def test_what_cannot_score_is_refused(folder, options, words):
    with pytest.raises(BadInput, match=words):
        reward(TEXTS, EXAMPLES, **{'folder': folder} | options)


@pytest.mark.parametrize(
    ('name', 'options', 'words'),
    [
        ('model', dict(transform='log'), r"model.transform = 'log': must be raw or sigmoid"),
        ('model', dict(std=0.0), 'model.std = 0.0: must be a number above 0'),
        ('model', dict(cap=-1.0), 'model.cap = -1.0: must be a number at least 0'),
        ('model', dict(batch=0), 'model.batch = 0: must be a whole number at least 1'),
        ('process', dict(aggregate='sum'), r"process.aggregate = 'sum': must be min, mean or product"),
    ],
)
def test_options_out_of_their_range_are_refused_whether_the_reward_is_chosen_or_not(name, options, words):
    section = default.get_config().reward
    section.options[name].update(options)
    with pytest.raises(BadInput, match=f'^reward.options.{words}'):
        rewards.RewardOptions.from_config(section)


def test_a_step_is_scored_at_the_separator_behind_it(folder):
    text = '7+5=12  4+8=12 132'
    (steps,) = steps_of(folder, [text], EXAMPLES[:1])
    assert [text[:end] for end, _ in steps] == ['7+5=12', '7+5=12  4+8=12', text]
    # two spaces part no step, and the model reads one
    read = alone(folder, tokens_of(folder, 'Q: 2+2=7+5=12 4+8=12 132 '))
    places = [len('Q: 2+2=7+5=12 ') - 1, len('Q: 2+2=7+5=12 4+8=12 ') - 1, -1]
    np.testing.assert_allclose([value for _, value in steps], 1 / (1 + np.exp(-read[places])), atol=1e-5)
    (centred,) = steps_of(folder, [text], EXAMPLES[:1], centred=True)
    assert centred == [(end, 2 * value - 1) for end, value in steps]


def test_steps_become_one_reward(folder):
    texts = ['7+5=12 4+8=12 132', '132', ' ', '']
    values = [[v for _, v in steps] for steps in steps_of(folder, texts, EXAMPLES[:4])]
    place = dict(source=source(folder), models=MODELS)
    for aggregate, expected in [('min', min(values[0])), ('mean', np.mean(values[0])), ('product', np.prod(values[0]))]:
        found = process.reward(texts, EXAMPLES[:4], aggregate=aggregate, **place)
        np.testing.assert_allclose(found[:2], [expected, values[1][0]])
        assert found[2:] == [None, None]


@given(st.text('a. \n', max_size=30), st.sampled_from(['\n', ' ', '. ', '\n\n']))
@settings(max_examples=200, deadline=None)
def test_steps_are_where_the_text_has_them(text, separator):
    found = process.split(text, separator)
    for step, end in found:
        assert text[:end].endswith(step) and step == step.strip() != '' and separator not in step
    assert [end for _, end in found] == sorted({end for _, end in found})
    assert ''.join(''.join(step for step, _ in found).split()) == ''.join(text.replace(separator, '').split())


def test_a_megabyte_of_steps_is_parted_at_once():
    assert len(process.split('1\n' * 500_000, '\n')) == 500_000
    assert process.split('\n' * 1_000_000, '\n') == []
