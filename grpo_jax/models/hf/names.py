"""How Hugging Face folders name and store our parameters: a tensor for each layer, other axis orders, fused tensors."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np

from grpo_jax.models import transformer

# Name of a tensor, and how our axes become Hugging Face's: 'dnh->nh,d' says that our [D, N, H] is stored as [N * H, D].
# Their matrices are [out, in]. types.py lists the axis letters.
LAYER_NAMES = {
    'attn_norm': ('input_layernorm.weight', 'd->d'),
    'attn_post_norm': ('post_attention_layernorm.weight', 'd->d'),
    'mlp_norm': ('pre_feedforward_layernorm.weight', 'd->d'),
    'mlp_post_norm': ('post_feedforward_layernorm.weight', 'd->d'),
    'wq': ('self_attn.q_proj.weight', 'dnh->nh,d'),
    'bq': ('self_attn.q_proj.bias', 'nh->nh'),
    'q_norm': ('self_attn.q_norm.weight', 'h->h'),
    'wk': ('self_attn.k_proj.weight', 'dkh->kh,d'),
    'bk': ('self_attn.k_proj.bias', 'kh->kh'),
    'k_norm': ('self_attn.k_norm.weight', 'h->h'),
    'wv': ('self_attn.v_proj.weight', 'dkh->kh,d'),
    'bv': ('self_attn.v_proj.bias', 'kh->kh'),
    'wo': ('self_attn.o_proj.weight', 'nhd->d,nh'),
    'bo': ('self_attn.o_proj.bias', 'd->d'),
    'w_gate': ('mlp.gate_proj.weight', 'df->f,d'),
    'b_gate': ('mlp.gate_proj.bias', 'f->f'),
    'w_up': ('mlp.up_proj.weight', 'df->f,d'),
    'b_up': ('mlp.up_proj.bias', 'f->f'),
    'w_down': ('mlp.down_proj.weight', 'fd->d,f'),
    'b_down': ('mlp.down_proj.bias', 'd->d'),
}
NAMES = {
    'embed': ('model.embed_tokens.weight', 'vd->v,d'),
    'final_norm': ('model.norm.weight', 'd->d'),
    'lm_head': ('lm_head.weight', 'dv->v,d'),
    'value_head': ('score.weight', 'd->,d'),
}
# other names where norms come only before attention and mlp, as in Llama
NORM_BEFORE = {'mlp_norm': ('post_attention_layernorm.weight', 'd->d')}
NORM_OVER_HEADS = {'q_norm': ('self_attn.q_norm.weight', 'nh->nh'), 'k_norm': ('self_attn.k_norm.weight', 'kh->kh')}
# a fused tensor -> the parameters whose rows it holds, in order
FUSED = {'self_attn.qkv_proj.weight': ('wq', 'wk', 'wv'), 'mlp.gate_up_proj.weight': ('w_gate', 'w_up')}


class Stored(NamedTuple):
    """The tensors of a Hugging Face folder that hold a parameter."""

    names: list[str]  # of tensors; stacked parameters have one for each layer
    axes: str  # as in NAMES
    shape: tuple[int, ...]  # of each tensor
    rows: slice = slice(None)  # the parameter's rows in each tensor; a fused tensor has rows of several parameters


def find_tensors(table: Mapping[str, Any], c: transformer.ModelConfig) -> dict[str, Stored]:
    """{path: Stored}: the tensors of a folder in which each parameter of the table lies; a path is like layers/wq."""
    stored = {
        path: Stored([name], axes, _stored_shape(axes, table[path].shape))
        for path, (name, axes) in NAMES.items()
        if path in table
    }
    names = LAYER_NAMES | (NORM_BEFORE if c.norms == 'before' else {})
    names |= NORM_OVER_HEADS if c.qk_norm_over_heads else {}
    shapes = {key: _stored_shape(names[key][1], param.shape[1:]) for key, param in table['layers'].items()}
    rows = dict.fromkeys(shapes, slice(None))
    for name, keys in FUSED.items() if c.fused else ():
        ends = np.cumsum([shapes[key][0] for key in keys]).tolist()
        for key, end in zip(keys, ends, strict=True):
            rows[key] = slice(end - shapes[key][0], end)
            names[key], shapes[key] = (name, names[key][1]), (ends[-1], *shapes[key][1:])
    for key in table['layers']:
        name, axes = names[key]
        tensor_names = [f'model.layers.{i}.{name}' for i in range(c.layers)]
        stored[f'layers/{key}'] = Stored(tensor_names, axes, shapes[key], rows[key])
    return stored


def _stored_shape(axes, shape):
    """The shape in which Hugging Face stores a parameter that has `shape` here; axes as in NAMES."""
    ours, theirs = axes.split('->')
    sizes = dict(zip(ours, shape, strict=True))
    return tuple(math.prod(sizes[axis] for axis in group) for group in theirs.split(','))


def to_stored(axes: str, array: Float[np.ndarray, '...']) -> Float[np.ndarray, '...']:
    """One of our arrays with the axis order and shape in which Hugging Face stores it; axes as in NAMES."""
    ours, theirs = axes.split('->')
    sizes = dict(zip(ours, array.shape, strict=True))
    array = array.transpose([ours.index(axis) for axis in theirs.replace(',', '')])
    return array.reshape([math.prod(sizes[axis] for axis in group) for group in theirs.split(',')])
