"""Rotary positions, and attention of many queries at once; models.cache has the attention of one new token."""

from collections.abc import Mapping
import functools
import importlib
import math
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int
import numpy as np

from grpo_jax.models import gather
from grpo_jax.types import Array, Pytree, pytree

QUERY_CHUNK = 512  # queries of a long row whose weights exist at once; the backward pass recomputes the weights
CHUNK_ABOVE_PAIRS = 2**19  # a row is long if it has more pairs of a query and a key than this
MASKED = -2e38  # finite, so that a row without any allowed key yields a mean and not NaN

Angles = tuple[Float[Array, 'B T 1 h'], Float[Array, 'B T 1 h']]  # (cos, sin) of rotary positions; h <= H / 2


class Rule(NamedTuple):
    """What a layer's attention computes, and by which code; the defaults are Llama's."""

    scale: float | None = None  # factor of products of queries with keys; None: 1 / sqrt(H)
    cap: float = 0.0  # soft cap of the scaled products; 0: none
    window: Int[Array, ''] | None = None  # positions that a query attends to, up to its own; None: all
    by: str = 'xla'  # xla; splash: models.kernels.splash; cudnn: NVIDIA's kernels where they can, elsewhere xla


LLAMA = Rule()


@pytree
class PackedMask(Pytree):
    """Which tokens attend to which in packed rows.

    A row holds groups one after another. A group is a prompt, then the completions that share it. A prompt attends to
    itself, a completion to its prompt and to itself, both causally. Groups begin at multiples of `block`, so that all
    queries in a block have the same prompt.
    """

    part: Int[Array, 'B T']  # 0: a prompt's token, n > 0: a token of completion n, -1: padding
    positions: Int[Array, 'B T']
    start: Int[Array, 'B blocks']  # column where the prompt for this block's queries begins
    length: Int[Array, 'B blocks']  # tokens in that prompt
    block: int = struct.field(pytree_node=False)  # columns in a block
    queries: int = struct.field(pytree_node=False)  # most columns that a prompt has
    tokens: int = struct.field(pytree_node=False)  # most columns that a completion has


def attend(
    q: Float[Array, 'B T N H'],
    k: Float[Array, 'B S K H'],
    v: Float[Array, 'B S K H'],
    visible: Bool[Array, 'B S'] | PackedMask,
    rule: Rule = LLAMA,
    first: int | Int[Array, ''] = 0,
) -> Float[Array, 'B T N H']:
    """Attention output of queries over keys and values; scores and softmax are float32.

    visible: the valid columns of causal attention, or a PackedMask. first: the column of the first query; the others
    follow it. rule.by 'splash' wants the valid columns of a row side by side, and gives output 0 to a query that
    attends to nothing. Neither splash nor cuDNN writes scores and weights to main memory.
    """
    if rule.by == 'splash':
        scale, cap, window, _ = rule  # all of it: a field that the kernel does not know must not pass it by
        runs, max_columns = _column_runs(visible, window, first, q.shape[1])
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        splash = importlib.import_module('grpo_jax.models.kernels.splash')  # loads Pallas, where it is chosen
        return splash.attend_runs(q, k, v, runs, scale=scale, cap=cap, max_columns=max_columns)
    if isinstance(visible, PackedMask):
        return _attend_packed(q, k, v, visible, rule, first)
    if q.shape[1] * k.shape[1] <= CHUNK_ABOVE_PAIRS or q.shape[1] % QUERY_CHUNK:
        return _softmax_attention(q, k, v, causal_mask(visible, first, q.shape[1], rule.window), rule)

    @jax.checkpoint
    def attend_chunk(chunk):
        start, queries = chunk
        return _softmax_attention(queries, k, v, causal_mask(visible, first + start, QUERY_CHUNK, rule.window), rule)

    starts = jnp.arange(0, q.shape[1], QUERY_CHUNK)
    chunks = q.reshape(len(q), -1, QUERY_CHUNK, *q.shape[2:]).swapaxes(0, 1)
    return jax.lax.map(attend_chunk, (starts, chunks)).swapaxes(0, 1).reshape(q.shape)


