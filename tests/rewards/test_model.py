"""Rewards by a model: what is scored and where, in any order and shape; bounds; steps of a text."""

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from grpo_jax.errors import BadInput
from grpo_jax.learner import critic
from grpo_jax.models import hf, transformer
from grpo_jax.rewards import model as models
from grpo_jax.rewards import process
from grpo_jax.types import Example
from tests import small_model

OPTIONS = dict(dtype='float32', batch=4, device=0, park=True)
PLAIN = OPTIONS | dict(transform='raw', mean=0.0, std=1.0, cap=0.0)
TEXTS = ['4', '12', 'x' * 100, '', '7+5=12 132', '4']
EXAMPLES = [Example('2+2=', '4', 0, {}), Example('5+7=', '12', 1, {})] * 3


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A reward model of random weights that reads characters; its steps are parted by a space."""
    bare, whole = (tmp_path_factory.mktemp(name) for name in ('bare', 'whole'))
    c = hf.load_config(small_model.write(bare))
    params = critic.new(jax.jit(transformer.init, static_argnums=1)(jax.random.key(0), c))
    params['value_head'] = jax.random.normal(jax.random.key(1), (c.width,))
    hf.save(str(whole), str(bare), params, c, np.float32, pad_token_id=0)
    (whole / models.FILE).write_text(
        json.dumps({'chat': False, 'system': '', 'template': 'Q: {prompt}', 'separator': ' '}), encoding='utf8'
    )
    return str(whole)


def alone(folder, ids):
    """Scores of tokens in a row of their own, behind the padding."""
    model, padding = models.load(folder, 'float32', 0, True), 160 - len(ids)
    tokens, mask = np.pad([ids], ((0, 0), (padding, 0))), np.arange(160)[None] >= padding
    return np.asarray(model.reward_functions(model.params, tokens, mask))[0, padding:]


def tokens_of(folder, text):
    return hf.load_tokenizer(folder).encode(text)


def test_a_completion_is_scored_at_its_stop_token_behind_the_models_prompt(folder):
    stop = hf.load_tokenizer(folder).eos_token_id
    found = models.reward(TEXTS, EXAMPLES, folder=folder, **PLAIN)
    for text, example, value in zip(TEXTS, EXAMPLES, found, strict=True):
        ids = tokens_of(folder, f'Q: {example.prompt}{text}')
        assert value == pytest.approx(alone(folder, [*ids, stop])[-1], abs=1e-5)
    assert len(set(found)) == len(found)


def test_blocks_and_their_order_change_no_score(folder):
    found = models.reward(TEXTS, EXAMPLES, folder=folder, **PLAIN)
    again = models.reward(TEXTS[::-1], EXAMPLES[::-1], folder=folder, **PLAIN | {'batch': 5})
    np.testing.assert_allclose(again[::-1], found, atol=1e-5)


def test_a_text_that_the_model_cannot_read_has_no_score(folder):
    longest = 160 - len('Q: 2+2=') - 1
    texts = ['x' * longest, 'x' * (longest + 1), '12' * 50_000, '4']
    found = models.reward(texts, EXAMPLES[:1] * 4, folder=folder, **PLAIN)
    assert [value is None for value in found] == [False, True, True, False]
    assert process.steps(texts[1:], EXAMPLES[:1] * 3, folder=folder, centred=False, **OPTIONS)[:2] == [[], []]


def test_few_shapes_are_compiled(folder):
    models.load.cache_clear()
    model = models.load(folder, 'float32', 0, True)
    for rows in ([[5] * n for n in range(1, 161)], [[5]], [[5] * 70] * 9):
        models.score(model, rows, 4)
    assert model.reward_functions._cache_size() == 3  # of 64, 128 and 160 columns


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
    raw = models.reward(TEXTS, EXAMPLES, folder=folder, **PLAIN)
    found = models.reward(TEXTS, EXAMPLES, folder=folder, **PLAIN | options)
    np.testing.assert_allclose(found, [expected(s) for s in raw], rtol=1e-6)
    assert options == {} or found != raw


def test_parked_weights_lie_in_the_hosts_memory_and_score_alike(folder):
    parked, there = (models.load(folder, 'float32', 3, park) for park in (True, False))
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(parked.params))
    assert all(leaf.devices() == {jax.devices()[3]} for leaf in jax.tree.leaves(there.params))
    assert models.load(folder, 'float32', 3, True) is parked
    a, b = (models.reward(TEXTS, EXAMPLES, folder=folder, **PLAIN | {'device': 3, 'park': p}) for p in (True, False))
    assert a == b == models.reward(TEXTS, EXAMPLES, folder=folder, **PLAIN)


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (dict(transform='log'), 'raw or sigmoid'),
        (dict(std=0.0), 'std must be above 0'),
        (dict(cap=-1.0), 'cap'),
        (dict(device=99), '8 devices'),
        (dict(folder='no/such'), 'no such folder'),
        (dict(folder=''), 'no such folder'),
        (dict(folder='configs/models/characters'), 'model.safetensors'),
    ],
)
def test_what_cannot_score_is_refused(folder, options, words):
    with pytest.raises(BadInput, match=words):
        models.reward(TEXTS, EXAMPLES, **PLAIN | {'folder': folder} | options)


def test_a_step_is_scored_at_the_separator_behind_it(folder):
    text = '7+5=12  4+8=12 132'
    (steps,) = process.steps([text], EXAMPLES[:1], folder=folder, centred=False, **OPTIONS)
    assert [text[:end] for end, _ in steps] == ['7+5=12', '7+5=12  4+8=12', text]
    # two spaces part no step, and the model reads one
    read = alone(folder, tokens_of(folder, 'Q: 2+2=7+5=12 4+8=12 132 '))
    places = [len('Q: 2+2=7+5=12 ') - 1, len('Q: 2+2=7+5=12 4+8=12 ') - 1, -1]
    np.testing.assert_allclose([value for _, value in steps], 1 / (1 + np.exp(-read[places])), atol=1e-5)
    (centred,) = process.steps([text], EXAMPLES[:1], folder=folder, centred=True, **OPTIONS)
    assert centred == [(end, 2 * value - 1) for end, value in steps]


def test_steps_become_one_reward(folder):
    texts = ['7+5=12 4+8=12 132', '132', ' ', '']
    values = [
        [v for _, v in steps] for steps in process.steps(texts, EXAMPLES[:4], folder=folder, centred=False, **OPTIONS)
    ]
    for aggregate, expected in [('min', min(values[0])), ('mean', np.mean(values[0])), ('product', np.prod(values[0]))]:
        found = process.reward(texts, EXAMPLES[:4], folder=folder, aggregate=aggregate, **OPTIONS)
        np.testing.assert_allclose(found[:2], [expected, values[1][0]])
        assert found[2:] == [None, None]
    with pytest.raises(BadInput, match='min, mean, product'):
        process.reward(texts, EXAMPLES[:4], folder=folder, aggregate='sum', **OPTIONS)


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
