"""Prompts for the loop: load a data set, tokenize it once, and serve batches as a function of (seed, step).

A data set is a module of this package with `examples(split, **options) -> list[Example]`; the file's
name is the name in config.data.name.
"""
import importlib
import inspect
import logging
from typing import NamedTuple

import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.types import Example, Prompts


class Dataset(NamedTuple):
    """Examples and their token ids, in the same order."""

    examples: list[Example]
    tokens: list[list[int]]


def load(section, split, tokenizer):
    """Dataset of a split ('train' or 'test'); prompts longer than max_prompt_tokens are left out and counted."""
    try:
        module = importlib.import_module(f'grpo_jax.data.{section["name"]}')
    except ModuleNotFoundError as error:
        if error.name != f'grpo_jax.data.{section["name"]}':
            raise
        raise BadInput('data.name', section['name'], 'no such file in grpo_jax/data; '
                       'add one with examples(split, **options)') from None
    options = dict(section['options'])
    try:
        inspect.signature(module.examples).bind(split, **options)
    except TypeError as error:
        raise BadInput('data.options', options, f'{error} of {module.__name__}.examples') from None
    examples = module.examples(split, **options)
    tokens = [encode_prompt(tokenizer, example.prompt, chat=section['chat'], system=section['system'],
                            template=section['template']) for example in examples]
    longest = section['max_prompt_tokens']
    kept = [i for i, ids in enumerate(tokens) if len(ids) <= longest]
    if not kept:
        raise BadInput('data.max_prompt_tokens', longest, f'leaves no prompt of {len(tokens)} in the {split} '
                       f'split; the shortest has {min(map(len, tokens), default=0)} tokens')
    if len(kept) < len(tokens):
        logging.warning('%d of %d %s prompts are longer than data.max_prompt_tokens=%d and left out',
                        len(tokens) - len(kept), len(tokens), split, longest)
    return pick(Dataset(examples, tokens), kept)


def pick(dataset, chosen):
    """The Dataset of the chosen indices alone."""
    return Dataset([dataset.examples[i] for i in chosen], [dataset.tokens[i] for i in chosen])


def encode_prompt(tokenizer, text, *, chat, system, template):
    """Token ids of a prompt; special tokens are added once, by the chat template or by the tokenizer."""
    text = template.replace('{prompt}', text)
    if not chat:
        ids = tokenizer.encode(text)
        # some tokenizers close every text; a prompt must stay open
        return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    if not tokenizer.chat_template:
        raise BadInput('data.chat', True, f'the tokenizer in {tokenizer.name_or_path} has no chat template; '
                       'set data.chat=False or add chat_template to its tokenizer_config.json')
    messages = [{'role': 'system', 'content': system}] if system else []
    messages.append({'role': 'user', 'content': text})
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(rendered, add_special_tokens=False)


def walk(seed, position, count, retired):
    """(the next `count` example indices i64[count], the position after them) of an endless run of permutations.

    One permutation an epoch; examples that are retired (bool[N]) are passed over. A pure function of its
    arguments, so that resuming needs no iterator state. BadInput when all are retired.
    """
    if retired.all():
        raise BadInput('algorithm.retire_above', len(retired), 'prompts, and all are retired: nothing is left to learn')
    chosen, order, epoch = [], None, -1
    while len(chosen) < count:
        if position // len(retired) != epoch:
            epoch = position // len(retired)
            order = np.random.default_rng((seed, epoch)).permutation(len(retired))
        index = order[position % len(retired)]
        position += 1
        if not retired[index]:
            chosen.append(index)
    return np.array(chosen), position


def indices(seed, step, count, size):
    """The `count` example indices of a step when none is ever retired, i64[count]."""
    return walk(seed, step * count, count, np.zeros(size, bool))[0]


def prompts(dataset, chosen, length, pad_token):
    """(examples, Prompts of host arrays left-padded to `length`) of the chosen indices."""
    tokens = np.full((len(chosen), length), pad_token, np.int32)
    mask = np.zeros((len(chosen), length), bool)
    for row, index in enumerate(chosen):
        ids = dataset.tokens[index]
        tokens[row, length - len(ids):] = ids
        mask[row, length - len(ids):] = True
    examples = [dataset.examples[index] for index in chosen]
    return examples, Prompts(tokens, mask, np.array([e.id for e in examples], np.int32))
