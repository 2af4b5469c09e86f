"""What a forward pass does where its values are cut over several devices; alone, a device does nothing."""

from collections.abc import Callable
from typing import NamedTuple

from grpo_jax.models import attention
from grpo_jax.models.quantize import rows


def _same(x):
    return x


def _whole(size):
    return 0, size


class VocabShards(NamedTuple):
    """How devices share the head's work: each has some tokens and a shard of the vocabulary; alone, all of both."""

    gather_tokens: Callable = _same  # arrays of a device's tokens -> those of all devices that share the vocabulary
    own_tokens: Callable = _same  # the inverse
    sum_vocab: Callable = _same  # the sum over the shards of the vocabulary
    max_vocab: Callable = _same  # the maximum over them
    max_tokens: Callable = _same  # the maximum over the devices that share the vocabulary
    vocab_range: Callable = _whole  # size of a shard -> (first id, number of ids)


def _head(function, weights, *arrays):
    return function(weights, *arrays, VocabShards())


class Collectives(NamedTuple):
    """The five places in a forward pass where devices exchange values; the defaults are for one device."""

    embed: Callable = rows  # (table, tokens, dtype) -> [B, T, D]
    weights: Callable = _same  # a layer's weights -> the same, whole where they are multiplied
    hidden: Callable = _same  # [B, T, D] -> the same, cut by rows and columns
    attend: Callable = attention.attend
    head: Callable = _head  # (function, head's weights, arrays [B, T, ...]) ->
    # function(weights, *arrays, VocabShards) on each device


ALONE = Collectives()
