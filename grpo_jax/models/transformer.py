"""The decoder of the Llama, Qwen2 and Qwen3 families: a parameter table and pure functions over it.

One table (`param_table`) is the only place that spells a parameter's name, shape and mesh axes; init,
shardings, Hugging Face names and counts are maps over it. Layers are stacked on a leading axis and
run by `lax.scan`. `forward` (learner), `prefill` and `decode` (sampler) share one `block` and differ in
what attends to what.
"""

import dataclasses
import functools
import math
import zlib

import jax
import jax.numpy as jnp

from grpo_jax.models import attention, decode_kernel
from grpo_jax.models import cache as kv_cache
from grpo_jax.models.collectives import ALONE
from grpo_jax.models.quantize import product, rows
from grpo_jax.types import Param, map_table


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
    rope_scaling: tuple  # (name, value) pairs, () for plain rotary positions
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tie_embeddings: bool


# what the backward pass computes again of a layer: nothing; all but its products with weights, so attention and what
# goes element by element; all of it
REMAT = {
    'none': lambda step: step,
    'dots': functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    'full': jax.checkpoint,
}


def param_table(c):
    """Nested dict of Param for every weight of the model."""
    d, f, n, k, h, layers = c.width, c.mlp, c.heads, c.kv_heads, c.head_dim, c.layers
    fan_in, residual = d**-0.5, 1 / math.sqrt(2 * layers)
    stacked = {
        'attn_norm': Param((layers, d), (None, None), 0.0, 1.0),
        'wq': Param((layers, d, n, h), (None, 'fsdp', 'tensor', None), fan_in),
        'wk': Param((layers, d, k, h), (None, 'fsdp', 'tensor', None), fan_in),
        'wv': Param((layers, d, k, h), (None, 'fsdp', 'tensor', None), fan_in),
        'wo': Param((layers, n, h, d), (None, 'tensor', None, 'fsdp'), residual * (n * h) ** -0.5),
        'mlp_norm': Param((layers, d), (None, None), 0.0, 1.0),
        'w_gate': Param((layers, d, f), (None, 'fsdp', 'tensor'), fan_in),
        'w_up': Param((layers, d, f), (None, 'fsdp', 'tensor'), fan_in),
        'w_down': Param((layers, f, d), (None, 'tensor', 'fsdp'), residual * f**-0.5),
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


def init(key, c):
    """Random float32 parameters of the table."""

    def leaf(path, param):
        noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(path.encode())), param.shape)
        return param.offset + param.scale * noise

    return map_table(leaf, param_table(c))


def positions_of(mask):
    """Positions i32[B, T] of a padded batch: valid tokens count from 0, padding is 0."""
    return jnp.maximum(jnp.cumsum(mask, -1) - 1, 0).astype(jnp.int32)


def forward(params, tokens, positions, visible, c, *, remat='none', collectives=ALONE):
    """Hidden [B, T, D] after the last norm for tokens i32[B, T] at positions i32[B, T].

    visible bool[B, T] marks valid tokens, of causal attention, or is an attention.Packed. Computes in the dtype of
    params; norms and softmax are float32. remat names what of REMAT the backward pass recomputes.
    """
    angles = attention.rope_angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)

    def layer_step(x, weights):
        x = block(collectives.weights(weights), x, angles, c, lambda q, k, v: collectives.attend(q, k, v, visible))
        return collectives.hidden(x), None

    x = collectives.hidden(collectives.embed(params['embed'], tokens, params['final_norm'].dtype))
    x, _ = jax.lax.scan(REMAT[remat](layer_step), x, params['layers'])
    return rms_norm(x, params['final_norm'], c.norm_eps)


def prefill(params, tokens, positions, mask, c):
    """Keys and values, each [L, B, K, T, H], of tokens i32[B, T]; arguments as in forward."""
    angles = attention.rope_angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)

    def layer_step(x, weights):
        kept = []

        def attend(q, k, v):
            kept.extend((k.swapaxes(1, 2), v.swapaxes(1, 2)))
            return attention.attend(q, k, v, mask)

        return block(weights, x, angles, c, attend), tuple(kept)

    return jax.lax.scan(layer_step, _embed(params, tokens), params['layers'])[1]


