"""Rotary positions and attention: the one place that multiplies queries with keys."""

import math
from typing import no_type_check

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

AT_ONCE = 512  # queries whose weights exist at once, recomputed in the backward pass, of a row with
MANY = 2**19  # more pairs of a query and a key than that
MASKED = -2e38  # finite, so that a row without any allowed key yields a mean and not NaN


@no_type_check
@struct.dataclass
class Packed:
    """What may attend to what in rows of groups one after another: a prompt, then completions that share it.

    A completion sees its prompt and itself. Groups begin at multiples of `block`, so that a block's queries have
    one prompt; a completion reaches `tokens` columns back at most, a prompt has `queries` at most.
    """

    part: jax.Array  # i32[B, T] 0: of a prompt, above: of the completion of that number, -1: of nothing
    start: jax.Array  # i32[B, T / block] column where the prompt of the block's group begins
    length: jax.Array  # i32[B, T / block] its tokens
    block: int = struct.field(pytree_node=False)
    queries: int = struct.field(pytree_node=False)
    tokens: int = struct.field(pytree_node=False)


def attend(q, k, v, visible, first=0):
    """Attention output [B, T, N, H] of queries [B, T, N, H] over keys and values [B, S, K, H].

    visible is bool[B, S], the valid columns of causal attention, or Packed. The queries are those of columns
    first .. first + T. Logits and softmax are float32.
    """
    if isinstance(visible, Packed):
        return _attend_packed(q, k, v, visible, first)
    if q.shape[1] * k.shape[1] <= MANY or q.shape[1] % AT_ONCE:
        return _softmax_attention(q, k, v, causal(visible, first, q.shape[1]))

    @jax.checkpoint
    def of_some(some):
        start, queries = some
        return _softmax_attention(queries, k, v, causal(visible, first + start, AT_ONCE))

    starts = jnp.arange(0, q.shape[1], AT_ONCE)
    found = jax.lax.map(of_some, (starts, q.reshape(len(q), -1, AT_ONCE, *q.shape[2:]).swapaxes(0, 1)))
    return found.swapaxes(0, 1).reshape(q.shape)


