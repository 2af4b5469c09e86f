"""The decoder of the Llama, Qwen2 and Qwen3 families: a parameter table and pure functions over it.

One table (`param_table`) is the only place that spells a parameter's name, shape and mesh axes; init,
shardings, Hugging Face names and counts are maps over it. Layers are stacked on a leading axis and
run by `lax.scan`. `forward` (learner), `prefill` and `decode` (sampler) share one `block`; they differ in
which tokens attend to which.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
import re
from typing import Any
import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from grpo_jax.models import attention, decode_kernel
from grpo_jax.models import cache as kv_cache
from grpo_jax.models.collectives import ALONE, Collectives
from grpo_jax.models.linear import lookup, matmul
from grpo_jax.types import Array, Param, map_table

Params = Mapping[str, Any]  # arrays by name, as param_table nests them


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder; every field comes from a checkpoint (models.families.load_config)."""

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


# What the backward pass computes again of a layer. none: nothing. dots: all but its products with weights, which is
# attention and the elementwise operations. full: all of it.
REMAT = {
    'none': lambda step: step,
    'dots': functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    'full': jax.checkpoint,
}

# parts of a model -> names of their parameters
PARTS = {
    'embedding': 'embed',
    'attention': '[wb][qkvo]',
    'mlp': '[wb]_(gate|up|down)',
    'norms': '.*norm',
    'head': '.*_head',
}


def param_table(c: ModelConfig) -> dict[str, Any]:
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


def part_of(path: str) -> str:
    """Which part of a model a parameter's path belongs to: embedding, attention, mlp, norms, head, or other."""
    name = path.rsplit('/', 1)[-1]
    return next((part for part, pattern in PARTS.items() if re.fullmatch(pattern, name)), 'other')


def init(key: Any, c: ModelConfig) -> Params:
    """Random float32 parameters of the table."""

    def leaf(path, param):
        noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(path.encode())), param.shape)
        return param.offset + param.scale * noise

    return map_table(leaf, param_table(c))


def positions_of(mask: Bool[Array, 'B T']) -> Int[Array, 'B T']:
    """Positions of a padded batch: valid tokens count from 0, padding is 0."""
    return jnp.maximum(jnp.cumsum(mask, -1) - 1, 0).astype(jnp.int32)


def forward(
    params: Params,
    tokens: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    visible: Bool[Array, 'B T'] | attention.Packed,
    c: ModelConfig,
    *,
    remat: str = 'none',
    collectives: Collectives = ALONE,
) -> Float[Array, 'B T D']:
    """Hidden states after the last norm.

    visible marks the valid tokens of causal attention, or is an attention.Packed. Computes in the dtype of params;
    norms and softmax are float32. remat is a key of REMAT.
    """
    angles = _angles(positions, c)

    def layer_step(x, weights):
        def attend(q, k, v):
            return collectives.attend(q, k, v, visible), None

        x, _ = block(collectives.weights(weights), x, angles, c, attend)
        return collectives.hidden(x), None

    with jax.named_scope('embed'):
        x = collectives.hidden(collectives.embed(params['embed'], tokens, params['final_norm'].dtype))
    x, _ = jax.lax.scan(REMAT[remat](layer_step), x, params['layers'])
    return rms_norm(x, params['final_norm'], c.norm_eps)


def prefill(
    params: Params, tokens: Int[Array, 'B T'], positions: Int[Array, 'B T'], mask: Bool[Array, 'B T'], c: ModelConfig
) -> tuple[Float[Array, 'L B K T H'], Float[Array, 'L B K T H']]:
    """Keys and values of all layers; arguments as in forward."""
    angles = _angles(positions, c)

    def layer_step(x, weights):
        def attend(q, k, v):
            keys_values = k.swapaxes(1, 2), v.swapaxes(1, 2)
            return attention.attend(q, k, v, mask), keys_values

        return block(weights, x, angles, c, attend)

    return jax.lax.scan(layer_step, _embed(params, tokens), params['layers'])[1]


