"""Real checkpoints and tokenizers: the numbers and ids that others computed."""

import ast
import functools
import json
import os
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_hf import load
from test_transformer import logits

from grpo_jax import data, sampler
from grpo_jax.configs import gsm8k
from grpo_jax.data import gsm8k as examples
from grpo_jax.models import hf
from grpo_jax.tools import show
from grpo_jax.types import Prompts
from tests.golden import make_golden


@pytest.fixture(scope='module', params=['stories260K', 'babyllama-361'])
def story(real, request):
    """A trained model: folder, c, params, golden (the arrays of golden.npz)."""
    folder = os.path.join(real, 'models', request.param)
    c, params = load(folder)
    return types.SimpleNamespace(folder=folder, c=c, params=params, golden=np.load(os.path.join(folder, 'golden.npz')))


def of_one_row(story, ids):
    return logits(story.params, ids[None], np.ones((1, len(ids)), bool), story.c)[0]


def test_the_text_becomes_the_golden_ids(story):
    ids = hf.load_tokenizer(story.folder).encode(str(story.golden['text']))
    assert ids == story.golden['input_ids'].tolist()


def test_logits_of_a_trained_model_are_reproduced(story):
    np.testing.assert_allclose(of_one_row(story, story.golden['input_ids']), story.golden['logits'], atol=1e-4)


def test_perplexities_are_those_of_the_golden_logits_to_four_digits(story):
    # by transformers' logits; the five sentences of the README's table are published nowhere
    expected = {361: ('1.0703', '0.0989'), 512: ('1.2188', '0.0917')}[story.c.vocab_size]
    ids, text = story.golden['input_ids'], str(story.golden['text'])
    for values in (story.golden['logits'], of_one_row(story, ids)):
        scores = jax.nn.log_softmax(np.asarray(values)[:-1])
        total = -float(jnp.sum(jnp.take_along_axis(scores, ids[1:, None], -1)))
        assert (f'{np.exp(total / (len(ids) - 1)):.4f}', f'{total / np.log(2) / len(text):.4f}') == expected


def test_each_greedy_token_is_the_argmax_after_those_before_it(story):
    prompt, greedy = story.golden['prompt_ids'], story.golden['greedy_ids']
    assert greedy[: len(prompt)].tolist() == prompt.tolist()  # greedy_ids begin with the prompt
    best = jnp.argmax(of_one_row(story, greedy[:-1]), -1)
    assert best[len(prompt) - 1 :].tolist() == greedy[len(prompt) :].tolist()


def greedy_rollout(story, columns, group_size):
    """The Rollout at temperature 0 of the golden prompt, left-padded to `columns`."""
    prompt, greedy = story.golden['prompt_ids'], story.golden['greedy_ids']
    padding = columns - len(prompt)
    prompts = Prompts(jnp.pad(prompt, (padding, 0))[None], (jnp.arange(columns) >= padding)[None], jnp.array([7]))
    keys = sampler.row_keys(jax.random.key(0), jnp.int32(0), prompts.ids, group_size)
    sampling = sampler.Sampling(
        temperature=0.0,
        max_tokens=len(greedy) - len(prompt),
        pad_token=0,
        stop_tokens=hf.stop_tokens(story.folder, hf.load_tokenizer(story.folder)),
    )
    generate = functools.partial(sampler.generate, version=0, c=story.c, sampling=sampling, tables={}, block=32)
    return jax.jit(generate)(story.params, prompts, keys)


def test_the_sampler_at_temperature_zero_writes_the_golden_story(story):
    prompt, greedy = story.golden['prompt_ids'], story.golden['greedy_ids']
    rollout = greedy_rollout(story, columns=len(prompt) + 3, group_size=2)
    assert jnp.all(rollout.completion_mask)
    for row in range(2):
        assert rollout.tokens[row, 3:].tolist() == greedy.tolist()
    # its logprobs are the forward pass's
    scores = jax.nn.log_softmax(of_one_row(story, greedy[:-1]))[len(prompt) - 1 :]
    expected = jnp.take_along_axis(scores, greedy[len(prompt) :, None], -1)[:, 0]
    np.testing.assert_allclose(rollout.logprobs[0], expected, atol=1e-4)


# SmolLM2, of tests/golden/make_smollm2.py


@pytest.fixture(scope='module')
def pretrained(smollm2):
    """SmolLM2: folder, c, params, golden, and the logits of the golden ids."""
    c, params = load(smollm2)
    golden = np.load(os.path.join(os.path.dirname(make_golden.__file__), 'smollm2.npz'))
    story = types.SimpleNamespace(folder=smollm2, c=c, params=params, golden=golden)
    story.logits = np.asarray(of_one_row(story, golden['ids']))
    return story


