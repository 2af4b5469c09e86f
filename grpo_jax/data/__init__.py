"""Prompts for the loop: load a data set, tokenize it once, and serve batches as a function of (seed, step).

A data set is a module of this package with `examples(split, **options) -> list of Example`; the file's name is the
name in config.data.name. In the list a malformed row is the BadInput that says so. A data set whose
meta['source'] are served by weight also has `weights(**options) -> source -> weight`.
"""

import importlib
import inspect
import logging
from typing import NamedTuple

import numpy as np

from grpo_jax.data.order import indices, shard, walk
from grpo_jax.data.records import sound
from grpo_jax.errors import BadInput
from grpo_jax.types import Example, Prompts

__all__ = ['Dataset', 'encode_prompt', 'examples', 'indices', 'load', 'pick', 'prompts', 'shard', 'spread', 'walk']


class Dataset(NamedTuple):
    """Examples and their token ids, in the same order."""

    examples: list[Example]
    tokens: list[list[int]]
    parts: tuple = ()  # of a mixture: (weight, indices of the part's examples i64[n]) of each part


def load(section, split, tokenizer):
    """Dataset of a split ('train' or 'test') of a config section.

    Prompts longer than max_prompt_tokens and malformed rows are left out and counted; BadInput for the first
    malformed row when strict, and when most are.
    """
    found = sound(examples(section['name'], section['options'], split), section['strict'], split)
    if not found:
        raise BadInput('data.options', dict(section['options']), f'gives no example of the {split} split')
    ids = {example.id for example in found}
    if len(ids) < len(found) or not all(0 <= i < 2**31 for i in ids):
        raise BadInput('data.name', section['name'], 'gives examples ids that are not distinct, or not in 0..2^31-1')
    tokens = [
        encode_prompt(
            tokenizer, example.prompt, chat=section['chat'], system=section['system'], template=section['template']
        )
        for example in found
    ]
    longest = section['max_prompt_tokens']
    kept = [i for i, ids in enumerate(tokens) if len(ids) <= longest]
    if not kept:
        raise BadInput(
            'data.max_prompt_tokens',
            longest,
            f'leaves no prompt of {len(tokens)} in the {split} '
            f'split; the shortest has {min(map(len, tokens), default=0)} tokens',
        )
    if len(kept) < len(tokens):
        logging.warning(
            '%d of %d %s prompts are longer than data.max_prompt_tokens=%d and left out',
            len(tokens) - len(kept),
            len(tokens),
            split,
            longest,
        )
    dataset = pick(Dataset(found, tokens), kept)
    return dataset._replace(parts=_parts(section, dataset.examples))


def examples(name, options, split):
    """What the data set `name` holds of a split: Examples, and a BadInput for each malformed row."""
    module, options = _module(name), dict(options)
    try:
        inspect.signature(module.examples).bind(split, **options)
    except TypeError as error:
        raise BadInput('data.options', options, f'{error} of {module.__name__}.examples') from None
    return module.examples(split, **options)


def _module(name):
    try:
        module = importlib.import_module(f'grpo_jax.data.{name}')
    except ModuleNotFoundError as error:
        if error.name != f'grpo_jax.data.{name}':
            raise
        module = None
    if not hasattr(module, 'examples'):
        raise BadInput('data.name', name, 'no such file in grpo_jax/data; add one with examples(split, **options)')
    return module


def _parts(section, found):
    """Dataset.parts of the examples; () unless the data set has weights, BadInput when a part has no example."""
    module = _module(section['name'])
    if not hasattr(module, 'weights'):
        return ()
    sources, parts = np.array([example.meta['source'] for example in found]), []
    for source, weight in module.weights(**section['options']).items():
        parts.append((weight, np.flatnonzero(sources == source)))
        if not len(parts[-1][1]):
            raise BadInput(
                'data.options.parts',
                source,
                f'has no example that fits data.max_prompt_tokens='
                f'{section["max_prompt_tokens"]}; raise that, or leave the part out',
            )
    return tuple(parts)


def pick(dataset, chosen):
    """The Dataset of the chosen indices alone; a part of which nothing is chosen is none of its parts."""
    parts = ((weight, np.flatnonzero(np.isin(chosen, where))) for weight, where in dataset.parts)
    return Dataset(
        [dataset.examples[i] for i in chosen],
        [dataset.tokens[i] for i in chosen],
        tuple(part for part in parts if len(part[1])),
    )


def spread(count, most):
    """Indices i64[n] of n <= most of `count` examples, evenly over all of them."""
    return np.unique(np.linspace(0, count - 1, most).astype(int))


def encode_prompt(tokenizer, text, *, chat, system, template):
    """Token ids of a prompt; special tokens are added once, by the chat template or by the tokenizer."""
    text = template.replace('{prompt}', text)
    if not chat:
        ids = tokenizer.encode(text)
        # some tokenizers close every text; a prompt must stay open
        return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    if not tokenizer.chat_template:
        raise BadInput(
            'data.chat',
            True,
            f'the tokenizer in {tokenizer.name_or_path} has no chat template; '
            'set data.chat=False or add chat_template to its tokenizer_config.json',
        )
    messages = [{'role': 'system', 'content': system}] if system else []
    messages.append({'role': 'user', 'content': text})
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(rendered, add_special_tokens=False)


def prompts(dataset, chosen, length, pad_token):
    """(examples, Prompts of host arrays left-padded to `length`) of the chosen indices."""
    tokens = np.full((len(chosen), length), pad_token, np.int32)
    mask = np.zeros((len(chosen), length), bool)
    for row, index in enumerate(chosen):
        ids = dataset.tokens[index]
        tokens[row, length - len(ids) :] = ids
        mask[row, length - len(ids) :] = True
    examples = [dataset.examples[index] for index in chosen]
    return examples, Prompts(tokens, mask, np.array([e.id for e in examples], np.int32))
