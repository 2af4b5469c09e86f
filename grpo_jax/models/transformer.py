"""The decoder of all model families: a parameter table and pure functions over it.

One table (`param_table`) says each parameter's name, shape and mesh axes; init, shardings, Hugging Face names and
counts are maps over it (learner.partition assumes the axes of embedding and head). Layers are stacked on a leading axis
and run by `lax.scan`; what differs from layer to layer is an array that the scan reads beside them (`LayerKind`).
`forward` (learner), `prefill` and `decode` (sampler) share one `block`; they differ in which tokens attend to which.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from grpo_jax.models import attention
from grpo_jax.models import cache as kv_cache
from grpo_jax.models.linear import PRODUCT, lookup, matmul
from grpo_jax.models.mesh_ops import ALONE, MeshOps
from grpo_jax.types import Array, Param, map_table

Params = Mapping[str, Any]  # arrays by name, as param_table nests them


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder; every field comes from a checkpoint (models.hf.families.load_config).

    A default changes nothing: it is Llama's value. The sampler's kernels refuse a model with another value than the
    default, unless BESIDE_KERNELS names the field.
    """

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
    fused: bool = False  # in a folder wq, wk and wv are one tensor, and w_gate and w_up another
    activation: str = 'silu'  # of the mlp's gate, a key of ACTIVATIONS
    norms: str = 'before'  # where attention and mlp have norms: before, after, or around, which is both
    norm_offset: float = 0.0  # added to the weights of norms
    norm_in_float32: bool = False  # norms multiply by their weights before they round, not after
    qk_norm_over_heads: bool = False  # norms of queries and keys are over all heads at once
    embed_scale: float = 1.0  # factor of embeddings, rounded to their dtype
    residual_scale: float = 1.0  # factor of what attention and mlp add to the residual stream
    attention_scale: float | None = None  # factor of products of queries with keys; None: 1 / sqrt(head_dim)
    attention_cap: float = 0.0  # soft cap of these products; 0: none
    logit_divisor: float = 1.0  # of the logits, before their cap
    logit_cap: float = 0.0  # soft cap of the logits; 0: none
    windows: tuple[int, ...] = ()  # of each layer: positions that a query attends to, 0: all; (): all in all layers
    rotary_dim: int = 0  # numbers of a head that are rotated, the first ones; 0: all
    local_rope: tuple = ()  # (rope_theta, rope_scaling) of layers with a window, where they have their own
    unrotated: tuple[int, ...] = ()  # numbers of the layers without rotary positions (NoPE)

    @property
    def is_plain(self) -> bool:
        """Whether attention and head compute what Llama's do; the sampler's kernels compute nothing else."""
        fields = [field for field in dataclasses.fields(self) if field.name not in BESIDE_KERNELS]
        return all(getattr(self, field.name) == field.default for field in fields)


