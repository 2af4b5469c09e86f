"""Reads and writes adapters in the folders of the library peft: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Mapping
import math
import os
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_jax.errors import BadInput
from grpo_jax.hosts import files, json_file, processes
from grpo_jax.models import lora, transformer
from grpo_jax.models.hf import names

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
DTYPES = ('F64', 'F32', 'F16', 'BF16')  # as safetensors spells them
REMEDY = 'name a folder that peft has saved'
# keys of adapter_config.json that change the computation, unless they are empty
OTHER_METHODS = (
    *('bias', 'use_dora', 'lora_bias', 'fan_in_fan_out', 'modules_to_save', 'rank_pattern', 'alpha_pattern'),
    *('layers_to_transform', 'layer_replication', 'target_parameters', 'trainable_token_indices', 'use_qalora'),
    *('use_bdlora', 'alora_invocation_tokens', 'velora_config', 'monteclora_config', 'kasa_config', 'arrow_config'),
)
# values of init_lora_weights for which peft changes the base weights, so that adapters do not fit the named model
OTHER_BASES = ('pissa', 'olora', 'corda', 'loftq', 'lora_ga')


def check_family(thing: str, value: Any, c: transformer.ModelConfig) -> None:
    """Raises BadInput(thing, value) for families with fused matrices: peft has one adapter there, we have several."""
    if c.fused:
        raise BadInput(
            thing, value, 'peft is not supported for families with fused matrices, such as phi3; leave it out'
        )


def check(folder: str | os.PathLike[str], c: transformer.ModelConfig, options: lora.LoraOptions) -> None:
    """Raises BadInput when a folder's adapters are no plain LoRA, or do not fit the options; reads only headers."""
    check_family('model.lora.path', os.fspath(folder), c)
    config = json_file.read_object(files.path_inside(folder, CONFIG), REMEDY)
    if config.get('peft_type') != 'LORA':
        raise BadInput(
            f'peft_type in {folder}', config.get('peft_type'), 'is not supported; name a folder whose peft_type is LORA'
        )
    for name in OTHER_METHODS:
        if config.get(name) not in (None, False, 'none', [], {}):
            raise BadInput(f'{name} in {folder}', config[name], 'is not supported; name a folder of plain LoRA')
    method = config.get('init_lora_weights')
    if str(method).lower().startswith(OTHER_BASES):
        raise BadInput(
            f'init_lora_weights in {folder}', method, 'has changed the weights of the model; convert it to plain LoRA'
        )
    for name, key in (('r', 'rank'), ('lora_alpha', 'alpha'), ('use_rslora', 'rslora')):
        value, theirs = getattr(options, key), config.get(name, False)  # earlier folders lack use_rslora
        if theirs != value:
            raise BadInput(f'model.lora.{key}', value, f'is not {name} = {theirs} in {folder}; use {theirs}')
    expected = {}  # tensor name -> shape, of all adapters
    for matrix, factors in lora.split(lora.policy_table(c, options))[0]['layers'].items():
        for factor, param in factors.items():
            expected |= dict.fromkeys(_tensor_names(matrix, factor, c), _factor_shape(factor, param.shape))
    with _open(folder) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}
        stored = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    missing, extra = sorted(expected.keys() - stored.keys()), sorted(stored.keys() - expected.keys())
    if missing or extra:
        raise BadInput(
            'model.lora.targets',
            options.targets,
            f'does not fit the adapters in {folder}: missing {missing[:3]}, left over {extra[:3]}; name their matrices',
        )
    for name, shape in expected.items():
        if stored[name][0] != shape:
            raise BadInput(
                f'{name} in {folder}',
                stored[name][0],
                f'must be {shape} for this model; set model.lora.path to adapters of this model',
            )
        if stored[name][1] not in DTYPES:
            raise BadInput(f'{name} in {folder}', stored[name][1], f'is none of {", ".join(DTYPES)}; convert it')


def _factor_shape(factor, shape):
    """peft's shape of a layer's factor: [rank, inputs] for A [L, inputs ..., rank], [outputs, rank] for B."""
    return (shape[-1], math.prod(shape[1:-1])) if factor == 'a' else (math.prod(shape[2:]), shape[1])


def _tensor_names(matrix, factor, c):
    """The names of the tensors, one for each layer, that hold a matrix's factor ('a' or 'b')."""
    module = names.LAYER_NAMES[matrix][0].removesuffix('.weight')
    return [f'base_model.model.model.layers.{i}.{module}.lora_{factor.upper()}.weight' for i in range(c.layers)]


def _open(folder) -> Any:
    """Opens the folder's safetensors file, to be read. Raises BadInput where there is none."""
    path = files.path_inside(folder, WEIGHTS)
    try:
        return safe_open(path, 'np')
    except (SafetensorError, OSError) as error:
        raise BadInput('model.lora.path', path, f'is not a safetensors file ({error}); {REMEDY}') from None


def load_adapters(
    folder: str | os.PathLike[str], c: transformer.ModelConfig, options: lora.LoraOptions, shardings: Any
) -> dict[str, Any]:
    """A folder's adapters as lora.split's trained tree, float32; raises BadInput as check does, and for NaN."""
    check(folder, c, options)
    table = lora.split(lora.policy_table(c, options))[0]['layers']
    with _open(folder) as tensors:

        def leaf(matrix, factor):
            tensor_names, shape = _tensor_names(matrix, factor, c), table[matrix][factor].shape
            stacked = np.stack([tensors.get_tensor(name).astype(np.float32).T for name in tensor_names])
            if not np.isfinite(stacked).all():
                reason = f'{tensor_names[0]} or its like is not finite; {REMEDY}'
                raise BadInput('model.lora.path', os.fspath(folder), reason)
            return processes.put(stacked.reshape(shape), shardings['layers'][matrix][factor])

        return {'layers': {matrix: {factor: leaf(matrix, factor) for factor in 'ab'} for matrix in table}}


def save_adapters(
    folder: str | os.PathLike[str],
    trained: Mapping[str, Any],
    c: transformer.ModelConfig,
    options: lora.LoraOptions,
    base: str,
    dtype: Any,
) -> None:
    """Writes a folder of adapters that peft can load.

    trained: the trained tree of lora.split, on the host. base: the model that the adapters belong to, a folder or a hub
    name. dtype: of the stored factors.
    """
    tensors, modules = {}, []
    for matrix, factors in trained['layers'].items():
        modules.append(names.LAYER_NAMES[matrix][0].removesuffix('.weight').rsplit('.', 1)[-1])
        for factor, stacked in factors.items():
            stacked = np.asarray(stacked).astype(dtype)
            rows, columns = _factor_shape(factor, stacked.shape)
            for name, array in zip(_tensor_names(matrix, factor, c), stacked, strict=True):
                tensors[name] = np.ascontiguousarray(array.reshape(columns, rows).T)
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, os.path.join(folder, WEIGHTS), metadata={'format': 'pt'})
    config = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base,
        'r': options.rank,
        'lora_alpha': options.alpha,
        'use_rslora': options.rslora,
        'lora_dropout': 0.0,
        'target_modules': sorted(modules),
        'bias': 'none',
        'fan_in_fan_out': False,
        'init_lora_weights': True,
        'inference_mode': True,
        'modules_to_save': None,
    }
    json_file.write(os.path.join(folder, CONFIG), config)
