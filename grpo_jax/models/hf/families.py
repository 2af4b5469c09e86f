"""The families of decoders: reads config.json into a ModelConfig, and refuses a config.json that is not supported.

Every field of ModelConfig is read from config.json through transformers, which has each family's defaults.
"""

from collections.abc import Callable, Mapping
import contextlib
import logging
import math
import os
from typing import Any, NamedTuple

import jax

from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.models import transformer
from grpo_jax.models.hf import folder as folders
from grpo_jax.models.hf import tensors as tensor_files
from grpo_jax.models.hf.names import NAMES

logger = logging.getLogger('grpo_jax')

SIZES = {
    'vocab_size': 2**31 - 1,
    'hidden_size': 2**31 - 1,
    'num_hidden_layers': 10_000,
    'num_attention_heads': 2**31 - 1,
    'num_key_value_heads': 2**31 - 1,
    'intermediate_size': 2**31 - 1,
    'max_position_embeddings': 2**31 - 1,
}  # key of config.json -> the largest size that somebody can mean
# The keys of config.json that are read. The others are about training, or they make transformers allocate memory.
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
# rope_type -> (keys with numbers that it must have, keys that it may have)
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


def _biases(hf):
    """Fields of ModelConfig for the biases of attention, as attention_bias says."""
    return {'qkv_bias': hf.attention_bias, 'out_bias': hf.attention_bias}


def _llama(hf):
    """Fields of ModelConfig for Llama's biases."""
    return _biases(hf) | {'mlp_bias': hf.mlp_bias}


def _granite(hf):
    """Fields of ModelConfig for Granite: Llama's, and multipliers of embeddings, residuals, attention and logits."""
    return _llama(hf) | {
        'embed_scale': float(hf.embedding_multiplier),
        'residual_scale': float(hf.residual_multiplier),
        'attention_scale': float(hf.attention_multiplier),
        'logit_divisor': float(hf.logits_scaling),
    }


def _smollm3(hf):
    """Fields of ModelConfig for SmolLM3: Llama's, and the layers without rotary positions (NoPE)."""
    return _llama(hf) | {
        'unrotated': tuple(i for i, on in enumerate(hf.no_rope_layers[: hf.num_hidden_layers]) if not on)
    }


def _olmo2(hf):
    """Fields of ModelConfig for OLMo 2: norms after attention and mlp, and norms over all heads of q and k."""
    return _biases(hf) | {'norms': 'after', 'norm_in_float32': True, 'qk_norm': True, 'qk_norm_over_heads': True}


def _gemma2(hf):
    """Fields of ModelConfig for Gemma 2: norms around attention and mlp, scales and soft caps."""
    return _biases(hf) | {
        'activation': hf.hidden_activation,
        'norms': 'around',
        'norm_offset': 1.0,
        'norm_in_float32': True,
        'embed_scale': hf.hidden_size**0.5,
        'attention_scale': hf.query_pre_attn_scalar**-0.5,
        'attention_cap': float(hf.attn_logit_softcapping or 0),
        'logit_cap': float(hf.final_logit_softcapping or 0),
    }


class Family(NamedTuple):
    """How a family of decoders differs from Llama without biases."""

    fields: Callable[[Any], dict[str, Any]]  # config as transformers reads it -> the fields of ModelConfig that differ
    windows: str = ''  # layers with sliding_window: those that layer_types names ('by type'), 'all', or none ('')
    local_rope: bool = False  # rope_parameters are by layer type
    partial_rotary: bool = False  # partial_rotary_factor is obeyed


# model_type -> Family
FAMILIES = {
    'llama': Family(_llama),
    'mistral': Family(lambda hf: {}, windows='all'),
    'qwen2': Family(lambda hf: {'qkv_bias': True}, windows='by type'),
    'qwen3': Family(lambda hf: _biases(hf) | {'qk_norm': True}, windows='by type'),
    'phi3': Family(lambda hf: {'fused': True}, windows='all', partial_rotary=True),
    'smollm3': Family(_smollm3, windows='by type'),
    'granite': Family(_granite),
    'olmo2': Family(_olmo2),
    'olmo3': Family(_olmo2, windows='by type', local_rope=True),
    'gemma2': Family(_gemma2, windows='by type'),
    'gemma3_text': Family(lambda hf: _gemma2(hf) | {'qk_norm': True}, windows='by type', local_rope=True),
}
MOST_PARAMETERS = 2**43  # some twenty times the largest model


