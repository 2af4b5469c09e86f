"""What a config.json may say: sizes that a decoder can have, and rotary embeddings that it computes."""

from collections.abc import Mapping
import math
from typing import Any

from grpo_jax.errors import BadInput

SIZES = {
    'vocab_size': 2**31 - 1,
    'hidden_size': 2**31 - 1,
    'num_hidden_layers': 10_000,
    'num_attention_heads': 2**31 - 1,
    'num_key_value_heads': 2**31 - 1,
    'intermediate_size': 2**31 - 1,
    'max_position_embeddings': 2**31 - 1,
}  # the largest that can be meant
# what of a config.json is read; the rest, some of which is about training or lets transformers allocate, never is
READ = (
    *SIZES,
    *('tie_word_embeddings', 'attention_bias', 'mlp_bias', 'rms_norm_eps', 'hidden_act', 'head_dim', 'tokenizer_class'),
    *('rope_theta', 'rope_scaling', 'rope_parameters', 'partial_rotary_factor', 'original_max_position_embeddings'),
    *('use_sliding_window', 'sliding_window', 'max_window_layers', 'layer_types', 'sliding_window_pattern'),
    *('rope_local_base_freq', 'no_rope_layers', 'no_rope_layer_interval', 'use_bidirectional_attention'),
    *('hidden_activation', 'query_pre_attn_scalar', 'attn_logit_softcapping', 'final_logit_softcapping'),
    *('embedding_multiplier', 'residual_multiplier', 'attention_multiplier', 'logits_scaling'),
)
SWITCHES = ('tie_word_embeddings', 'attention_bias', 'mlp_bias')
CAPS = ('attn_logit_softcapping', 'final_logit_softcapping')  # null: none
SCALES = (
    'query_pre_attn_scalar',
    'embedding_multiplier',
    'residual_multiplier',
    'attention_multiplier',
    'logits_scaling',
)
LAYER_TYPES = ('full_attention', 'sliding_attention')
# rope_type -> the numbers that it must have, those it may have
ROPE_TYPES = {
    'default': ((), ()),
    'linear': (('factor',), ()),
    'llama3': (('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'), ()),
    'yarn': (
        ('factor', 'original_max_position_embeddings'),
        ('beta_fast', 'beta_slow', 'attention_factor', 'mscale', 'mscale_all_dim'),
    ),
    'longrope': (('factor', 'original_max_position_embeddings'), ('attention_factor',)),
}


def check_sizes(config: Mapping[str, Any], path: str) -> None:
    """BadInput for a size that no decoder can have, among those that config.json gives."""
    for name, most in SIZES.items():
        size = config.get(name)
        if size is not None and not (type(size) is int and 1 <= size <= most):
            raise BadInput(f'{path}, {name}', size, f'must be a whole number of 1 to {most}')


def check(hf: Any, path: str) -> None:
    """BadInput for a size, a number or a switch that no decoder can have; hf is the config as transformers reads it."""
    check_sizes({name: getattr(hf, name, 0) or 0 for name in SIZES}, path)
    if not _is_number(hf.rms_norm_eps) or not 0 < hf.rms_norm_eps < 1:
        raise BadInput(f'rms_norm_eps in {path}', hf.rms_norm_eps, 'must be a number between 0 and 1')
    for name in SWITCHES:
        if not isinstance(getattr(hf, name, False), bool):
            raise BadInput(f'{name} in {path}', getattr(hf, name), 'must be true or false')
    for name in (*CAPS, *SCALES):
        value = getattr(hf, name, 1)
        if not (value is None and name in CAPS) and not _is_positive(value):
            raise BadInput(f'{name} in {path}', value, 'must be a number above 0')
    if hf.model_type == 'gemma3_text' and hf.attn_logit_softcapping is not None:  # transformers leaves it out as well
        raise BadInput(f'attn_logit_softcapping in {path}', hf.attn_logit_softcapping, 'not supported; set it to null')
    if getattr(hf, 'use_bidirectional_attention', None):
        raise BadInput(f'use_bidirectional_attention in {path}', True, 'not supported; attention is causal')
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise BadInput(
            f'num_key_value_heads in {path}',
            hf.num_key_value_heads,
            f'must divide num_attention_heads = {hf.num_attention_heads}',
        )


def head_dim(hf: Any, path: str) -> int:
    """The width of a head; BadInput where it is not even, as rotary embeddings need it."""
    size = getattr(hf, 'head_dim', None)
    if size is None:
        size, rest = divmod(hf.hidden_size, hf.num_attention_heads)
        if rest:
            raise BadInput(
                f'num_attention_heads in {path}', hf.num_attention_heads, f'must divide hidden_size = {hf.hidden_size}'
            )
    if type(size) is not int or size < 2 or size % 2:
        raise BadInput(f'head_dim in {path}', size, 'must be an even whole number above 0')
    return size


