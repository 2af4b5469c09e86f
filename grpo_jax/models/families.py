"""The families of decoders: config.json to ModelConfig.

Every field of ModelConfig is read from config.json through transformers, whose defaults are the family's own.
"""

from collections.abc import Callable
import math
import os
from typing import Any, NamedTuple

import jax

from grpo_jax.errors import BadInput
from grpo_jax.models import config_checks, folders, transformer


def _biases(hf):
    """Biases of attention, as config.json says."""
    return {'qkv_bias': hf.attention_bias, 'out_bias': hf.attention_bias}


def _llama(hf):
    return _biases(hf) | {'mlp_bias': hf.mlp_bias}


def _granite(hf):
    return _llama(hf) | {
        'embed_scale': float(hf.embedding_multiplier),
        'residual_scale': float(hf.residual_multiplier),
        'attention_scale': float(hf.attention_multiplier),
        'logit_divisor': float(hf.logits_scaling),
    }


def _smollm3(hf):
    """NoPE: some layers are not rotated."""
    return _llama(hf) | {
        'unrotated': tuple(i for i, on in enumerate(hf.no_rope_layers[: hf.num_hidden_layers]) if not on)
    }


def _olmo2(hf):
    return _biases(hf) | {'norms': 'after', 'norm_in_float32': True, 'qk_norm': True, 'qk_norm_over_heads': True}


def _gemma2(hf):
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
    """A family of decoders: what differs from Llama without biases."""

    fields: Callable[[Any], dict[str, Any]]  # of its config, fields of ModelConfig
    windows: str = ''  # each layer has the sliding_window that layer_types gives it ('by type'), or 'all' have it
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
MOST_PARAMETERS = 2**43  # some twenty times those of the largest model


def import_transformers() -> Any:
    """The library; importing it takes a second, and prints advice for those without torch unless it is told not to."""
    os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
    import transformers

    return transformers


def load_config(folder: str | os.PathLike[str]) -> transformer.ModelConfig:
    """ModelConfig of a folder's config.json; BadInput for what the decoder cannot compute."""
    path = os.path.join(folder, 'config.json')
    family, hf = read_config(folder, path)
    config_checks.check(hf, path)
    own: dict[str, Any] = dict.fromkeys(('qk_norm', 'qkv_bias', 'out_bias', 'mlp_bias'), False)
    own |= FAMILIES[family].fields(hf)
    key = 'hidden_activation' if 'activation' in own else 'hidden_act'
    own['activation'] = getattr(hf, key)
    if own['activation'] not in list(transformer.ACTIVATIONS):
        known = ', '.join(transformer.ACTIVATIONS)
        raise BadInput(f'{key} in {path}', own['activation'], f'not supported; one of {known} is')
    c = transformer.ModelConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=config_checks.head_dim(hf, path),
        mlp=hf.intermediate_size,
        norm_eps=hf.rms_norm_eps,
        tie_embeddings=hf.tie_word_embeddings,
        **_rotary_fields(FAMILIES[family], hf, path),
        **own,
    )
    table = transformer.param_table(c)
    params = jax.tree.leaves(table, is_leaf=lambda node: isinstance(node, transformer.Param))
    parameters = sum(math.prod(param.shape) for param in params)
    if parameters > MOST_PARAMETERS:
        raise BadInput(
            path, f'{parameters} parameters', 'is no model that anybody has; take it from the published model'
        )
    return c


def _rotary_fields(family, hf, path):
    """The fields of ModelConfig about windows and rotary positions."""
    windows = config_checks.windows(hf, path, family.windows)
    rotary_dim = config_checks.rotary_dim(hf, path) if family.partial_rotary else 0
    parameters, local = getattr(hf, 'rope_parameters', None), None
    if family.local_rope and isinstance(parameters, dict):
        parameters, local = parameters.get('full_attention'), parameters.get('sliding_attention')

    def rope(parameters):
        theta, scaling = config_checks.rope(hf, path, parameters, rotary_dim or config_checks.head_dim(hf, path))
        return theta, tuple(sorted(scaling.items()))

    theta, scaling = rope(parameters)
    fields = {'rope_theta': theta, 'rope_scaling': scaling, 'windows': windows, 'rotary_dim': rotary_dim}
    if family.local_rope and any(windows):
        fields['local_rope'] = rope(local)
    return fields


def read_config(folder, path):
    """(model_type, the config as transformers reads it); BadInput for what it cannot read, and other families."""
    if not os.path.isfile(path):
        raise BadInput('model.path', folder, 'has no config.json; give the folder that holds it beside the weights')
    folders.check(folder)
    config = folders.read_settings(folder, 'config.json')
    config_checks.check_sizes(config, path)  # before transformers makes a list of so many layers
    family = config.get('model_type')
    if not isinstance(family, str) or family not in FAMILIES:
        raise BadInput(f'model_type in {path}', family, f'not supported; one of {", ".join(FAMILIES)} is')
    config = {name: value for name, value in config.items() if name in config_checks.READ}
    try:
        return family, import_transformers().AutoConfig.for_model(family, **config, name_or_path=os.fspath(folder))
    except Exception as error:  # transformers raises a different type for each way of being wrong
        raise BadInput(path, 'unreadable', f'{str(error)[:200]}; {folders.REMEDY}') from None


def context_length(folder: str | os.PathLike[str]) -> int:
    """Number of positions that the model is for (max_position_embeddings).

    With LongRoPE, those of short texts: beyond them all frequencies are others, those of earlier tokens too.
    """
    hf = read_config(folder, os.path.join(folder, 'config.json'))[1]
    parameters = getattr(hf, 'rope_parameters', None)
    if isinstance(parameters, dict) and parameters.get('rope_type') == 'longrope':
        return min(hf.max_position_embeddings, parameters['original_max_position_embeddings'])
    return hf.max_position_embeddings
