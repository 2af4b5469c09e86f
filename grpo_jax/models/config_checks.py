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
    *('rope_theta', 'rope_scaling', 'rope_parameters', 'partial_rotary_factor'),
    *('use_sliding_window', 'sliding_window', 'max_window_layers', 'layer_types'),
)
SWITCHES = ('tie_word_embeddings', 'attention_bias', 'mlp_bias')
# rope_type -> the numbers that it must have, those it may have
ROPE_TYPES = {
    'default': ((), ()),
    'linear': (('factor',), ()),
    'llama3': (('factor', 'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'), ()),
    'yarn': (
        ('factor', 'original_max_position_embeddings'),
        ('beta_fast', 'beta_slow', 'attention_factor', 'mscale', 'mscale_all_dim'),
    ),
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


def rope(hf: Any, path: str) -> tuple[float, dict[str, Any]]:
    """(theta, the other parameters of the rotary embedding; {} for plain ones)."""
    parameters = getattr(hf, 'rope_parameters', None)
    if not isinstance(parameters, dict):
        raise BadInput(f'rope_parameters in {path}', parameters, 'must be an object with rope_theta')
    parameters = dict(parameters)
    kind, theta = parameters.get('rope_type', 'default'), parameters.pop('rope_theta', None)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise BadInput(f'rope_type in {path}', kind, f'not supported; one of {", ".join(ROPE_TYPES)} is')
    if kind == 'yarn' and parameters.get('original_max_position_embeddings') is None:
        parameters['original_max_position_embeddings'] = hf.max_position_embeddings
    needed, possible = ROPE_TYPES[kind]
    numbers: dict[str, Any] = {name: parameters.get(name) for name in needed}
    numbers |= {name: parameters[name] for name in possible if parameters.get(name) is not None}
    for name, value in {'rope_theta': theta, **numbers}.items():
        least = 1 if name == 'rope_theta' else 0
        if not _is_number(value) or not least < value < math.inf:
            raise BadInput(f'{name} of rope_parameters in {path}', value, f'must be a number above {least}')
    if kind == 'llama3' and numbers['low_freq_factor'] >= numbers['high_freq_factor']:
        raise BadInput(f'low_freq_factor in {path}', numbers['low_freq_factor'], 'must be below high_freq_factor')
    if parameters.get('partial_rotary_factor') not in (None, 1):
        raise BadInput(
            f'partial_rotary_factor in {path}', parameters['partial_rotary_factor'], 'not supported; 1 alone is'
        )
    if not isinstance(parameters.get('truncate', True), bool):
        raise BadInput(f'truncate of rope_parameters in {path}', parameters['truncate'], 'must be true or false')
    return float(theta), {} if kind == 'default' else parameters


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)
