"""The decoder of the Llama, Qwen2 and Qwen3 families: a parameter table and pure functions over it.

One table (`param_table`) is the only place that spells a parameter's name, shape and mesh axes; init,
shardings, Hugging Face names and counts are maps over it. Layers are stacked on a leading axis and
run by `lax.scan`; the key-value cache lives in the scan's carry, since passing it through scan inputs
and outputs makes XLA copy the whole cache.
"""
import dataclasses
import math
from typing import NamedTuple
import zlib

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.models import attention


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder; every field comes from a checkpoint (models.hf.load_config)."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float
    rope_theta: float
    rope_scaling: tuple     # (name, value) pairs, () for plain rotary positions
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tie_embeddings: bool


class Param(NamedTuple):
    """One row of the table: value at init is offset + scale * normal."""

    shape: tuple
    axes: tuple         # mesh axis, or None, of each dimension
    scale: float
    offset: float = 0.0


@struct.dataclass
class KVCache:
    """Keys and values by column; all rows write the same next column.

    Chunks are filled in order and never copied: only the last one is written.
    """

    k: tuple                             # of [L, B, K, S_i, H]
    v: tuple                             # of [L, B, K, S_i, H]
    length: jax.Array                    # i32[] columns written
    prompt_k: jax.Array | None = None    # [L, P, K, Q, H] bank read by all rows of a group
    prompt_v: jax.Array | None = None    # [L, P, K, Q, H]
    prompt_mask: jax.Array | None = None # bool[P, Q]


def param_table(c):
    """Nested dict of Param for every weight of the model."""
    d, f, n, k, h, layers = c.width, c.mlp, c.heads, c.kv_heads, c.head_dim, c.layers
    fan_in, residual = d ** -0.5, 1 / math.sqrt(2 * layers)
    stacked = {
        'attn_norm': Param((layers, d), (None, None), 0.0, 1.0),
        'wq': Param((layers, d, n, h), (None, 'fsdp', 'tensor', None), fan_in),
        'wk': Param((layers, d, k, h), (None, 'fsdp', 'tensor', None), fan_in),
        'wv': Param((layers, d, k, h), (None, 'fsdp', 'tensor', None), fan_in),
        'wo': Param((layers, n, h, d), (None, 'tensor', None, 'fsdp'), residual * (n * h) ** -0.5),
        'mlp_norm': Param((layers, d), (None, None), 0.0, 1.0),
        'w_gate': Param((layers, d, f), (None, 'fsdp', 'tensor'), fan_in),
        'w_up': Param((layers, d, f), (None, 'fsdp', 'tensor'), fan_in),
        'w_down': Param((layers, f, d), (None, 'tensor', 'fsdp'), residual * f ** -0.5),
    }
    if c.qkv_bias:
        stacked['bq'] = Param((layers, n, h), (None, 'tensor', None), 0.0)
        stacked['bk'] = Param((layers, k, h), (None, 'tensor', None), 0.0)
        stacked['bv'] = Param((layers, k, h), (None, 'tensor', None), 0.0)
    if c.out_bias:
        stacked['bo'] = Param((layers, d), (None, None), 0.0)
    if c.qk_norm:
        stacked['q_norm'] = Param((layers, h), (None, None), 0.0, 1.0)
        stacked['k_norm'] = Param((layers, h), (None, None), 0.0, 1.0)
    if c.mlp_bias:
        stacked['b_gate'] = Param((layers, f), (None, 'tensor'), 0.0)
        stacked['b_up'] = Param((layers, f), (None, 'tensor'), 0.0)
        stacked['b_down'] = Param((layers, d), (None, None), 0.0)
    table = {
        'embed': Param((c.vocab_size, d), ('tensor', 'fsdp'), fan_in),
        'layers': stacked,
        'final_norm': Param((d,), (None,), 0.0, 1.0),
    }
    if not c.tie_embeddings:
        table['lm_head'] = Param((d, c.vocab_size), ('fsdp', 'tensor'), fan_in)
    return table


def map_table(function, table):
    """The table's tree with function(path, param) at each leaf; path is like 'layers/wq'."""
    return jax.tree_util.tree_map_with_path(
        lambda path, param: function('/'.join(key.key for key in path), param), table,
        is_leaf=lambda node: isinstance(node, Param))


def init(key, c):
    """Random float32 parameters of the table."""
    def leaf(path, param):
        noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(path.encode())), param.shape)
        return param.offset + param.scale * noise
    return map_table(leaf, param_table(c))


def init_cache(c, rows, columns, dtype):
    """An empty KVCache with one chunk of the given columns for the given rows."""
    shape = (c.layers, rows, c.kv_heads, columns, c.head_dim)
    return KVCache((jnp.zeros(shape, dtype),), (jnp.zeros(shape, dtype),), jnp.int32(0))


def positions_of(mask):
    """Positions i32[B, T] of a padded batch: valid tokens count from 0, padding is 0."""
    return jnp.maximum(jnp.cumsum(mask, -1) - 1, 0).astype(jnp.int32)


