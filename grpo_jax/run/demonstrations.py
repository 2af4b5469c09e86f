"""Demonstrations: completions that come with the data, in the form of a rollout."""

import logging

import numpy as np

from grpo_jax import data
from grpo_jax.errors import BadInput
from grpo_jax.types import Rollout

logger = logging.getLogger('grpo_jax')
FIELDS = {'demonstration': str, 'rejected': str, 'steps': list, 'labels': list}  # of meta that completions are made of


def find(experiment, fields=('demonstration',)):
    """(Dataset, completions) of the examples whose meta has all fields and whose completions fit.

    completions[i] has for each field the token ids with the stop token.
    """
    stop = experiment.tokenizer.eos_token_id

    def encode(example):
        return [experiment.tokenizer.encode(example.meta[field], add_special_tokens=False) + [stop] for field in fields]

    return read_completions(experiment, 'train', fields, encode)


def read_completions(experiment, split, fields, encode):
    """(Dataset, encode(example) of each) of the split's examples whose meta has all fields and whose completions fit.

    encode(example) lists an example's completions, each a list of tokens that must not pass rollout.max_tokens.
    """
    dataset, most = experiment.load(split), experiment.config.rollout.max_tokens
    have = [i for i, e in enumerate(dataset.examples) if all(field in e.meta for field in fields)]
    if not have:
        raise BadInput(
            'data.name',
            experiment.config.data.name,
            f'has no example with {" and ".join(fields)}; use another, '
            "or supervised.updates=0 and collection.source='policy'",
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
        raise BadInput('rollout.max_tokens', most, 'is shorter than every demonstration')
    for count, reason in [
        (len(dataset.examples) - len(have), f'lack {" or ".join(fields)}'),
        (len(have) - len(kept), f'are longer than rollout.max_tokens={most}'),
    ]:
        if count:
            logger.warning('%d of %d examples %s and are left out', count, len(dataset.examples), reason)
    return data.pick(dataset, kept), [completions[i] for i in kept]


def as_rollout(experiment, dataset, completions, chosen, shapes):
    """The chosen examples' completions in the form that the learner eats, group_size of each."""
    _, prompts = data.prompts(dataset, chosen, shapes.queries, experiment.pad_token)
    ids = [row for index in chosen for row in completions[index]]
    tokens = np.full((len(ids), shapes.tokens), experiment.pad_token, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, kept in enumerate(ids):
        tokens[row, : len(kept)] = kept
        mask[row, : len(kept)] = True
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