def _column_runs(visible, window, first, count):
    """(runs i32[B, R, T], max_columns) for splash.attend_runs: the columns that each query attends to.

    The first run ends with the query itself. Packed rows have a second one, in the completion's prompt. `count` queries
    begin at column `first`.
    """
    packed = isinstance(visible, PackedMask)
    part = visible.part if packed else visible - 1
    columns = jnp.arange(part.shape[1])
    begins = jnp.concatenate([jnp.ones_like(part[:, :1], bool), part[:, 1:] != part[:, :-1]], 1)
    low = jax.lax.cummax(jnp.where(begins, columns, 0), axis=1)
    if window is not None:
        low = jnp.maximum(low, columns - window + 1)
    runs = [low, jnp.where(part < 0, 0, columns + 1)]
    if packed:
        start, length = (jnp.repeat(x, visible.block, 1) for x in (visible.start, visible.length))
        low = start if window is None else jnp.maximum(start, start + visible.positions - window + 1)
        runs += [low, jnp.where(part > 0, start + length, 0)]
    max_columns = visible.queries + visible.tokens if packed else 0
    return jax.lax.dynamic_slice_in_dim(jnp.stack(runs, 1), first, count, 2), max_columns


def soft_cap(x: Float[Array, '...'], cap: float) -> Float[Array, '...']:
    """cap * tanh(x / cap), which lies between -cap and cap; cap 0: x."""
    return cap * jnp.tanh(x / cap) if cap else x


