"""The families of decoders: config.json to ModelConfig.

Every field of ModelConfig is read from config.json through transformers, whose defaults are the family's own.
"""

import math
import os
from typing import Any

import jax

from grpo_jax.errors import BadInput
from grpo_jax.models import config_checks, folders, transformer

# model_type -> of its config, the fields of ModelConfig in which the family differs from Llama without biases
FAMILIES = {
    'llama': lambda hf: {'qkv_bias': hf.attention_bias, 'out_bias': hf.attention_bias, 'mlp_bias': hf.mlp_bias},
    'qwen2': lambda hf: {'qkv_bias': True},
    'qwen3': lambda hf: {'qkv_bias': hf.attention_bias, 'out_bias': hf.attention_bias, 'qk_norm': True},
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
    if hf.hidden_act != 'silu':
        raise BadInput(f'hidden_act in {path}', hf.hidden_act, 'only silu is supported')
    for name, none in (('use_sliding_window', 'false'), ('sliding_window', 'null')):
        if family != 'llama' and getattr(hf, name, None):
            raise BadInput(f'{name} in {path}', getattr(hf, name), f'not supported; set it to {none}')
    kinds = getattr(hf, 'layer_types', None)
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 'full_attention' for kind in kinds)):
        raise BadInput(f'layer_types in {path}', kinds, 'not supported; full_attention alone is')
    theta, rope = config_checks.rope(hf, path)
    own = dict.fromkeys(('qk_norm', 'qkv_bias', 'out_bias', 'mlp_bias'), False) | FAMILIES[family](hf)
    c = transformer.ModelConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=config_checks.head_dim(hf, path),
        mlp=hf.intermediate_size,
        norm_eps=hf.rms_norm_eps,
        rope_theta=float(theta),
        rope_scaling=tuple(sorted(rope.items())),
        tie_embeddings=hf.tie_word_embeddings,
        **own,
    )
    parameters = sum(math.prod(p.shape) for p in jax.tree.leaves(transformer.param_table(c), is_leaf=_is_param))
    if parameters > MOST_PARAMETERS:
        raise BadInput(
            path, f'{parameters} parameters', 'is no model that anybody has; take it from the published model'
        )
    return c


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
    """Number of positions that the model is for (max_position_embeddings)."""
    path = os.path.join(folder, 'config.json')
    return read_config(folder, path)[1].max_position_embeddings


def _is_param(node):
    return isinstance(node, transformer.Param)