def decode(
    params: Params, tokens: Int[Array, ' B'], positions: Int[Array, ' B'], cache: kv_cache.KVCache, c: ModelConfig
) -> tuple[Float[Array, 'B D'], kv_cache.KVCache]:
    """(hidden states after the last norm, cache) of one new token a row.

    Its keys and values are written to the cache's next column, in the scan's carry: through scan
    inputs and outputs XLA would copy the whole cache.
    """
    angles = _angles(positions[:, None], c)
    if cache.prompt.flat:
        angles = decode_kernel.rope_factors(angles, c.kv_heads)

    def layer_step(carry, inputs):
        (x, last_chunk), (weights, layer) = carry, inputs

        def attend(q, k, v):
            return kv_cache.extend(q, k, v, angles, cache.with_last_chunk(last_chunk), layer)

        return block(weights, x, None, c, attend), None

    carry = (_embed(params, tokens)[:, None], cache.chunks[-1])
    (x, last_chunk), _ = jax.lax.scan(layer_step, carry, (params['layers'], jnp.arange(c.layers)))
    cache = cache.with_last_chunk(last_chunk).replace(length=cache.length + 1)
    return rms_norm(x, params['final_norm'], c.norm_eps)[:, 0], cache


def block(
    w: Params,
    x: Float[Array, 'B T D'],
    angles: attention.Angles | None,
    c: ModelConfig,
    attend: Callable[..., tuple[Array, Any]],
) -> tuple[Float[Array, 'B T D'], Any]:
    """(x after one layer with weights w, what attend returned beside its output).

    attend(q, k, v) -> (output [B, T, N, H], any value), for q [B, T, N, H] and k, v [B, T, K, H]. The angles rotate
    q and k; if they are None, attend rotates.
    """
    y = rms_norm(x, w['attn_norm'], c.norm_eps)
    with jax.named_scope('attention'):
        out, value = _attention(w, y, angles, c, attend)
    x = x + out
    y = rms_norm(x, w['mlp_norm'], c.norm_eps)
    with jax.named_scope('mlp'):
        return x + _mlp(w, y, c), value


def _attention(w, y, angles, c, attend):
    """(output [B, T, D], attend's other value) of the normed y [B, T, D]."""
    q = matmul('btd,dnh->btnh', y, w['wq'])
    k = matmul('btd,dkh->btkh', y, w['wk'])
    v = matmul('btd,dkh->btkh', y, w['wv'])
    if c.qkv_bias:
        q, k, v = q + w['bq'], k + w['bk'], v + w['bv']
    if c.qk_norm:
        q, k = rms_norm(q, w['q_norm'], c.norm_eps), rms_norm(k, w['k_norm'], c.norm_eps)
    if angles is not None:
        q, k = attention.rotate(q, angles), attention.rotate(k, angles)
    mixed, value = attend(q, k, v)
    out = matmul('btnh,nhd->btd', mixed, w['wo'])
    return out + w['bo'] if c.out_bias else out, value


def _mlp(w, y, c):
    """Output [B, T, D] of the normed y [B, T, D]."""
    gate, up = matmul('btd,df->btf', y, w['w_gate']), matmul('btd,df->btf', y, w['w_up'])
    if c.mlp_bias:
        gate, up = gate + w['b_gate'], up + w['b_up']
    out = _gated(gate, up, w['w_down'])
    return out + w['b_down'] if c.mlp_bias else out


@functools.partial(jax.checkpoint, prevent_cse=False)  # cheaper computed twice than stored for the backward pass
def _gated(gate, up, w_down):
    return matmul('btf,fd->btd', jax.nn.silu(gate) * up, w_down)


def head_weights(params: Params, c: ModelConfig) -> Params:
    """The part of the parameters that unembed reads."""
    name = 'embed' if c.tie_embeddings else 'lm_head'
    return {name: params[name]}


@jax.named_scope('head')
def unembed(params: Params, hidden: Float[Array, '... D'], c: ModelConfig) -> Float[Array, '... V']:
    """Float32 logits."""
    if c.tie_embeddings:
        return matmul('...d,vd->...v', hidden, params['embed'], preferred_element_type=jnp.float32)
    return matmul('...d,dv->...v', hidden, params['lm_head'], preferred_element_type=jnp.float32)


@jax.named_scope('head')
def unembed_transposed(params: Params, hidden: Float[Array, 'X D'], c: ModelConfig) -> Float[Array, 'V X']:
    """Float32 logits, vocabulary first; XLA on CPUs multiplies up to twice as fast by this order."""
    spec, (weights,) = 'vd,xd->vx' if c.tie_embeddings else 'dv,xd->vx', head_weights(params, c).values()
    return jnp.einsum(spec, weights, hidden, preferred_element_type=jnp.float32)


def _angles(positions, c):
    return attention.rope_angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)


@jax.named_scope('embed')
def _embed(params, tokens):
    return lookup(params['embed'], tokens, params['final_norm'].dtype)


@jax.named_scope('norm')
def rms_norm(x: Float[Array, '... D'], scale: Float[Array, ' D'], eps: float) -> Float[Array, '... D']:
    """x normalized over its last axis in float32, times scale, in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return scale * normed.astype(x.dtype)