# fields of ModelConfig whose value the sampler's kernels read from their inputs, or need not know
BESIDE_KERNELS = frozenset(
    'vocab_size width layers heads kv_heads head_dim mlp norm_eps rope_theta rope_scaling qk_norm qkv_bias out_bias '
    'mlp_bias tie_embeddings fused activation norms norm_offset norm_in_float32 qk_norm_over_heads embed_scale '
    'residual_scale'.split()
)
ENDLESS = 2**30  # positions of a window in layers without one
ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_pytorch_tanh': functools.partial(jax.nn.gelu, approximate=True)}
# What the backward pass computes again in each layer. none: nothing. dots: all but products with weights, which leaves
# attention and the elementwise operations. full: the whole layer.
REMAT = {
    'none': lambda step: step,
    'dots': functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(PRODUCT)),
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
    """The parameter table of a model: a nested dict with a Param for each array, by name."""
    d, f, n, k, h, layers = c.width, c.mlp, c.heads, c.kv_heads, c.head_dim, c.layers
    fan_in_scale, residual = d**-0.5, 1 / math.sqrt(2 * layers)
    before, after = ('attn_norm', 'mlp_norm'), ('attn_post_norm', 'mlp_post_norm')
    norms = {'before': before, 'after': after, 'around': before + after}[c.norms]
    stacked = {
        'wq': Param((layers, d, n, h), (None, 'fsdp', 'tensor', None), fan_in_scale),
        'wk': Param((layers, d, k, h), (None, 'fsdp', 'tensor', None), fan_in_scale),
        'wv': Param((layers, d, k, h), (None, 'fsdp', 'tensor', None), fan_in_scale),
        'wo': Param((layers, n, h, d), (None, 'tensor', None, 'fsdp'), residual * (n * h) ** -0.5),
        'w_gate': Param((layers, d, f), (None, 'fsdp', 'tensor'), fan_in_scale),
        'w_up': Param((layers, d, f), (None, 'fsdp', 'tensor'), fan_in_scale),
        'w_down': Param((layers, f, d), (None, 'tensor', 'fsdp'), residual * f**-0.5),
    }
    stacked |= {name: Param((layers, d), (None, None), 0.0, 1 - c.norm_offset) for name in norms}
    if c.qkv_bias:
        stacked['bq'] = Param((layers, n, h), (None, 'tensor', None), 0.0)
        stacked['bk'] = Param((layers, k, h), (None, 'tensor', None), 0.0)
        stacked['bv'] = Param((layers, k, h), (None, 'tensor', None), 0.0)
    if c.out_bias:
        stacked['bo'] = Param((layers, d), (None, None), 0.0)
    if c.qk_norm and c.qk_norm_over_heads:
        stacked['q_norm'] = Param((layers, n, h), (None, 'tensor', None), 0.0, 1 - c.norm_offset)
        stacked['k_norm'] = Param((layers, k, h), (None, 'tensor', None), 0.0, 1 - c.norm_offset)
    elif c.qk_norm:
        stacked['q_norm'] = Param((layers, h), (None, None), 0.0, 1 - c.norm_offset)
        stacked['k_norm'] = Param((layers, h), (None, None), 0.0, 1 - c.norm_offset)
    if c.mlp_bias:
        stacked['b_gate'] = Param((layers, f), (None, 'tensor'), 0.0)
        stacked['b_up'] = Param((layers, f), (None, 'tensor'), 0.0)
        stacked['b_down'] = Param((layers, d), (None, None), 0.0)
    table = {
        'embed': Param((c.vocab_size, d), ('tensor', 'fsdp'), fan_in_scale),
        'layers': stacked,
        'final_norm': Param((d,), (None,), 0.0, 1 - c.norm_offset),
    }
    if not c.tie_embeddings:
        table['lm_head'] = Param((d, c.vocab_size), ('fsdp', 'tensor'), fan_in_scale)
    return table


def part_of(path: str) -> str:
    """Which part of a model a parameter's path belongs to: embedding, attention, mlp, norms, head, or other."""
    name = path.rsplit('/', 1)[-1]
    return next((part for part, pattern in PARTS.items() if re.fullmatch(pattern, name)), 'other')


def init(key: Any, c: ModelConfig) -> Params:
    """Random float32 parameters of a model, drawn as param_table says; key: of jax.random."""

    def leaf(path, param):
        if not param.scale:  # noise that nothing reads would be compiled
            return jnp.full(param.shape, param.offset, jnp.float32)
        noise = jax.random.normal(jax.random.fold_in(key, zlib.crc32(path.encode())), param.shape)
        return param.offset + param.scale * noise

    return map_table(leaf, param_table(c))


def positions_of(mask: Bool[Array, 'B T']) -> Int[Array, 'B T']:
    """Positions of a padded batch: valid tokens count from 0, padding is 0."""
    return jnp.maximum(jnp.cumsum(mask, -1) - 1, 0).astype(jnp.int32)


class LayerKind(NamedTuple):
    """What differs from layer to layer: arrays over all layers, or one layer's values; None where layers are alike."""

    window: Int[Array, '*L'] | None
    rope: Int[Array, '*L'] | None  # index into _ropes


