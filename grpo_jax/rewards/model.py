"""The score of a completion by a reward model: a Hugging Face sequence classification with one label.

A folder that grpo_jax.reward_model wrote says in reward_model.json how its prompts were written and its steps parted;
for another, the prompt goes through the chat template where the tokenizer has one. What is scored is the prompt, the
completion and the stop token, read at the last.
"""

import collections
from collections.abc import Callable
import functools
import math
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax import data
from grpo_jax.errors import BadInput
from grpo_jax.hosts import json_file
from grpo_jax.models import heads, hf, transformer

FILE = 'reward_model.json'  # in a reward model's folder: how its texts are written
SHORTEST = 64  # columns of the smallest of the compiled shapes, which are powers of two


class RewardModel(NamedTuple):
    """A reward model, ready to score."""

    tokenizer: Any
    texts: dict  # chat, system, template: of the prompt, as in config.data; separator: between steps
    params: Any  # on the host where it is parked, else on the device
    reward_functions: Callable
    device: jax.Device
    context: int  # tokens that it can read


def reward(completions, examples, *, folder, dtype, batch, device, park, transform, mean, std, cap):
    """List of scores, f = (score - mean) / std, at most cap away from 0 where cap is above 0; see load and score.

    transform says what is scored: 'raw', the head's number, or 'sigmoid' of it. None where the text is too long.
    """
    if transform not in ('raw', 'sigmoid'):
        raise BadInput('transform of a reward model', transform, 'choose raw or sigmoid')
    if std <= 0 or cap < 0:
        raise BadInput('std, cap of a reward model', (std, cap), 'std must be above 0, and cap 0 (none) or more')
    model = load(folder, dtype, device, park)
    prompts = encode_prompts(model, examples)
    rows = [
        prompts[example.prompt] + encode(model.tokenizer, text)
        for example, text in zip(examples, completions, strict=True)
    ]
    found = []
    for scores in score(model, rows, batch):
        value = None if scores is None else float(scores[-1])
        if value is not None:
            value = ((sigmoid(value) if transform == 'sigmoid' else value) - mean) / std
            value = min(max(value, -cap), cap) if cap else value
        found.append(value)
    return found


@functools.lru_cache
def load(folder, dtype, device, park):
    """RewardModel of a folder that computes in dtype on the device of that index, once a process.

    park: the weights lie in the host's memory and are on the device while it scores.
    """
    folder = hf.find(folder)
    c, tokenizer, place = hf.load_config(folder), hf.load_tokenizer(folder), device_at(device)
    params = hf.load_params(folder, c, transformer.map_table(lambda *_: place, heads.param_table(c)))
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    texts = {'chat': bool(tokenizer.chat_template), 'system': '', 'template': '{prompt}', 'separator': '\n'}
    path = os.path.join(folder, FILE)
    if os.path.isfile(path):
        texts = json_file.read(path)
    return RewardModel(
        tokenizer,
        texts,
        jax.device_get(params) if park else params,
        make_scorer(c, dtype),
        place,
        hf.context_length(folder),
    )


def device_at(index):
    """The device of this process that has an index; BadInput when there are fewer."""
    devices = jax.local_devices()
    if not 0 <= index < len(devices):
        raise BadInput('device of a reward model', index, f'{len(devices)} devices are here, counted from 0')
    return devices[index]


def make_scorer(c, dtype):
    """(params, tokens i32[B, T], mask bool[B, T]) -> f32[B, T] on the arguments' device; compiled once a shape."""
    return jax.jit(functools.partial(heads.values, c=c, remat='none', dtype=dtype))


def encode_prompts(model, examples):
    """Prompt -> token ids, as the reward model was taught to read it."""
    written = {name: model.texts[name] for name in ('chat', 'system', 'template')}
    return {text: data.encode_prompt(model.tokenizer, text, **written) for text in {e.prompt for e in examples}}


def encode(tokenizer, completion):
    """Token ids of a completion and the stop token, whose score is that of the whole."""
    return [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]


def score(model, rows, batch):
    """For each list of token ids its scores f32[tokens], or None where it is longer than the model's context.

    Scored in blocks of `batch` rows, padded to a power of two of columns: a bounded number of shapes to compile.
    """
    found, by_length = [None] * len(rows), collections.defaultdict(list)
    for i, row in enumerate(rows):
        if len(row) <= model.context:
            by_length[min(max(SHORTEST, 1 << (len(row) - 1).bit_length()), model.context)].append(i)
    params = jax.device_put(model.params, model.device)
    for columns, members in by_length.items():
        for start in range(0, len(members), batch):
            block = members[start : start + batch]
            tokens, mask = np.zeros((batch, columns), np.int32), np.zeros((batch, columns), bool)
            for line, i in enumerate(block):
                tokens[line, : len(rows[i])], mask[line, : len(rows[i])] = rows[i], True
            scores = np.asarray(model.reward_functions(params, *jax.device_put((tokens, mask), model.device)))
            for line, i in enumerate(block):
                found[i] = scores[line, : len(rows[i])]
    return found


def sigmoid(x):
    """1 / (1 + exp(-x)), for any float."""
    return 0.5 * (1 + math.tanh(0.5 * x))