def _softmax_attention(q, k, v, allowed, rule):
    """Attention output [B, T, N, H] by XLA or cuDNN; allowed: bool[B, 1, T, S], whether a query attends to a key."""
    if _uses_cudnn(q, k, rule):
        return jax.nn.dot_product_attention(q, k, v, mask=allowed, scale=rule.scale, implementation='cudnn')
    b, t, n, h = q.shape
    heads = k.shape[2]
    grouped = q.reshape(b, t, heads, n // heads, h)
    products = jnp.einsum('btkgh,bskh->bkgts', grouped, k, preferred_element_type=jnp.float32)
    scores = soft_cap(products / math.sqrt(h) if rule.scale is None else products * rule.scale, rule.cap)
    weights = jax.nn.softmax(jnp.where(allowed[:, :, None], scores, MASKED), -1).astype(q.dtype)
    out = jnp.einsum('bkgts,bskh->btkgh', weights, v, preferred_element_type=jnp.float32)
    return out.reshape(b, t, n, h).astype(q.dtype)


def _uses_cudnn(q, k, rule):
    """Whether cuDNN computes this attention: rule.by is 'cudnn' and its kernels take q [B, T, N, H] and k [B, S, K, H].

    The kernels take two-byte dtypes and head dims H that are multiples of 8 up to 128, and they know no soft cap. jax
    gives them our mask as a bias; with a bias, their backward pass needs even T and S.
    """
    if rule.by != 'cudnn':
        return False
    _, cap, _, _ = rule  # this fails when Rule gets another field, so that nobody forgets to handle it here
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and q.shape[1] % 2 == 0 and k.shape[1] % 2 == 0
    return q.dtype.itemsize == 2 and not cap and fits


def causal_mask(
    mask: Bool[Array, 'B S'],
    first: int | Int[Array, ''] = 0,
    count: int | None = None,
    window: Int[Array, ''] | None = None,
) -> Bool[Array, 'B 1 T S']:
    """Whether a query may attend to a key in a padded batch, whose padding may lie anywhere.

    mask: the valid columns. The queries are the `count` columns from `first` on; by default all columns. window: as in
    Rule; it counts valid columns only.
    """
    columns = mask.shape[1]
    count = columns if count is None else count
    rows = first + jnp.arange(count)
    allowed = (jnp.arange(columns) <= rows[:, None]) & mask[:, None, :]
    if window is not None:
        positions = jnp.cumsum(mask, -1)
        query_positions = jax.lax.dynamic_slice_in_dim(positions, first, count, 1)
        allowed &= query_positions[:, :, None] - positions[:, None] < window
    return allowed[:, None]


def _attend_packed(q, k, v, packed, rule, first):
    """What attend returns for a PackedMask: a block of queries attends to a band of columns before it, and its prompt.

    The band holds as many columns as a completion can have before a query.
    """
    rows, columns = packed.part.shape
    block, all_blocks = packed.block, columns // packed.block
    blocks, first = q.shape[1] // block, first // block
    earlier = min(-(-(packed.tokens - 1) // block), all_blocks - 1)  # blocks in front that a completion may reach

    def query_blocks(x):
        """The blocks of these queries, [B, blocks, ...], of x [B, all blocks, ...]."""
        return jax.lax.dynamic_slice_in_dim(x, first, blocks, 1)

    def band(x, fill=0):
        """Each block with the blocks before it, [B, blocks, (earlier + 1) * block, ...], of x [B, S, ...]."""
        padded = jnp.pad(x, ((0, 0), (earlier * block, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
        padded = padded.reshape(rows, all_blocks + earlier, block, *x.shape[2:])
        shifted = [jax.lax.dynamic_slice_in_dim(padded, first + i, blocks, 1) for i in range(earlier + 1)]
        return jnp.concatenate(shifted, 2)

    start, length = query_blocks(packed.start)[..., None], query_blocks(packed.length)[..., None]
    prompt_columns = jnp.arange(min(packed.queries, columns))
    places = jnp.minimum(start + prompt_columns, columns - 1).reshape(rows, -1)

    def prompt(x):
        """The prompt for each block, [B, blocks, queries, ...], of x [B, S, ...]."""
        return jax.vmap(gather.take)(x, places).reshape(rows, blocks, -1, *x.shape[2:])

    part = query_blocks(packed.part.reshape(rows, all_blocks, block))[..., None]
    within = jnp.arange(block)[:, None]
    same_completion = (part > 0) & (part == band(packed.part, -1)[:, :, None])
    not_later = jnp.arange((earlier + 1) * block) <= earlier * block + within
    column = (first + jnp.arange(blocks)[:, None]) * block + within[:, 0]
    prompt_token = (prompt_columns < length[..., None]) & (prompt_columns <= (column - start)[..., None])
    if rule.window is not None:
        not_later &= earlier * block + within - jnp.arange((earlier + 1) * block) < rule.window
        positions = query_blocks(packed.positions.reshape(rows, all_blocks, block))[..., None]
        prompt_token &= positions - prompt_columns < rule.window  # a prompt's tokens count positions from 0
    allowed = jnp.concatenate([same_completion & not_later, prompt_token], -1)

    def flat(x):
        return x.reshape(rows * blocks, *x.shape[2:])

    queries = q.reshape(rows * blocks, block, *q.shape[2:])
    keys, values = (flat(jnp.concatenate([band(x), prompt(x)], 2)) for x in (k, v))
    mask = flat(allowed)[:, None]
    if q.shape[1] * keys.shape[1] <= CHUNK_ABOVE_PAIRS:
        return _softmax_attention(queries, keys, values, mask, rule).reshape(q.shape)

    if _uses_cudnn(queries, keys, rule):  # all blocks at once, or most of the chip would idle
        attend_blocks = jax.checkpoint(functools.partial(_softmax_attention, rule=rule))
        return attend_blocks(queries, keys, values, mask).reshape(q.shape)

    @jax.checkpoint
    def attend_block(inputs):
        q, k, v, mask = (x[None] for x in inputs)
        return _softmax_attention(q, k, v, mask, rule)[0]

    batch_size = max(1, QUERY_CHUNK // block)
    return jax.lax.map(attend_block, (queries, keys, values, mask), batch_size=batch_size).reshape(q.shape)


def rope_frequencies(
    size: int, theta: float, scaling: tuple[tuple[str, Any], ...]
) -> tuple[Float[np.ndarray, ' h'], float]:
    """(inverse frequencies f64[size / 2], factor for cos and sin) of rotary positions on `size` numbers of a head.

    theta: the base; 0 rotates nothing. scaling: (name, value) pairs as in Hugging Face's rope_parameters. The types
    default, linear, llama3, yarn and longrope follow transformers' modeling_rope_utils (YaRN: arXiv 2309.00071,
    LongRoPE: arXiv 2402.13753).
    """
    if not theta:
        return np.zeros(size // 2), 1.0
    base = theta ** -(np.arange(0, size, 2) / size)
    options = dict(scaling)
    kind = options.get('rope_type', 'default')
    if kind == 'default':
        return base, 1.0
    if kind == 'longrope':  # a run is no longer than original_max_position_embeddings, see families.context_length
        factor, original = options['factor'], options['original_max_position_embeddings']
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return base / np.asarray(options['short_factor']), options.get('attention_factor', attention)
    factor = options['factor']
    if kind == 'linear':
        return base / factor, 1.0
    if kind == 'llama3':
        wavelength = 2 * np.pi / base
        original = options['original_max_position_embeddings']
        low, high = options['low_freq_factor'], options['high_freq_factor']
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        return (1 - smooth) * base / factor + smooth * base, 1.0
    return _yarn_frequencies(base, size, theta, options)


def _yarn_frequencies(base, size: int, theta: float, options: Mapping):
    """What rope_frequencies returns for YaRN; base: the frequencies without scaling, options: `scaling` as a dict."""
    factor, original = options['factor'], options['original_max_position_embeddings']

    def magnitude(scale, coefficient=1.0):
        return 0.1 * coefficient * math.log(scale) + 1.0 if scale > 1 else 1.0

    def dimension(rotations):
        """The index, not rounded, of the frequency that turns so often within the original context."""
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(options.get('beta_fast') or 32)
    high = dimension(options.get('beta_slow') or 1)
    if options.get('truncate', True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies = ramp * base / factor + (1 - ramp) * base
    attention = options.get('attention_factor')
    if attention is None:
        mscale, mscale_all = options.get('mscale'), options.get('mscale_all_dim')
        attention = (
            magnitude(factor, mscale) / magnitude(factor, mscale_all) if mscale and mscale_all else magnitude(factor)
        )
    return frequencies, attention


def rope_angles(positions: Int[Array, 'B T'], size: int, theta: float, scaling: tuple[tuple[str, Any], ...]) -> Angles:
    """(cos, sin) of the positions' angles, float32; size, theta and scaling as in rope_frequencies."""
    frequencies, factor = rope_frequencies(size, theta, scaling)
    # float32: bfloat16 rounds position 257 to 256
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles)[:, :, None] * factor, jnp.sin(angles)[:, :, None] * factor


def rotate(x: Float[Array, 'B T N H'], angles: Angles) -> Float[Array, 'B T N H']:
    """x with each head's pairs (i, i + h) rotated by angle number i, for i < h, as in Hugging Face's models.

    The numbers of a head from 2 h on stay as they are.
    """
    size = 2 * angles[0].shape[-1]
    if size < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], angles), x[..., size:]], -1)
    cos, sin = (angle[..., None, :] for angle in angles)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # the reversal is a plain read to XLA on CPUs, where splitting and joining halves took half of a decode step
    rotated = halves * cos + halves[..., ::-1, :] * jnp.concatenate([-sin, sin], -2)
    return rotated.reshape(x.shape).astype(x.dtype)