def make_kinds(c: ModelConfig) -> LayerKind:
    """LayerKind of all layers: arrays that the scan over layers reads beside the weights."""
    windows = c.windows or (0,) * c.layers
    window = jnp.asarray([window or ENDLESS for window in windows], jnp.int32) if c.windows else None
    if not c.local_rope and not c.unrotated:
        return LayerKind(window, None)
    unrotated = len(_ropes(c)) - 1
    ropes = [unrotated if i in c.unrotated else int(bool(c.local_rope and windows[i])) for i in range(c.layers)]
    return LayerKind(window, jnp.asarray(ropes, jnp.int32))


def _ropes(c):
    """(theta, scaling) of each rotary embedding in the model: the common, the local, and NoPE's, which does nothing."""
    return [(c.rope_theta, c.rope_scaling), *[c.local_rope] * bool(c.local_rope), *[(0.0, ())] * bool(c.unrotated)]


def make_angles(positions: Int[Array, 'B T'], c: ModelConfig) -> tuple[Float[Array, '...'], Float[Array, '...']]:
    """attention.Angles of the positions; where layers differ, angles for each of _ropes, stacked on a first axis."""
    size = c.rotary_dim or c.head_dim
    angles = [attention.rope_angles(positions, size, *rope) for rope in _ropes(c)]
    return angles[0] if len(angles) == 1 else jax.tree.map(lambda *kinds: jnp.stack(kinds), *angles)


def choose_angles(angles: Any, kind: LayerKind) -> Any:
    """The Angles of one layer, from the angles that make_angles returns."""
    return angles if kind.rope is None else jax.tree.map(lambda kinds: kinds[kind.rope], angles)


def make_rule(c: ModelConfig, kind: LayerKind) -> attention.Rule:
    """The attention.Rule of one layer."""
    return attention.Rule(c.attention_scale, c.attention_cap, kind.window)


def forward(
    params: Params,
    tokens: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    visible: Bool[Array, 'B T'] | attention.PackedMask,
    c: ModelConfig,
    *,
    remat: str = 'none',
    mesh_ops: MeshOps = ALONE,
) -> Float[Array, 'B T D']:
    """Hidden states after the last norm, in the dtype of params; norms and softmax are computed in float32.

    visible: the valid tokens of causal attention, or a PackedMask. remat: a key of REMAT. mesh_ops: where devices
    exchange values.
    """
    angles = make_angles(positions, c)

    def layer_step(x, inputs):
        weights, kind = inputs

        def attend(q, k, v):
            return mesh_ops.attend(q, k, v, visible, make_rule(c, kind)), None

        x, _ = block(mesh_ops.weights(weights), x, choose_angles(angles, kind), c, attend)
        return mesh_ops.hidden(x), None

    with jax.named_scope('embed'):
        x = mesh_ops.hidden(mesh_ops.embed(params['embed'], tokens, params['final_norm'].dtype))
        x = _scale_embeddings(x, c)
    x, _ = jax.lax.scan(REMAT[remat](layer_step), x, (params['layers'], make_kinds(c)))
    return _norm(x, params['final_norm'], c)


def prefill(
    params: Params,
    tokens: Int[Array, 'B T'],
    positions: Int[Array, 'B T'],
    visible: Bool[Array, 'B T'] | attention.PackedMask,
    c: ModelConfig,
    *,
    attend_by: str = 'xla',
) -> tuple[Float[Array, 'L B K T H'], Float[Array, 'L B K T H']]:
    """(keys, values) of all layers for whole prompts, with rotated keys, in the axis order of cache.prompt_chunk.

    attend_by: attention.Rule.by; the other arguments are as in forward.
    """
    angles = make_angles(positions, c)

    def layer_step(x, inputs):
        weights, kind, _ = inputs

        def attend(q, k, v):
            keys_values = k.swapaxes(1, 2), v.swapaxes(1, 2)
            rule = make_rule(c, kind)._replace(by=attend_by)
            return attention.attend(q, k, v, visible, rule), keys_values

        return block(weights, x, choose_angles(angles, kind), c, attend)

    return _scan_layers(layer_step, _embed(params, tokens, c), params['layers'], c)[1]