def test_smollm2_reproduces_the_logits_and_the_perplexity_of_transformers(pretrained):
    golden, ids = pretrained.golden, pretrained.golden['ids']
    assert hf.load_tokenizer(pretrained.folder).encode(str(golden['text'])) == ids.tolist()
    np.testing.assert_allclose(pretrained.logits[:, ::768], golden['logits'], atol=2e-4)
    picked = np.take_along_axis(pretrained.logits[:-1], ids[1:, None], 1)[:, 0]
    normalizers = np.asarray(jax.nn.logsumexp(pretrained.logits, -1))
    ours, theirs = np.mean(normalizers[:-1] - picked), np.mean(golden['normalizers'][:-1] - golden['targets'])
    assert f'{np.exp(ours):.4g}' == f'{np.exp(theirs):.4g}'


def test_smollm2_writes_the_greedy_text_of_transformers(pretrained):
    golden = pretrained.golden
    ids = np.concatenate([golden['ids'][:12], golden['greedy']])
    best = jnp.argmax(of_one_row(pretrained, ids[:-1]), -1)
    assert best[11:].tolist() == golden['greedy'].tolist()


# tokenizers


@pytest.mark.parametrize('special', [False, True])
def test_qwen3_ids_are_the_published_ones(real, qwen3, special):
    with open(os.path.join(real, 'tokenizers', 'golden.jsonl'), encoding='utf8') as file:
        rows = [row for row in map(json.loads, file) if row['tokenizer'] == 'qwen3']
    assert len(rows) == 35
    # Qwen adds no special token, so that both ways of asking must agree
    wrong = [row['input'] for row in rows if qwen3.encode(row['input'], add_special_tokens=special) != row['input_ids']]
    assert not wrong


@pytest.mark.parametrize(('system', 'before'), [('', ''), ('Be brief.', '<|im_start|>system\nBe brief.<|im_end|>\n')])
def test_a_chat_prompt_is_one_rendering_of_the_template(qwen3, system, before):
    ids = data.encode_prompt(qwen3, '2+2', data.PromptFormat(True, system, 'What is {prompt}?'))
    assert qwen3.decode(ids) == f'{before}<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n'
    # the markers are tokens and not text that looks like them
    assert ids.count(151644) == (3 if system else 2) and ids.count(151645) == (2 if system else 1)


def test_show_prints_the_exact_text_and_ids_of_gsm8k(real, qwen3, tmp_path):
    config = gsm8k.get_config()
    shutil.copytree(qwen3.name_or_path, tmp_path, dirs_exist_ok=True)
    shutil.copy(hf.find('configs/models/Qwen3-0.6B') + '/config.json', tmp_path)
    config.model.path, config.model.random_init = str(tmp_path), True
    config.data.options.folder = os.path.join(real, 'math')
    head, _, title, text, ids = list(show.lines(config, 1))
    index = data.indices(config.seed, 0, 1, 7473)[0]  # no prompt is too long
    question = examples.examples('train', folder=config.data.options.folder)[index].prompt
    assert "151645 '<|im_end|>'" in head and f'example {index}, ' in title
    assert ast.literal_eval(text[5:]) == (
        f'<|im_start|>user\n{question}\nReason step by step, then write the final number after ####.<|im_end|>\n'
        '<|im_start|>assistant\n'
    )
    assert ast.literal_eval(ids[5:]) == qwen3.encode(ast.literal_eval(text[5:]))


def test_a_template_that_begins_with_bos_gives_one_bos(real):
    tokenizer = hf.load_tokenizer(os.path.join(real, 'models', 'stories260K'))
    assert tokenizer.encode('Hi')[0] == tokenizer.bos_token_id == 1  # this tokenizer adds it by itself
    tokenizer.chat_template = '{{ bos_token }}{{ messages[0].content }}'
    ids = data.encode_prompt(tokenizer, 'Hi', data.PromptFormat(True, '', '{prompt}'))
    assert ids.count(1) == 1 and ids[0] == 1


def test_a_plain_prompt_stays_open_after_one_bos(real):
    tokenizer = hf.load_tokenizer(os.path.join(real, 'models', 'stories260K'))
    ids = data.encode_prompt(tokenizer, 'upon', data.PromptFormat(False, '', 'Once {prompt} a time'))
    assert ids == tokenizer.encode('Once upon a time') and ids[0] == 1 and tokenizer.eos_token_id not in ids


def test_stories_stop_at_either_end_token(real):
    folder = os.path.join(real, 'models', 'stories260K')
    assert hf.stop_tokens(folder, hf.load_tokenizer(folder)) == (1, 2)  # generation_config.json names both
