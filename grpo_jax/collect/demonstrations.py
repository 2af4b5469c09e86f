"""Demonstrations: completions that come with the data, made into a rollout."""

from collections.abc import Callable, Sequence
import logging
from typing import Any

import numpy as np

from grpo_jax import data
from grpo_jax.algorithms import Algorithm, advantages, ratios, surrogates, weights
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.sharding import batches
from grpo_jax.types import Prompts, Rollout

logger = logging.getLogger('grpo_jax')
# cross entropy is the policy gradient with every advantage 1, averaged over tokens
SFT = Algorithm(
    advantage=advantages.group_mean,
    ratio=ratios.token,
    surrogate=surrogates.policy_gradient,
    weights=weights.token_mean,
)
# the fields of an example's meta that completions are made of, with their types
FIELDS = {'demonstration': str, 'rejected': str, 'steps': list, 'labels': list}


def find(
    dataset: data.Dataset, tokenizer: Any, fields: Sequence[str], most: int, name: str
) -> tuple[data.Dataset, list[list[list[int]]]]:
    """(Dataset, completions) of the examples whose meta has all `fields`, and whose completions fit.

    completions[i] has the token ids of each field in its order, with the stop token. most, name: see read_completions.
    """

    def encode(example):
        return [
            tokenizer.encode(example.meta[field], add_special_tokens=False) + [tokenizer.eos_token_id]
            for field in fields
        ]

    return read_completions(dataset, fields, encode, most, name)


def read_completions(
    dataset: data.Dataset, fields: Sequence[str], encode: Callable[[Example], list], most: int, name: str
) -> tuple[data.Dataset, list[list[list[int]]]]:
    """(Dataset, [encode(example), ...]) of the examples whose meta has all `fields`, and whose completions fit.

    encode(example) returns the token ids of the example's completions, a list for each; a completion fits if it has at
    most `most` tokens, which is rollout.max_tokens. name: of the data set, for messages. Raises BadInput if no example
    remains or a field has another type.
    """
    have = [i for i, e in enumerate(dataset.examples) if all(field in e.meta for field in fields)]
    if not have:
        raise BadInput(
            'data.name',
            name,
            f'has no example with {" and ".join(fields)}; name another data set, or train a policy without them: '
            "supervised.updates=0 and collection.source='policy'",
        )
    for example in (dataset.examples[i] for i in have):
        for field in fields:
            kind = FIELDS.get(field, object)
            if not isinstance(example.meta[field], kind):
                value = str(example.meta[field])[:80]
                raise BadInput(f'{field} of example {example.id}', value, f'must be a {kind.__name__}; mend its row')
    completions = {i: encode(dataset.examples[i]) for i in have}
    kept = [i for i in have if max(map(len, completions[i])) <= most]
    if not kept:
        least = min(max(map(len, completions[i])) for i in have)
        raise BadInput(
            'rollout.max_tokens', most, f'is too short for the completions of every example; use {least} or more'
        )
    for count, reason in [
        (len(dataset.examples) - len(have), f'lack {" or ".join(fields)}'),
        (len(have) - len(kept), f'are longer than rollout.max_tokens={most}'),
    ]:
        if count:
            logger.warning('%d of %d examples %s and are left out', count, len(dataset.examples), reason)
    return data.pick(dataset, kept), [completions[i] for i in kept]


def as_rollout(
    prompts: Prompts, completions: Sequence[Sequence[Sequence[int]]], shapes: batches.Shapes, pad_token: int
) -> Rollout:
    """The Rollout, on the host, that holds these completions; its logprobs are 0.

    completions[p] has the token ids of prompt p's completions, group_size of them.
    """
    ids = [row for group in completions for row in group]
    tokens = np.full((len(ids), shapes.tokens), pad_token, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, completion in enumerate(ids):
        tokens[row, : len(completion)] = completion
        mask[row, : len(completion)] = True
    before, prompt_mask = (np.repeat(x, shapes.group_size, 0) for x in (prompts.tokens, prompts.mask))
    return Rollout(
        tokens=np.concatenate([before, tokens], 1),
        prompt_mask=prompt_mask,
        completion_mask=mask,
        logprobs=np.zeros(tokens.shape, np.float32),
        truncated=np.zeros(len(tokens), bool),
        version=np.zeros(tokens.shape, np.int32),
        forced=np.zeros(tokens.shape, bool),
    )