def decode(
    params: Params, tokens: Int[Array, ' B'], positions: Int[Array, ' B'], cache: kv_cache.KVCache, c: ModelConfig
) -> tuple[Float[Array, 'B D'], kv_cache.KVCache]:
    """(hidden states after the last norm, the cache with the new column) for one new token in each row.

    The scan over layers carries the cache and writes the new column into it: as an input and an output of the scan, XLA
    would copy the whole cache. If params['layers'] is a tuple with a layer's weights each, the cache is ByLayer.
    """
    angles = make_angles(positions[:, None], c)
    if cache.prompt.flat:
        angles = kv_cache.rope_factors(angles, c.kv_heads)

    def layer_step(carry, inputs):
        (x, last_chunk), (weights, kind, layer) = carry, inputs
        now, rule = cache.with_last_chunk(last_chunk), make_rule(c, kind)

        def attend(q, k, v):
            return kv_cache.append_and_attend(q, k, v, choose_angles(angles, kind), now, layer, rule)

        return block(weights, x, None, c, attend), None

    carry = (_embed(params, tokens, c)[:, None], cache.chunks[-1])
    (x, last_chunk), _ = _scan_layers(layer_step, carry, params['layers'], c)
    cache = cache.with_last_chunk(last_chunk).replace(length=cache.length + 1)
    return _norm(x, params['final_norm'], c)[:, 0], cache


def _scan_layers(step, carry, layers, c):
    """Runs step(carry, (weights, LayerKind, layer's number)) over the layers; returns (carry, stacked outputs).

    If `layers` is a tuple with the weights of each layer, a Python loop takes the place of jax.lax.scan.
    """
    kinds = make_kinds(c)
    if not isinstance(layers, tuple):
        return jax.lax.scan(step, carry, (layers, kinds, jnp.arange(c.layers)))
    outputs = []
    for i, weights in enumerate(layers):
        carry, output = step(carry, (weights, jax.tree.map(lambda x, i=i: x[i], kinds), i))
        outputs.append(output)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)


def block(
    w: Params,
    x: Float[Array, 'B T D'],
    angles: attention.Angles | None,
    c: ModelConfig,
    attend: Callable[..., tuple[Array, Any]],
) -> tuple[Float[Array, 'B T D'], Any]:
    """(x after one layer with weights w, the value that attend returns beside its output).

    attend(q, k, v) -> (output [B, T, N, H], any value), for q [B, T, N, H] and k, v [B, T, K, H]. angles rotate q and
    k before attend gets them; None: attend rotates them.
    """
    y = _norm(x, w.get('attn_norm'), c)
    with jax.named_scope('attention'):
        out, value = _attention(w, y, angles, c, attend)
    x = _add_residual(x, _norm(out, w.get('attn_post_norm'), c), c)
    y = _norm(x, w.get('mlp_norm'), c)
    with jax.named_scope('mlp'):
        out = _mlp(w, y, c)
    return _add_residual(x, _norm(out, w.get('mlp_post_norm'), c), c), value


def _add_residual(x, out, c):
    """The residual stream x [B, T, D] plus residual_scale times `out`, the output of attention or mlp."""
    return x + (out if c.residual_scale == 1 else (out.astype(jnp.float32) * c.residual_scale).astype(out.dtype))


def _attention(w, y, angles, c, attend):
    """(attention output [B, T, D], the second value of attend) for the normed hidden states y [B, T, D]."""
    q = matmul('btd,dnh->btnh', y, w['wq'])
    k = matmul('btd,dkh->btkh', y, w['wk'])
    v = matmul('btd,dkh->btkh', y, w['wv'])
    if c.qkv_bias:
        q, k, v = q + w['bq'], k + w['bk'], v + w['bv']
    if c.qk_norm:
        q, k = _norm(q, w['q_norm'], c), _norm(k, w['k_norm'], c)
    if angles is not None:
        q, k = attention.rotate(q, angles), attention.rotate(k, angles)
    mixed, value = attend(q, k, v)
    out = matmul('btnh,nhd->btd', mixed, w['wo'])
    return out + w['bo'] if c.out_bias else out, value