def _softmax_attention(q, k, v, allowed):
    """attend with allowed bool[B, 1, T, S]."""
    b, t, n, h = q.shape
    heads = k.shape[2]
    grouped = q.reshape(b, t, heads, n // heads, h)
    scores = jnp.einsum('btkgh,bskh->bkgts', grouped, k, preferred_element_type=jnp.float32) / math.sqrt(h)
    weights = jax.nn.softmax(jnp.where(allowed[:, :, None], scores, MASKED), -1).astype(q.dtype)
    out = jnp.einsum('bkgts,bskh->btkgh', weights, v, preferred_element_type=jnp.float32)
    return out.reshape(b, t, n, h).astype(q.dtype)


def causal(mask, first=0, count=None):
    """Allowed pairs bool[B, 1, T, S] of a left- or right-padded batch with mask bool[B, S].

    The queries are those of columns first .. first + count; by default all.
    """
    columns = mask.shape[1]
    rows = first + jnp.arange(columns if count is None else count)
    return ((jnp.arange(columns) <= rows[:, None]) & mask[:, None, :])[:, None]


def _attend_packed(q, k, v, packed, first):
    """attend by blocks of queries, each over the columns that its completions may reach and over its prompt."""
    rows, columns = packed.part.shape
    block, whole = packed.block, columns // packed.block
    blocks, first = q.shape[1] // block, first // block
    back = min(-(-(packed.tokens - 1) // block), whole - 1)  # earlier blocks that a completion reaches into

    def own(x):
        return jax.lax.dynamic_slice_in_dim(x, first, blocks, 1)

    def band(x, fill=0):
        """[B, S, ...] -> [B, blocks, (back + 1) * block, ...]: a block and those before it."""
        cut = jnp.pad(x, ((0, 0), (back * block, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
        cut = cut.reshape(rows, whole + back, block, *x.shape[2:])
        return jnp.concatenate([jax.lax.dynamic_slice_in_dim(cut, first + i, blocks, 1) for i in range(back + 1)], 2)

    start, length = own(packed.start)[..., None], own(packed.length)[..., None]
    of_prompt = jnp.arange(min(packed.queries, columns))
    places = jnp.minimum(start + of_prompt, columns - 1).reshape(rows, -1)

    def prompt(x):
        """[B, S, ...] -> [B, blocks, queries, ...]: the prompt of a block's group."""
        return jnp.take_along_axis(x, places[..., None, None], 1).reshape(rows, blocks, -1, *x.shape[2:])

    mine = own(packed.part.reshape(rows, whole, block))[..., None]
    within = jnp.arange(block)[:, None]
    same = (mine > 0) & (mine == band(packed.part, -1)[:, :, None])
    causal_ = jnp.arange((back + 1) * block) <= back * block + within
    column = (first + jnp.arange(blocks)[:, None]) * block + within[:, 0]
    seen = (of_prompt < length[..., None]) & (of_prompt <= (column - start)[..., None])
    allowed = jnp.concatenate([same & causal_, seen], -1)

    def flat(x):
        return x.reshape(rows * blocks, *x.shape[2:])

    inputs = (
        q.reshape(rows * blocks, block, *q.shape[2:]),
        *(flat(jnp.concatenate([band(x), prompt(x)], 2)) for x in (k, v)),
        flat(allowed)[:, None],
    )
    if q.shape[1] * inputs[1].shape[1] <= MANY:
        return _softmax_attention(*inputs).reshape(q.shape)
    one = jax.checkpoint(lambda inputs: _softmax_attention(*(x[None] for x in inputs))[0])
    return jax.lax.map(one, inputs, batch_size=max(1, AT_ONCE // block)).reshape(q.shape)


def rope_frequencies(head_dim, theta, scaling):
    """(inverse frequencies f64[H/2], factor on cos and sin) of the rotary embedding.

    `scaling` is a tuple of (name, value) pairs as in Hugging Face's rope_parameters; types default,
    linear, llama3 and yarn follow transformers' modeling_rope_utils (YaRN: arXiv 2309.00071).
    """
    base = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    options = dict(scaling)
    kind = options.get('rope_type', 'default')
    if kind == 'default':
        return base, 1.0
    factor = options['factor']
    if kind == 'linear':
        return base / factor, 1.0
    if kind == 'llama3':
        wavelength = 2 * np.pi / base
        original = options['original_max_position_embeddings']
        low, high = options['low_freq_factor'], options['high_freq_factor']
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        return (1 - smooth) * base / factor + smooth * base, 1.0
    return _yarn(base, head_dim, theta, options)


def _yarn(base, head_dim, theta, options):
    factor, original = options['factor'], options['original_max_position_embeddings']

    def magnitude(scale, coefficient=1.0):
        return 0.1 * coefficient * math.log(scale) + 1.0 if scale > 1 else 1.0

    def dimension(rotations):
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(options.get('beta_fast') or 32)
    high = dimension(options.get('beta_slow') or 1)
    if options.get('truncate', True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    frequencies = ramp * base / factor + (1 - ramp) * base
    attention = options.get('attention_factor')
    if attention is None:
        mscale, mscale_all = options.get('mscale'), options.get('mscale_all_dim')
        attention = (
            magnitude(factor, mscale) / magnitude(factor, mscale_all) if mscale and mscale_all else magnitude(factor)
        )
    return frequencies, attention


def rope_angles(positions, head_dim, theta, scaling):
    """(cos, sin), each f32[B, T, 1, H/2], for positions i32[B, T]."""
    frequencies, factor = rope_frequencies(head_dim, theta, scaling)
    # float32: bfloat16 rounds position 257 to 256
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles)[:, :, None] * factor, jnp.sin(angles)[:, :, None] * factor


def rotate(x, angles):
    """x [B, T, N, H] turned by the angles; pairs are (i, i + H/2), Hugging Face's layout."""
    cos, sin = (angle[..., None, :] for angle in angles)
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
    # the reversal is a plain read to XLA on CPUs, where splitting and joining halves took half of a decode step
    turned = halves * cos + halves[..., ::-1, :] * jnp.concatenate([-sin, sin], -2)
    return turned.reshape(x.shape).astype(x.dtype)
