"""Logprobs of completion tokens, chunked over tokens so that [B, T, V] logits never exist."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from grpo_jax.models import gather, transformer
from grpo_jax.models.mesh_ops import ALONE, MeshOps, VocabShards
from grpo_jax.types import Array, HeadOutput, Rollout

SHARE = 1 / 32  # of a device's memory that the float32 logits of a chunk may take
CHUNKS = 128, 4096  # tokens, the fewest and the most of a chosen chunk: fewer fill no tile of a TPU, more save nothing


class Head(NamedTuple):
    """How logprobs are computed from hidden states; static values."""

    temperature: float  # logits are divided by it before softmax; 0 counts as 1
    chunk: int  # tokens whose logits exist at once, at most
    entropy_gradient: bool = False  # whether the entropy is differentiable
    mesh_ops: MeshOps = ALONE
    top_k: int = 0  # how many of the likeliest tokens at each place are returned, with ids and logprobs
    top_below: int = 0  # only ids below this number are among them


class TokenLogprobs(NamedTuple):
    """Logprobs and entropies of completion tokens, 0 where masked: what completion_logprobs returns of a HeadOutput."""

    logprobs: Float[Array, 'B C']
    entropy: Float[Array, 'B C']


def completion_logprobs(
    params,
    rollout: Rollout,
    c: transformer.ModelConfig,
    *,
    temperature: float,
    chunk: int,
    remat: str,
    entropy_gradient: bool = False,
    mesh_ops: MeshOps = ALONE,
) -> TokenLogprobs:
    """(logprobs f32[B, C], entropy f32[B, C]) of completion tokens, 0 where masked.

    The distribution is softmax(logits / temperature) over the whole vocabulary. One forward pass reads prompt and
    completion. The head then runs on completion tokens alone, `chunk` of them at a time; where there are several
    chunks, the backward pass recomputes their logits. remat: see transformer.forward. entropy_gradient: whether the
    entropy is differentiable.
    """
    head = Head(temperature, chunk, entropy_gradient, mesh_ops)
    output: Any = padded_logprobs(params, rollout, c, head, remat)
    return TokenLogprobs(output.logprobs, output.entropy)


def padded_logprobs(
    params,
    rollout: Rollout,
    model_config: transformer.ModelConfig,
    head: Head,
    remat: str,
    ids: Int[Array, 'B C k'] | None = None,
) -> HeadOutput:
    """HeadOutput of a rollout's completion tokens, where each completion is a padded row.

    ids: other tokens in each place whose logprobs are returned too, as top_logprobs. remat: see transformer.forward.
    """
    queries = rollout.prompt_mask.shape[1]
    mask = jnp.concatenate([rollout.prompt_mask, rollout.completion_mask], 1)
    positions = transformer.positions_of(mask)
    hidden = transformer.forward(
        params, rollout.tokens, positions, mask, model_config, remat=remat, mesh_ops=head.mesh_ops
    )
    before, targets = hidden[:, queries - 1 : -1], rollout.tokens[:, queries:]
    return token_logprobs(params, before, targets, rollout.completion_mask, model_config, head, ids)


def token_logprobs(
    params,
    hidden: Float[Array, 'B C D'],
    targets: Int[Array, 'B C'],
    mask: Bool[Array, 'B C'],
    model_config: transformer.ModelConfig,
    head: Head,
    ids: Int[Array, 'B C k'] | None = None,
) -> HeadOutput:
    """HeadOutput of the target tokens; hidden: for each target, the hidden state before it.

    ids: other tokens in each place whose logprobs are returned too, as top_logprobs. If head.top_k is above 0, the head
    returns its likeliest tokens instead, as top_logprobs and top_ids.
    """

    def on_device(weights, hidden, mask, *tokens_and_shards):
        *tokens, shards = tokens_and_shards
        return _compute_chunks(weights, hidden, mask, tokens, shards, model_config, head)

    weights = transformer.head_weights(params, model_config)
    tokens = (targets,) if ids is None else (targets, ids)
    return head.mesh_ops.head(on_device, weights, hidden, mask, *tokens)


def _compute_chunks(weights, hidden, mask, tokens, shards: VocabShards, model_config, head: Head):
    """HeadOutput on one device, `head.chunk` tokens at a time; tokens are (targets,) or (targets, ids)."""
    shape, count = mask.shape, mask.size
    size = chunk_size(count, head.chunk)
    flat_mask = jnp.reshape(mask, -1)
    order, rank = compact(flat_mask, size)
    chunks = -(-shards.max_tokens(jnp.sum(flat_mask)) // size)

    def chunk_values(hidden, *tokens):
        logits = transformer.unembed_transposed(weights, shards.gather_tokens(hidden), model_config)
        logits = logits / (head.temperature or 1.0)
        values = _read_logits(logits, *map(shards.gather_tokens, tokens), shards=shards, head=head)
        return jax.tree.map(shards.own_tokens, values)

    def nothing(*arguments):
        shapes = jax.eval_shape(chunk_values, *arguments)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def one_chunk(chunk):
        index, places = chunk
        chunk_hidden, chunk_mask, *chunk_tokens = (
            jnp.asarray(x).reshape(count, *x.shape[2:]).at[places].get(mode='fill', fill_value=0, unique_indices=True)
            for x in (hidden, mask, *tokens)
        )
        values = jax.lax.cond(index < chunks, chunk_values, nothing, chunk_hidden, *chunk_tokens)
        return jax.tree.map(lambda x: jnp.where(chunk_mask.reshape(-1, *[1] * (x.ndim - 1)), x, 0), values)

    one_chunk = jax.checkpoint(one_chunk) if len(order) > 1 else one_chunk
    values = jax.lax.map(one_chunk, (jnp.arange(len(order)), order))

    def restore_order(x):
        return x.reshape(-1, *x.shape[2:]).at[rank].get(unique_indices=True).reshape(*shape, *x.shape[2:])

    return jax.tree.map(restore_order, values)


def chunk_size(count: int, most: int) -> int:
    """The size, at most `most`, of the equal chunks into which `count` tokens are cut.

    Where there are several chunks, the size is a multiple of a TPU's tile, and of such sizes the one that leaves the
    least room in the last chunk: 4352 tokens with most = 1024 are 5 chunks of 896, and 2304 with 512 are 6 of 384.
    """
    tile = CHUNKS[0]
    if count <= most or most < 2 * tile:
        even = -(-count // -(-count // most))
        return min(even + -even % tile, most, count)
    sizes = range(most - most % tile, most // 2, -tile)
    return min(sizes, key=lambda size: -count % size)


def compact(mask: Bool[Array, ' N'], size: int) -> tuple[Int[Array, 'chunks size'], Int[Array, ' N']]:
    """(order, rank): orders N tokens so that those under the mask come first, in chunks of `size`.

    order[chunk, i] is the token in that place, and rank[token] its place in the flat order. Chunks without a token
    under the mask come last, so that they can be skipped. The last chunk is filled up with N, which is no token.
    """
    count = mask.size
    rank = jnp.where(mask, jnp.cumsum(mask) - 1, jnp.sum(mask) + jnp.cumsum(~mask) - 1)
    order = jnp.full(count + -count % size, count).at[rank].set(jnp.arange(count), unique_indices=True)
    return order.reshape(-1, size), rank


def _read_logits(logits, targets, ids=None, *, shards: VocabShards, head: Head):
    """HeadOutput, [n, ...], of n tokens from their logits f32[V, n]; V may be this device's shard of the vocabulary."""
    first, count = shards.vocab_range(len(logits))
    inside = True if isinstance(count, int) else (jnp.arange(len(logits)) < count)[:, None]
    highest = shards.max_vocab(jax.lax.stop_gradient(jnp.max(logits, 0, where=inside, initial=-jnp.inf)))
    below = jnp.where(inside, logits - highest, 0.0)
    weights = jnp.where(inside, jnp.exp(below), 0.0)
    total = shards.sum_vocab(jnp.sum(weights, 0))

    def pick(tokens):
        """f32[n]: logprobs of the tokens i32[n]."""
        places = tokens - first
        here = (places >= 0) & (places < count)
        picked = gather.pick(below, jnp.where(here, places, 0))
        return shards.sum_vocab(jnp.where(here, picked, 0.0)) - jnp.log(total)

    logprobs, top = pick(targets), {}
    if head.top_k:
        likeliest = _likeliest_tokens(jnp.where(inside, below, -jnp.inf) - jnp.log(total), first, shards, head)
        top = dict(zip(('top_logprobs', 'top_ids'), likeliest, strict=True))
    elif ids is not None:
        top = {'top_logprobs': jax.vmap(pick, in_axes=1, out_axes=1)(ids)}
    if not head.entropy_gradient:  # a new output that needs a gradient is computed above
        weights, below, total = jax.lax.stop_gradient((weights, below, total))
    entropy = jnp.log(total) - shards.sum_vocab(jnp.sum(weights * below, 0)) / total
    return HeadOutput(logprobs, entropy, **top)


def _likeliest_tokens(logprobs, first, shards, head):
    """(logprobs f32[n, k], ids i32[n, k]): the head.top_k likeliest tokens with ids below head.top_below.

    logprobs f32[V, n] cover this device's shard of the vocabulary, whose first id is `first`.
    """
    ids = first + jnp.arange(len(logprobs))
    allowed_Vn = jnp.where(ids[:, None] < head.top_below, logprobs, -jnp.inf)
    values, places = jax.lax.top_k(allowed_Vn.T, min(head.top_k, len(logprobs)))
    values, ids = shards.gather_vocab(values), shards.gather_vocab(ids[places])
    values, places = jax.lax.top_k(values, head.top_k)
    return values, jnp.take_along_axis(ids, places, 1)
