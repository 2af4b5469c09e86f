"""A reward model as a reward: a Hugging Face sequence classification with one label.

A folder that grpo_jax.reward_model wrote has reward_model.json, which says how prompts were written and what separated
steps. For another folder, the prompt goes through the chat template where the tokenizer has one. The model reads the
prompt, the completion and the stop token; its value at the stop token is the reward.
"""

import collections
from collections.abc import Callable, Sequence
import functools
import os
from typing import Annotated, Any, NamedTuple

import jax
from jaxtyping import Float
import numpy as np
from scipy.special import expit

from grpo_jax import data, ranges
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.hosts import json_file
from grpo_jax.models import heads, hf, transformer
from grpo_jax.models.hf import families
from grpo_jax.ranges import Count, Free, Natural, OneOf, Range
from grpo_jax.sharding import compiled

READS_ANSWERS = False  # it judges without a gold answer
TEXTS_FILE = 'reward_model.json'  # in a reward model's folder: how its texts are written
# the file's keys and their types; folders that are older than a key lack it
TEXTS = {'chat': bool, 'system': str, 'template': str, 'separator': str, 'thinking': str, 'chat_template_kwargs': dict}
SHORTEST = 64  # columns of the smallest of the compiled shapes, which are powers of two


class Source(NamedTuple):
    """A reward model's folder, and how its values are computed."""

    folder: str  # of the model, or the name of one that is downloaded already
    dtype: Annotated[str, OneOf(('float32', 'bfloat16'))]  # of computation
    batch: Free[Count]  # rows at once
    device: Free[Natural]  # index among this process's devices
    park: Free[bool]  # keep the weights in the host's memory, and copy them to the device for each computation


class RewardModel(NamedTuple):
    """A loaded reward model."""

    tokenizer: Any
    prompt_format: data.PromptFormat
    separator: str  # between steps
    params: Any  # on the host if the model is parked, else on the device
    values: Callable  # (params, tokens i32[B, T], mask bool[B, T]) -> f32[B, T]
    device: Any  # a jax.Device
    context: int  # tokens that the model can read
    batch: int  # rows at once


def reward(
    completions: Sequence[str],
    examples: Sequence[Example],
    *,
    source: Source,
    models: dict,
    transform: Annotated[str, OneOf(('raw', 'sigmoid'))],
    mean: Annotated[float, Range(least=-1e6, most=1e6)],
    std: Annotated[float, Range(above=0, most=1e6)],
    cap: Annotated[float, Range(least=0, most=1e6)],
) -> list[float | None]:
    """(value - mean) / std for each completion; None where the text is longer than the model's context.

    transform: 'raw', the value is the head's output, or 'sigmoid', the sigmoid of it; cap: where above 0, the result is
    clipped to [-cap, cap]; models: the loaded reward models, to which the source's model is added.
    """
    model = load(models, source)
    prompts = encode_prompts(model, examples)
    rows = [
        prompt + encode_completion(model.tokenizer, text) for prompt, text in zip(prompts, completions, strict=True)
    ]
    rewards = []
    for values in compute_values(model, rows):
        value = None if values is None else float(values[-1])
        if value is not None:
            value = ((float(expit(value)) if transform == 'sigmoid' else value) - mean) / std
            value = min(max(value, -cap), cap) if cap else value
        rewards.append(value)
    return rewards


def load(models: dict, source: Source) -> RewardModel:
    """The RewardModel of a source, loaded at the first call and then kept in the dict `models`.

    Raises BadInput for a device that is not there and for a malformed reward_model.json.
    """
    if source not in models:
        models[source] = _load_model(source)
    return models[source]


def _load_model(source):
    """Loads the RewardModel of a source, from its folder."""
    folder = hf.find(source.folder)
    model_config, tokenizer = families.load_config(folder), hf.load_tokenizer(folder)
    devices = jax.local_devices()
    if not 0 <= source.device < len(devices):
        raise BadInput('device of a reward model', source.device, f'is not here; choose one of 0 to {len(devices) - 1}')
    device = devices[source.device]
    table = transformer.map_table(lambda *_: device, heads.param_table(model_config))
    params = jax.tree.map(lambda x: x.astype(source.dtype), hf.load_params(folder, model_config, table))
    texts: dict[str, Any] = {
        'chat': bool(tokenizer.chat_template),
        'system': '',
        'template': '{prompt}',
        'separator': '\n',
        'thinking': 'auto',
        'chat_template_kwargs': {},
    }
    path = os.path.join(folder, TEXTS_FILE)
    if os.path.isfile(path):
        older = {'thinking': 'auto', 'chat_template_kwargs': {}}
        texts = older | json_file.read_object(path, 'train the reward model again')
        if {name: type(value) for name, value in texts.items()} != TEXTS:
            raise BadInput(path, texts, f'must have {", ".join(TEXTS)}; train the reward model again')
    prompt_format = data.PromptFormat(**{name: texts[name] for name in data.PromptFormat._fields})
    ranges.check(data.PromptFormat, texts, path)
    prompt_format.check()
    values = functools.partial(heads.values, c=model_config, remat='none', dtype=source.dtype)
    return RewardModel(
        tokenizer,
        prompt_format,
        texts['separator'],
        jax.device_get(params) if source.park else params,
        jax.jit(values, compiler_options=compiled.repeatable_on(device)),
        device,
        families.context_length(folder),
        source.batch,
    )


def encode_prompts(model: RewardModel, examples: Sequence[Example]) -> list[list[int]]:
    """Token ids of each example's prompt, written as in the reward model's training."""
    encoded: list[list[int]] = []
    for example in examples:
        previous = examples[len(encoded) - 1] if encoded else None  # mostly of the same group
        same = previous and (previous.prompt, previous.messages) == (example.prompt, example.messages)
        encoded.append(
            encoded[-1]
            if same
            else data.encode_prompt(model.tokenizer, example.prompt, model.prompt_format, example.messages)
        )
    return encoded


def encode_completion(tokenizer: Any, completion: str) -> list[int]:
    """Token ids of a completion, ended by the eos token; the model's value at that token judges the completion.

    Raises BadInput for a tokenizer without eos token.
    """
    if tokenizer.eos_token_id is None:
        remedy = 'names no eos_token, at which a reward model judges; set it in tokenizer_config.json'
        raise BadInput('tokenizer of a reward model', tokenizer.name_or_path, remedy)
    return [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]


def compute_values(model: RewardModel, rows: Sequence[list[int]]) -> list[Float[np.ndarray, ' tokens'] | None]:
    """For each row of token ids, the model's value at each token; None for a row longer than the model's context.

    Blocks of model.batch rows are padded to a power of two of columns, so that few shapes are compiled.
    """
    by_columns = collections.defaultdict(list)
    values: list[Any] = [None] * len(rows)
    for i, row in enumerate(rows):
        if len(row) <= model.context:
            by_columns[min(max(SHORTEST, 1 << (len(row) - 1).bit_length()), model.context)].append(i)
    params = jax.device_put(model.params, model.device)
    for columns, members in by_columns.items():
        for start in range(0, len(members), model.batch):
            block = members[start : start + model.batch]
            tokens, mask = np.zeros((model.batch, columns), np.int32), np.zeros((model.batch, columns), bool)
            for line, i in enumerate(block):
                tokens[line, : len(rows[i])], mask[line, : len(rows[i])] = rows[i], True
            block_values = np.asarray(model.values(params, *jax.device_put((tokens, mask), model.device)))
            for line, i in enumerate(block):
                values[i] = block_values[line, : len(rows[i])]
    return values