def _mlp(w, y, c):
    """The mlp's output [B, T, D] for the normed hidden states y [B, T, D]."""
    gate, up = matmul('btd,df->btf', y, w['w_gate']), matmul('btd,df->btf', y, w['w_up'])
    if c.mlp_bias:
        gate, up = gate + w['b_gate'], up + w['b_up']
    out = _apply_gate(gate, up, w['w_down'], c.activation)
    return out + w['b_down'] if c.mlp_bias else out


# the backward pass computes it again, which is cheaper than storing [B, T, F]
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
def _apply_gate(gate, up, w_down, activation):
    """The product of w_down with activation(gate) * up."""
    return matmul('btf,fd->btd', ACTIVATIONS[activation](gate) * up, w_down)


def head_weights(params: Params, c: ModelConfig) -> Params:
    """The one parameter that unembed reads, by name: embed where embeddings are tied, else lm_head."""
    name = 'embed' if c.tie_embeddings else 'lm_head'
    return {name: params[name]}


@jax.named_scope('head')
def unembed(params: Params, hidden: Float[Array, '... D'], c: ModelConfig) -> Float[Array, '... V']:
    """Float32 logits of hidden states; params may be head_weights alone."""
    spec = '...d,vd->...v' if c.tie_embeddings else '...d,dv->...v'
    (weights,) = head_weights(params, c).values()
    return _finish_logits(matmul(spec, hidden, weights, preferred_element_type=jnp.float32), c)


@jax.named_scope('head')
def unembed_transposed(params: Params, hidden: Float[Array, 'X D'], c: ModelConfig) -> Float[Array, 'V X']:
    """Float32 logits [V, X], vocabulary first: an order in which XLA on CPUs multiplies up to twice as fast."""
    spec, (weights,) = 'vd,xd->vx' if c.tie_embeddings else 'dv,xd->vx', head_weights(params, c).values()
    return _finish_logits(jnp.einsum(spec, weights, hidden, preferred_element_type=jnp.float32), c)


def _finish_logits(products, c):
    """Logits, from the products of hidden states with the head's weights: divided and soft-capped as c says."""
    return attention.soft_cap(products if c.logit_divisor == 1 else products / c.logit_divisor, c.logit_cap)


@jax.named_scope('embed')
def _embed(params, tokens, c):
    """The scaled embeddings [..., D] of tokens i32[...]."""
    return _scale_embeddings(lookup(params['embed'], tokens, params['final_norm'].dtype), c)


def _scale_embeddings(x, c):
    """Embeddings x times embed_scale, as the first layer reads them."""
    return x if c.embed_scale == 1 else x * jnp.asarray(c.embed_scale, x.dtype)


def _norm(x, scale, c):
    """rms_norm of x with the model's constants; x itself where scale is None, since the model has no norm there."""
    return x if scale is None else rms_norm(x, scale, c.norm_eps, c.norm_offset, c.norm_in_float32)


@jax.named_scope('norm')
def rms_norm(
    x: Float[Array, '...'], scale: Float[Array, '...'], eps: float, offset: float = 0.0, in_float32: bool = False
) -> Float[Array, '...']:
    """(offset + scale) * x / sqrt(mean(x^2) + eps), in x's dtype; the mean is over the last axes, as many as scale has.

    x is normalized in float32. in_float32: the product with offset + scale is rounded to x's dtype; otherwise the
    normalized x is, before the product.
    """
    x32, axes = x.astype(jnp.float32), tuple(range(-scale.ndim, 0))
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axes, keepdims=True) + eps)
    scale = scale.astype(jnp.float32) if in_float32 else scale
    scale = offset + scale if offset else scale
    return (scale * normed).astype(x.dtype) if in_float32 else scale * normed.astype(x.dtype)
