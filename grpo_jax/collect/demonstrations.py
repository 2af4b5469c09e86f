"""Demonstrations: completions that come with the data, made into a rollout."""

from collections.abc import Callable, Sequence
import logging
from typing import Any

import numpy as np

from grpo_jax import data
from grpo_jax.algorithms import Algorithm, advantages, ratios, surrogates, weights
from grpo_jax.errors import BadInput
from grpo_jax.example import Example
from grpo_jax.sampler.sampling import Sampling
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
    dataset: data.Dataset, tokenizer: Any, fields: Sequence[str], options: data.DataOptions, sampling: Sampling
) -> tuple[data.Dataset, list[list[list[int]]]]:
    """(Dataset, token ids) of examples with completions in these fields of their meta, as encode_completions returns.

    After each completion stand the tokens that end a turn, see data.find_end. options, sampling: the run's.
    """
    end = data.find_end(tokenizer, options.prompt_format, sampling.stop_tokens)

    def encode(example):
        return [data.encode_turn(tokenizer, example.meta[field], end) for field in fields]

    return encode_completions(dataset, fields, encode, sampling.max_tokens, options.name)


def encode_completions(
    dataset: data.Dataset, fields: Sequence[str], encode: Callable[[Example], list], max_tokens: int, dataset_name: str
) -> tuple[data.Dataset, list[list[list[int]]]]:
    """Returns (the Dataset of the examples that are kept, [encode(example) of each of these examples]).

    An example is kept if its meta has all `fields`, and if each of its completions has at most max_tokens tokens
    (rollout.max_tokens). A warning counts the others. encode(example) returns a list of token ids for each completion.
    dataset_name: for messages. Raises BadInput if no example is kept, or if a field has another type than in FIELDS.
    """
    with_fields = [i for i, e in enumerate(dataset.examples) if all(field in e.meta for field in fields)]
    if not with_fields:
        raise BadInput(
            'data.name',
            dataset_name,
            f'has no example with {" and ".join(fields)}; name another data set, or train a policy without them: '
            "supervised.updates=0 and collection.source='policy'",
        )
    for example in (dataset.examples[i] for i in with_fields):
        for field in fields:
            kind = FIELDS.get(field, object)
            if not isinstance(example.meta[field], kind):
                value = str(example.meta[field])[:80]
                raise BadInput(f'{field} of example {example.id}', value, f'must be a {kind.__name__}; mend its row')
    completions = {i: encode(dataset.examples[i]) for i in with_fields}
    kept = [i for i in with_fields if max(map(len, completions[i])) <= max_tokens]
    if not kept:
        least = min(max(map(len, completions[i])) for i in with_fields)
        raise BadInput(
            'rollout.max_tokens',
            max_tokens,
            f'is too short for the {" and ".join(fields)} of every example, of which the shortest has {least} tokens; '
            'raise it, or leave the cold start out by supervised.updates=0',
        )
    for count, reason in [
        (len(dataset.examples) - len(with_fields), f'lack {" or ".join(fields)}'),
        (len(with_fields) - len(kept), f'are longer than rollout.max_tokens={max_tokens}'),
    ]:
        if count:
            logger.warning('%d of %d examples %s and are left out', count, len(dataset.examples), reason)
    return data.pick(dataset, kept), [completions[i] for i in kept]


def as_rollout(
    prompts: Prompts, completions: Sequence[Sequence[Sequence[int]]], shapes: batches.Shapes, pad_token: int
) -> Rollout:
    """The Rollout, on the host, of given completions: token ids by prompt and by place in its group; logprobs are 0."""
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