def decode(params, tokens, positions, cache, c):
    """(hidden [B, D] after the last norm, KVCache) of one new token i32[B] a row at positions i32[B].

    Its keys and values are written to the cache's next column, in the scan's carry: through scan
    inputs and outputs XLA would copy the whole cache.
    """
    angles = attention.rope_angles(positions[:, None], c.head_dim, c.rope_theta, c.rope_scaling)
    if cache.prompt.flat:
        angles = decode_kernel.turns(angles, c.kv_heads)

    def layer_step(carry, inputs):
        x, last_chunk = carry
        weights, layer = inputs
        seen = cache.replace(chunks=cache.chunks[:-1] + (last_chunk,))

        def attend(q, k, v):
            nonlocal last_chunk
            out, last_chunk = kv_cache.extend(q, k, v, angles, seen, layer)
            return out

        x = block(weights, x, None, c, attend)
        return (x, last_chunk), None

    carry = (_embed(params, tokens)[:, None], cache.chunks[-1])
    (x, last_chunk), _ = jax.lax.scan(layer_step, carry, (params['layers'], jnp.arange(c.layers)))
    cache = cache.replace(chunks=cache.chunks[:-1] + (last_chunk,), length=cache.length + 1)
    return rms_norm(x, params['final_norm'], c.norm_eps)[:, 0], cache


def block(w, x, angles, c, attend):
    """One layer of x [B, T, D]; attend maps q [B, T, N, H] and k, v [B, T, K, H] to [B, T, N, H].

    angles turn q and k; with None, attend has to.
    """
    y = rms_norm(x, w['attn_norm'], c.norm_eps)
    q = product('btd,dnh->btnh', y, w['wq'])
    k = product('btd,dkh->btkh', y, w['wk'])
    v = product('btd,dkh->btkh', y, w['wv'])
    if c.qkv_bias:
        q, k, v = q + w['bq'], k + w['bk'], v + w['bv']
    if c.qk_norm:
        q, k = rms_norm(q, w['q_norm'], c.norm_eps), rms_norm(k, w['k_norm'], c.norm_eps)
    if angles is not None:
        q, k = attention.rotate(q, angles), attention.rotate(k, angles)
    out = product('btnh,nhd->btd', attend(q, k, v), w['wo'])
    x = x + (out + w['bo'] if c.out_bias else out)
    y = rms_norm(x, w['mlp_norm'], c.norm_eps)
    gate, up = product('btd,df->btf', y, w['w_gate']), product('btd,df->btf', y, w['w_up'])
    if c.mlp_bias:
        gate, up = gate + w['b_gate'], up + w['b_up']
    out = _gated(gate, up, w['w_down'])
    return x + (out + w['b_down'] if c.mlp_bias else out)


@functools.partial(jax.checkpoint, prevent_cse=False)  # cheaper computed twice than kept for the backward pass
def _gated(gate, up, w_down):
    return product('btf,fd->btd', jax.nn.silu(gate) * up, w_down)


def head_weights(params, c):
    """The part of the parameters that unembed reads."""
    name = 'embed' if c.tie_embeddings else 'lm_head'
    return {name: params[name]}


def unembed(params, hidden, c):
    """Float32 logits [..., V] of hidden [..., D]."""
    if c.tie_embeddings:
        return product('...d,vd->...v', hidden, params['embed'], preferred_element_type=jnp.float32)
    return product('...d,dv->...v', hidden, params['lm_head'], preferred_element_type=jnp.float32)


def unembed_transposed(params, hidden, c):
    """Float32 logits [V, N] of hidden [N, D]; XLA on CPUs multiplies up to twice as fast by this order."""
    spec, (weights,) = 'vd,nd->vn' if c.tie_embeddings else 'dv,nd->vn', head_weights(params, c).values()
    return jnp.einsum(spec, weights, hidden, preferred_element_type=jnp.float32)


def _embed(params, tokens):
    return rows(params['embed'], tokens, params['final_norm'].dtype)


def rms_norm(x, scale, eps):
    """x normalized over its last axis in float32, times scale, in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return scale * normed.astype(x.dtype)
