"""The places in a forward pass where devices exchange values; a single device exchanges nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_jax.models import attention
from grpo_jax.models.linear import lookup


def _keep(x):
    return x


def _whole_range(size):
    """(first id, number of ids) of a shard that is the whole vocabulary."""
    return 0, size


class VocabShards(NamedTuple):
    """How devices share the head's work: each has some tokens and a shard of the vocabulary.

    The defaults are for a single device, which has all tokens and the whole vocabulary.
    """

    # a device's tokens -> the tokens of all devices that share the vocabulary
    gather_tokens: Callable[..., Any] = _keep
    own_tokens: Callable[..., Any] = _keep  # the inverse
    sum_vocab: Callable[..., Any] = _keep  # the sum over the shards of the vocabulary
    max_vocab: Callable[..., Any] = _keep  # the maximum over the shards of the vocabulary
    gather_vocab: Callable[..., Any] = _keep  # [n, k] on each shard of the vocabulary -> all shards' side by side
    max_tokens: Callable[..., Any] = _keep  # the maximum over the devices that share the vocabulary
    vocab_range: Callable[..., Any] = _whole_range  # size of a shard -> (first id, number of ids)


def _head_on_one_device(function, weights, *arrays):
    """Calls the function of the head with all weights and VocabShards of one device."""
    return function(weights, *arrays, VocabShards())


class MeshOps(NamedTuple):
    """The five places in a forward pass where devices exchange values; the defaults are for one device."""

    embed: Callable[..., Any] = lookup  # (table, tokens, dtype) -> [B, T, D]
    weights: Callable[..., Any] = _keep  # a layer's weights -> the same, whole where they are multiplied
    hidden: Callable[..., Any] = _keep  # [B, T, D] -> the same, sharded by rows and columns
    attend: Callable[..., Any] = attention.attend
    head: Callable[..., Any] = _head_on_one_device  # (function, head's weights, arrays [B, T, ...]) ->
    # function(weights, *arrays, VocabShards) on each device


ALONE = MeshOps()