def import_transformers() -> Any:
    """Returns the library transformers. It takes a second to import, and would print advice where torch is missing."""
    os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
    import transformers

    return transformers


def load_config(folder: str | os.PathLike[str]) -> transformer.ModelConfig:
    """Reads a folder's config.json as a ModelConfig; tie_embeddings is False if the weights have a head of their own.

    Raises BadInput for a model that our decoder cannot compute.
    """
    path = os.path.join(folder, 'config.json')
    family, hf = read_config(folder, path)
    check_config(hf, path)
    fields: dict[str, Any] = dict.fromkeys(('qk_norm', 'qkv_bias', 'out_bias', 'mlp_bias'), False)
    fields |= FAMILIES[family].fields(hf)
    key = 'hidden_activation' if 'activation' in fields else 'hidden_act'
    fields['activation'] = getattr(hf, key)
    if fields['activation'] not in list(transformer.ACTIVATIONS):
        supported = ', '.join(transformer.ACTIVATIONS)
        raise BadInput(f'{key} in {path}', fields['activation'], f'is not supported; choose a model with {supported}')
    if own_head := hf.tie_word_embeddings and has_own_head(folder):
        logger.warning('%s: config.json ties the head, and the weights have one of its own: both are kept', folder)
    c = transformer.ModelConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=read_head_dim(hf, path),
        mlp=hf.intermediate_size,
        norm_eps=hf.rms_norm_eps,
        tie_embeddings=hf.tie_word_embeddings and not own_head,
        **_rotary_fields(FAMILIES[family], hf, path),
        **fields,
    )
    sizes = transformer.map_table(lambda _, param: math.prod(param.shape), transformer.param_table(c))
    parameters = sum(jax.tree.leaves(sizes))
    if parameters > MOST_PARAMETERS:
        raise BadInput(
            path, NO_VALUE, f'describes {parameters} parameters, which no published model has; {folders.REMEDY}'
        )
    return c