def forward(params, tokens, positions, mask, c, cache=None, *, remat=False):
    """(hidden [B, T, D] after the last norm, cache) for tokens i32[B, T] at positions i32[B, T].

    Without a cache, mask bool[B, T] marks valid tokens and attention is causal. With one, the T
    tokens are written at the cache's next columns and see all earlier ones; mask then must be given
    when the cache is empty and padded (prefill) and be None when decoding, where every column is
    valid. Computes in the dtype of params; norms and softmax are float32. remat recomputes each
    layer in the backward pass.
    """
    x = params['embed'][tokens]
    angles = attention.rope_angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)
    allowed = attention.causal(mask) if cache is None else _allowed_in_last_chunk(cache, tokens.shape[1], mask)

    def layer_step(carry, inputs):
        x, cache = carry
        weights, index = inputs
        return block(weights, x, angles, allowed, c, cache, index), None

    step = jax.checkpoint(layer_step) if remat else layer_step
    (x, cache), _ = jax.lax.scan(step, (x, cache), (params['layers'], jnp.arange(c.layers)))
    if cache is not None:
        cache = cache.replace(length=cache.length + tokens.shape[1])
    return rms_norm(x, params['final_norm'], c.norm_eps), cache


def block(w, x, angles, allowed, c, cache, index):
    """One layer: (x [B, T, D], cache) -> the same after attention and mlp."""
    y = rms_norm(x, w['attn_norm'], c.norm_eps)
    q = jnp.einsum('btd,dnh->btnh', y, w['wq'])
    k = jnp.einsum('btd,dkh->btkh', y, w['wk'])
    v = jnp.einsum('btd,dkh->btkh', y, w['wv'])
    if c.qkv_bias:
        q, k, v = q + w['bq'], k + w['bk'], v + w['bv']
    if c.qk_norm:
        q, k = rms_norm(q, w['q_norm'], c.norm_eps), rms_norm(k, w['k_norm'], c.norm_eps)
    q, k = attention.rotate(q, angles), attention.rotate(k, angles)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    if cache is None:
        parts = [attention.Part(k, v, allowed)]
    else:
        cache = _write(cache, index, k, v)
        parts = _parts(cache, index, allowed)
    out = jnp.einsum('btnh,nhd->btd', attention.attend(q, parts), w['wo'])
    x = x + (out + w['bo'] if c.out_bias else out)
    y = rms_norm(x, w['mlp_norm'], c.norm_eps)
    gate, up = y @ w['w_gate'], y @ w['w_up']
    if c.mlp_bias:
        gate, up = gate + w['b_gate'], up + w['b_up']
    out = (jax.nn.silu(gate) * up) @ w['w_down']
    return x + (out + w['b_down'] if c.mlp_bias else out), cache


def unembed(params, hidden, c):
    """Float32 logits [..., V] of hidden [..., D]."""
    if c.tie_embeddings:
        return jnp.einsum('...d,vd->...v', hidden, params['embed'], preferred_element_type=jnp.float32)
    return jnp.einsum('...d,dv->...v', hidden, params['lm_head'], preferred_element_type=jnp.float32)


def rms_norm(x, scale, eps):
    """x normalized over its last axis in float32, times scale, in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return scale * normed.astype(x.dtype)


def _written_before_last_chunk(cache):
    return sum(chunk.shape[3] for chunk in cache.k[:-1])


def _allowed_in_last_chunk(cache, new_columns, mask):
    """bool[B or 1, 1, T, S]: a new token sees the columns written before it and itself."""
    start = cache.length - _written_before_last_chunk(cache)
    columns = jnp.arange(cache.k[-1].shape[3])
    allowed = columns <= start + jnp.arange(new_columns)[:, None]
    allowed = allowed[None, None]
    return allowed if mask is None else allowed & mask[:, None, None, :]


def _write(cache, index, k, v):
    """The cache with k and v [B, K, T, H] in layer `index` at the next columns of the last chunk."""
    at = (index, 0, 0, cache.length - _written_before_last_chunk(cache), 0)
    new_k = jax.lax.dynamic_update_slice(cache.k[-1], k[None].astype(cache.k[-1].dtype), at)
    new_v = jax.lax.dynamic_update_slice(cache.v[-1], v[None].astype(cache.v[-1].dtype), at)
    return cache.replace(k=cache.k[:-1] + (new_k,), v=cache.v[:-1] + (new_v,))


def _parts(cache, index, allowed):
    """What layer `index` attends to: the prompt bank, the full chunks, the chunk being written."""
    parts = []
    if cache.prompt_k is not None:
        parts.append(attention.Part(cache.prompt_k[index], cache.prompt_v[index],
                                    cache.prompt_mask[:, None, None, :]))
    for k, v in zip(cache.k[:-1], cache.v[:-1], strict=True):
        parts.append(attention.Part(k[index], v[index], jnp.ones((1, 1, 1, 1), bool)))
    parts.append(attention.Part(cache.k[-1][index], cache.v[-1][index], allowed))
    return parts