def windows(hf: Any, path: str, which: str) -> tuple[int, ...]:
    """The window of each layer, 0 without one; () where no layer has one.

    which is that of families.Family: '' for a family without windows. BadInput for layer_types of another kind.
    """
    size, kinds = getattr(hf, 'sliding_window', None) if which else None, getattr(hf, 'layer_types', None)
    same = [LAYER_TYPES[size is not None]] * hf.num_hidden_layers
    possible = LAYER_TYPES if which == 'by type' else same[:1]
    kinds = same if kinds is None else kinds
    if not isinstance(kinds, list) or not all(kind in possible for kind in kinds):
        raise BadInput(f'layer_types in {path}', kinds, f'not supported; {" and ".join(possible)} alone')
    if len(kinds) != hf.num_hidden_layers:
        raise BadInput(f'layer_types in {path}', kinds, f'must have num_hidden_layers = {hf.num_hidden_layers} entries')
    if 'sliding_attention' not in kinds:
        return ()
    if type(size) is not int or size < 1:
        raise BadInput(f'sliding_window in {path}', size, 'must be a whole number above 0')
    return tuple(size if kind == 'sliding_attention' else 0 for kind in kinds)


def rotary_dim(hf: Any, path: str) -> int:
    """How many numbers of a head are rotated, by partial_rotary_factor; 0 for all. BadInput where it is not even."""
    parameters, size = getattr(hf, 'rope_parameters', None), head_dim(hf, path)
    factor = parameters.get('partial_rotary_factor') if isinstance(parameters, dict) else None
    if factor in (None, 1):
        return 0
    if not _is_number(factor) or not 0 < factor < 1 or int(size * factor) < 2 or int(size * factor) % 2:
        raise BadInput(f'partial_rotary_factor in {path}', factor, f'must cut an even part from head_dim = {size}')
    return int(size * factor)


def rope(hf: Any, path: str, parameters: Any, numbers_rotated: int) -> tuple[float, dict[str, Any]]:
    """(theta, the other parameters of a rotary embedding of so many numbers; {} for plain ones)."""
    if not isinstance(parameters, dict):
        raise BadInput(f'rope_parameters in {path}', parameters, 'must be an object with rope_theta')
    parameters = dict(parameters)
    kind, theta = parameters.get('rope_type', 'default'), parameters.pop('rope_theta', None)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise BadInput(f'rope_type in {path}', kind, f'not supported; one of {", ".join(ROPE_TYPES)} is')
    if kind in ('yarn', 'longrope') and parameters.get('original_max_position_embeddings') is None:
        parameters['original_max_position_embeddings'] = hf.max_position_embeddings
    own: dict[str, Any] = {}
    if kind == 'longrope':
        original, short = parameters['original_max_position_embeddings'], parameters.get('short_factor')
        if type(original) is not int or original < 2:
            raise BadInput(f'original_max_position_embeddings in {path}', original, 'must be a whole number above 1')
        if not isinstance(short, list) or len(short) != numbers_rotated // 2 or not all(map(_is_positive, short)):
            raise BadInput(
                f'short_factor in {path}', short, f'must be a list of {numbers_rotated // 2} numbers above 0'
            )
        own['short_factor'] = tuple(short)
        if parameters.get('factor') is None:
            parameters['factor'] = hf.max_position_embeddings / original
    needed, possible = ROPE_TYPES[kind]
    numbers: dict[str, Any] = {name: parameters.get(name) for name in needed}
    numbers |= {name: parameters[name] for name in possible if parameters.get(name) is not None}
    for name, value in {'rope_theta': theta, **numbers}.items():
        least = 1 if name == 'rope_theta' else 0
        if not _is_number(value) or not least < value < math.inf:
            raise BadInput(f'{name} of rope_parameters in {path}', value, f'must be a number above {least}')
    if kind == 'llama3' and numbers['low_freq_factor'] >= numbers['high_freq_factor']:
        raise BadInput(f'low_freq_factor in {path}', numbers['low_freq_factor'], 'must be below high_freq_factor')
    factor = parameters.pop('partial_rotary_factor', None)
    if factor not in (None, 1) and numbers_rotated == head_dim(hf, path):
        raise BadInput(f'partial_rotary_factor in {path}', factor, 'not supported in this family; 1 alone is')
    if not isinstance(parameters.get('truncate', True), bool):
        raise BadInput(f'truncate of rope_parameters in {path}', parameters['truncate'], 'must be true or false')
    if kind == 'yarn' and 'truncate' in parameters:
        own['truncate'] = parameters['truncate']
    return float(theta), {} if kind == 'default' else {'rope_type': kind, **numbers, **own}


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_positive(value):
    return _is_number(value) and 0 < value < math.inf