def has_own_head(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder's weights have both a head and an embedding, and these differ. Other weights are not read."""
    with contextlib.suppress(BadInput):  # no weights, or such as check_weights refuses
        stored = tensor_files.attach_scales(folder, tensor_files.list_tensors(folder))
        embedding, head = (stored.get(NAMES[name][0]) for name in ('embed', 'lm_head'))
        return embedding is not None and head is not None and tensor_files.differ(embedding, head)
    return False


def _rotary_fields(family, hf, path):
    """The fields of ModelConfig for windows and rotary positions; path: of config.json, for messages."""
    windows = read_windows(hf, path, family.windows)
    rotary_dim = read_rotary_dim(hf, path) if family.partial_rotary else 0
    parameters, local = getattr(hf, 'rope_parameters', None), None
    if family.local_rope and isinstance(parameters, dict):
        parameters, local = parameters.get('full_attention'), parameters.get('sliding_attention')

    def rope(parameters):
        theta, scaling = read_rope(hf, path, parameters, rotary_dim or read_head_dim(hf, path))
        return theta, tuple(sorted(scaling.items()))

    theta, scaling = rope(parameters)
    fields = {'rope_theta': theta, 'rope_scaling': scaling, 'windows': windows, 'rotary_dim': rotary_dim}
    if family.local_rope and any(windows):
        fields['local_rope'] = rope(local)
    return fields


def read_config(folder, path):
    """(model_type, the config as transformers reads it). Raises BadInput for an unreadable config and other families.

    folder: where config.json and the other files lie, which are checked first; path: of config.json.
    """
    if not os.path.isfile(path):
        raise BadInput('model.path', folder, 'has no config.json; give the folder that holds it beside the weights')
    folders.check(folder)
    config = folders.read_settings(folder, 'config.json')
    check_sizes(config, path)  # before transformers makes a list of so many layers
    family = config.get('model_type')
    if not isinstance(family, str) or family not in FAMILIES:
        if family is None and os.path.isdir(os.path.join(folder, 'checkpoints')):
            remedy = 'is the folder of a run and of no model; export it: grpo-jax export --workdir=DIR --out=MODEL'
            raise BadInput('model.path', folder, remedy)
        raise BadInput(f'model_type in {path}', family, f'is not supported; choose a model of {", ".join(FAMILIES)}')
    config = {name: value for name, value in config.items() if name in READ}
    try:
        return family, import_transformers().AutoConfig.for_model(family, **config, name_or_path=os.fspath(folder))
    except Exception as error:  # transformers raises a different type for each way of being wrong
        raise BadInput(path, NO_VALUE, f'cannot be read: {str(error)[:200]}; {folders.REMEDY}') from None


def context_length(folder: str | os.PathLike[str]) -> int:
    """Number of positions that the model was made for: max_position_embeddings of config.json.

    With LongRoPE, at most original_max_position_embeddings: a longer text would need other frequencies for all tokens.
    """
    hf = read_config(folder, os.path.join(folder, 'config.json'))[1]
    parameters = getattr(hf, 'rope_parameters', None)
    if isinstance(parameters, dict) and parameters.get('rope_type') == 'longrope':
        return min(hf.max_position_embeddings, parameters['original_max_position_embeddings'])
    return hf.max_position_embeddings


def check_sizes(config: Mapping[str, Any], path: str) -> None:
    """Raises BadInput for a size in a config.json that no decoder can have; config: the content of the file `path`."""
    for name, most in SIZES.items():
        size = config.get(name)
        if size is not None and not (type(size) is int and 1 <= size <= most):
            raise _config_error(path, name, size, f'must be a whole number of 1 to {most}')


def check_config(hf: Any, path: str) -> None:
    """Raises BadInput for a size, number or switch that is not supported; hf: the config as transformers reads it."""
    check_sizes({name: getattr(hf, name, 0) or 0 for name in SIZES}, path)
    if not _is_number(hf.rms_norm_eps) or not 0 < hf.rms_norm_eps < 1:
        raise _config_error(path, 'rms_norm_eps', hf.rms_norm_eps, 'must be a number between 0 and 1')
    for name in SWITCHES:
        if not isinstance(getattr(hf, name, False), bool):
            raise _config_error(path, name, getattr(hf, name), 'must be true or false')
    for name in (*CAPS, *SCALES):
        value = getattr(hf, name, 1)
        if not (value is None and name in CAPS) and not _is_positive(value):
            raise _config_error(path, name, value, 'must be a number above 0')
    if hf.model_type == 'gemma3_text' and hf.attn_logit_softcapping is not None:  # transformers leaves it out as well
        raise BadInput(f'attn_logit_softcapping in {path}', hf.attn_logit_softcapping, 'must be null; set it to that')
    if getattr(hf, 'use_bidirectional_attention', None):
        raise BadInput(f'use_bidirectional_attention in {path}', True, 'is not supported; choose a causal model')
    if hf.num_attention_heads % hf.num_key_value_heads:
        rule = f'must divide num_attention_heads = {hf.num_attention_heads}'
        raise _config_error(path, 'num_key_value_heads', hf.num_key_value_heads, rule)


def read_head_dim(hf: Any, path: str) -> int:
    """The width of a head. Raises BadInput unless it is an even whole number, since rotary positions need pairs."""
    size = getattr(hf, 'head_dim', None)
    if size is None:
        size, rest = divmod(hf.hidden_size, hf.num_attention_heads)
        if rest:
            rule = f'must divide hidden_size = {hf.hidden_size}'
            raise _config_error(path, 'num_attention_heads', hf.num_attention_heads, rule)
    if type(size) is not int or size < 2 or size % 2:
        raise BadInput(f'head_dim in {path}', size, 'must be an even whole number above 0; choose another model')
    return size


def read_windows(hf: Any, path: str, which: str) -> tuple[int, ...]:
    """Each layer's window in positions, 0 without one; () where no layer has one.

    which: Family.windows. Raises BadInput for layer_types that the family does not have or that are not one for each
    layer, and for a window that is no whole number above 0.
    """
    size, kinds = getattr(hf, 'sliding_window', None) if which else None, getattr(hf, 'layer_types', None)
    by_default = [LAYER_TYPES[size is not None]] * hf.num_hidden_layers
    possible = LAYER_TYPES if which == 'by type' else by_default[:1]
    kinds = by_default if kinds is None else kinds
    if not isinstance(kinds, list) or not all(kind in possible for kind in kinds):
        raise BadInput(f'layer_types in {path}', kinds, f'must be {" or ".join(possible)}; choose another model')
    if len(kinds) != hf.num_hidden_layers:
        raise _config_error(path, 'layer_types', kinds, f'must have num_hidden_layers = {hf.num_hidden_layers} entries')
    if 'sliding_attention' not in kinds:
        return ()
    if type(size) is not int or size < 1:
        raise _config_error(path, 'sliding_window', size, 'must be a whole number above 0')
    return tuple(size if kind == 'sliding_attention' else 0 for kind in kinds)


def read_rotary_dim(hf: Any, path: str) -> int:
    """How many numbers of a head partial_rotary_factor rotates; 0: all. Raises BadInput unless the part is even."""
    parameters, size = getattr(hf, 'rope_parameters', None), read_head_dim(hf, path)
    factor = parameters.get('partial_rotary_factor') if isinstance(parameters, dict) else None
    if factor in (None, 1):
        return 0
    if not _is_number(factor) or not 0 < factor < 1 or int(size * factor) < 2 or int(size * factor) % 2:
        raise _config_error(path, 'partial_rotary_factor', factor, f'must cut an even part from head_dim = {size}')
    return int(size * factor)


def read_rope(hf: Any, path: str, parameters: Any, numbers_rotated: int) -> tuple[float, dict[str, Any]]:
    """(theta, scaling parameters; {} for the default type) of a rotary embedding, as in attention.rope_frequencies.

    parameters: rope_parameters of config.json. numbers_rotated: how many numbers of a head the embedding rotates.
    Raises BadInput for a type or a number that is not supported.
    """
    if not isinstance(parameters, dict):
        raise _config_error(path, 'rope_parameters', parameters, 'must be an object with rope_theta')
    parameters = dict(parameters)
    kind, theta = parameters.get('rope_type', 'default'), parameters.pop('rope_theta', None)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise BadInput(f'rope_type in {path}', kind, f'is not supported; choose a model with {", ".join(ROPE_TYPES)}')
    if kind in ('yarn', 'longrope') and parameters.get('original_max_position_embeddings') is None:
        parameters['original_max_position_embeddings'] = hf.max_position_embeddings
    options: dict[str, Any] = {}  # parameters that are no numbers
    if kind == 'longrope':
        original, short = parameters['original_max_position_embeddings'], parameters.get('short_factor')
        if type(original) is not int or original < 2:
            raise _config_error(path, 'original_max_position_embeddings', original, 'must be a whole number above 1')
        if not isinstance(short, list) or len(short) != numbers_rotated // 2 or not all(map(_is_positive, short)):
            raise _config_error(path, 'short_factor', short, f'must be {numbers_rotated // 2} numbers above 0')
        options['short_factor'] = tuple(short)
        if parameters.get('factor') is None:
            parameters['factor'] = hf.max_position_embeddings / original
    needed, possible = ROPE_TYPES[kind]
    numbers: dict[str, Any] = {name: parameters.get(name) for name in needed}
    numbers |= {name: parameters[name] for name in possible if parameters.get(name) is not None}
    for name, value in {'rope_theta': theta, **numbers}.items():
        least = 1 if name == 'rope_theta' else 0
        if not _is_number(value) or not least < value < math.inf:
            raise _config_error(path, f'{name} of rope_parameters', value, f'must be a number above {least}')
    if kind == 'llama3' and numbers['low_freq_factor'] >= numbers['high_freq_factor']:
        raise _config_error(path, 'low_freq_factor', numbers['low_freq_factor'], 'must be below high_freq_factor')
    factor = parameters.pop('partial_rotary_factor', None)
    if factor not in (None, 1) and numbers_rotated == read_head_dim(hf, path):
        raise BadInput(f'partial_rotary_factor in {path}', factor, 'must be 1 in this family; choose another model')
    if not isinstance(parameters.get('truncate', True), bool):
        raise _config_error(path, 'truncate of rope_parameters', parameters['truncate'], 'must be true or false')
    if kind == 'yarn' and 'truncate' in parameters:
        options['truncate'] = parameters['truncate']
    return float(theta), {} if kind == 'default' else {'rope_type': kind, **numbers, **options}


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_positive(value):
    return _is_number(value) and 0 < value < math.inf


def _config_error(path, name, value, rule):
    """The BadInput for a value in a config.json that breaks the rule."""
    return BadInput(f'{name} in {path}', value, f'{rule}; {folders.REMEDY}')
