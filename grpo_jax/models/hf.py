"""Hugging Face folders in and out: config.json, safetensors (single or sharded), tokenizer files.

Every field of ModelConfig is read from config.json through transformers, whose defaults are the
family's own. A path that is no folder is taken for a hub name.
"""

from collections.abc import Mapping
import json
import math
import os
import re
import shutil
from typing import Any

import jax
from jax.tree_util import keystr
import numpy as np
from safetensors.numpy import save_file

from grpo_jax import PACKAGE, activity
from grpo_jax.errors import BadInput
from grpo_jax.hosts import buckets, files, hub
from grpo_jax.models import config_checks, folders, heads, loading, quantization, tensor_files, transformer

# model_type -> of its config, the fields of ModelConfig in which the family differs from Llama without biases
FAMILIES = {
    'llama': lambda hf: {'qkv_bias': hf.attention_bias, 'out_bias': hf.attention_bias, 'mlp_bias': hf.mlp_bias},
    'qwen2': lambda hf: {'qkv_bias': True},
    'qwen3': lambda hf: {'qkv_bias': hf.attention_bias, 'out_bias': hf.attention_bias, 'qk_norm': True},
}
PATTERNS = ('*.json', '*.safetensors', '*.txt', '*.model', '*.jinja')  # files of a model that are fetched
MOST_PARAMETERS = 2**43  # some twenty times those of the largest model
# Name of a tensor, and its axes from ours to Hugging Face's: 'dnh->nh,d' is [D, N, H] stored as [N * H, D]. Theirs are
# linear weights [out, in]. Axis letters are those of types.py.
LAYER_NAMES = {
    'attn_norm': ('input_layernorm.weight', 'd->d'),
    'mlp_norm': ('post_attention_layernorm.weight', 'd->d'),
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


def find(path: str | os.PathLike[str]) -> str:
    """The local folder of a model: a path from here, one from this package (configs/models/...), or what is fetched.

    Fetched are models of the hub and folders in buckets.
    """
    path = os.fspath(path)
    if buckets.is_url(path):
        return buckets.download('model.path', path, PATTERNS)
    for folder in (path, os.path.join(PACKAGE, path)):
        if path and os.path.isdir(folder):
            return folder
    if not re.fullmatch(r'[\w.-]+/[\w.-]+', path):
        raise BadInput(
            'model.path', path, 'no such folder; give a Hugging Face folder, or a hub name like Qwen/Qwen3-0.6B'
        )
    folder = hub.fetch('model.path', path, PATTERNS, 'no such folder, and {hub}, or give a Hugging Face folder')
    hub.announce(f'model {path}: commit {os.path.basename(folder)} of the hub')
    return folder


def _transformers() -> Any:
    """The library; importing it takes a second, and prints advice for those without torch unless it is told not to."""
    os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
    import transformers

    return transformers


def load_config(folder: str | os.PathLike[str]) -> transformer.ModelConfig:
    """ModelConfig of a folder's config.json; BadInput for what the decoder cannot compute."""
    path = os.path.join(folder, 'config.json')
    family, hf = _read_config(folder, path)
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


def _read_config(folder, path):
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
        return family, _transformers().AutoConfig.for_model(family, **config, name_or_path=os.fspath(folder))
    except Exception as error:  # transformers raises a different type for each way of being wrong
        raise BadInput(path, 'unreadable', f'{str(error)[:200]}; {folders.REMEDY}') from None


def context_length(folder: str | os.PathLike[str]) -> int:
    """Number of positions that the model is for (max_position_embeddings)."""
    path = os.path.join(folder, 'config.json')
    return _read_config(folder, path)[1].max_position_embeddings


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """The folder's tokenizer; BadInput when there is none, and for one whose tokens the folder's model does not have.

    A bare sentencepiece model is refused: without tokenizer_config.json, transformers guesses its prefix wrong.
    """
    if not any(os.path.isfile(os.path.join(folder, name)) for name in ('tokenizer.json', 'tokenizer_config.json')):
        raise BadInput('model.path', folder, 'has neither tokenizer.json nor tokenizer_config.json; add them')
    folders.check(folder)
    folders.check_tokenizer(folder)
    path = os.path.join(folder, 'config.json')
    # else transformers would read the file by itself, and obey all of it
    known = {'config': _read_config(folder, path)[1]} if os.path.isfile(path) else {}
    try:
        tokenizer = _transformers().AutoTokenizer.from_pretrained(
            folder, **known, trust_remote_code=False, local_files_only=True
        )
        given = {*tokenizer.encode('1'), *tokenizer.all_special_ids}  # what is wrong with some settings comes out here
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises plain Exception for a malformed file, and its panics are none
        raise BadInput(
            'model.path',
            folder,
            f'has no readable tokenizer ({str(error)[:200]}); add tokenizer.json and tokenizer_config.json',
        ) from None
    if known:
        _check_vocabulary(tokenizer, given, folder, known['config'].vocab_size)
    return tokenizer


def _check_vocabulary(tokenizer, given, folder, size):
    """BadInput when the tokenizer has tokens that the model does not have, or none, or gives such without having them.

    given are the tokens that it puts around a text.
    """
    if len(tokenizer) > size:
        raise BadInput('model.path', folder, f'its tokenizer has {len(tokenizer)} tokens and the model {size}')
    last = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= last < size:
        raise BadInput(
            'model.path', folder, f'the last token of its tokenizer is {last}, and the model has {size} tokens'
        )
    if not all(0 <= token < size for token in given):
        raise BadInput('model.path', folder, f'its tokenizer gives token {max(given)}, and the model has {size} tokens')


def stop_tokens(folder: str | os.PathLike[str], tokenizer: Any, vocab_size: int | None = None) -> tuple[int, ...]:
    """Sorted ids that end a completion: eos of generation_config.json, and of the tokenizer.

    BadInput for one that is no id, or none of a model of vocab_size tokens.
    """
    ids = {*eos_tokens(folder, 'generation_config.json', vocab_size)}
    ids |= set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if not ids:
        raise BadInput('model.path', folder, 'names no end-of-sequence token; set eos_token in tokenizer_config.json')
    return tuple(sorted(ids))


def eos_tokens(folder: str | os.PathLike[str], name: str, vocab_size: int | None = None) -> list[int]:
    """The eos_token_id of a JSON file of the folder, [] where it has none; BadInput as stop_tokens."""
    listed = folders.read_settings(folder, name).get('eos_token_id')
    listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
    for i in listed:
        if type(i) is not int or i < 0 or (vocab_size is not None and i >= vocab_size):
            most, path = 'the last token' if vocab_size is None else vocab_size - 1, os.path.join(folder, name)
            raise BadInput(f'eos_token_id in {path}', i, f'must be the id of a token, 0 to {most}; {folders.REMEDY}')
    return listed


def load_params(folder: str | os.PathLike[str], c: transformer.ModelConfig, shardings: Any) -> dict[str, Any]:
    """Float32 parameters of the folder's safetensors, each leaf placed by its sharding (or device) as it is read.

    A process reads what its own devices hold, and of the files no more than tensor_files.BLOCK bytes at a time.

    With a value_head among the shardings, those of a sequence classification with one label. BadInput as check_weights.
    """
    table = _table(shardings, c)
    stored, names = _check(folder, table, c)

    def leaf(key, param, sharding):
        layers, axes = names[keystr(key, simple=True, separator='/')]
        array = loading.load_parameter([stored[name] for name in layers], axes, param.shape, sharding)
        reading.done += 1
        return array

    with activity.during(f'reading the weights in {folder}', len(names)) as reading:
        params = jax.tree_util.tree_map_with_path(leaf, table, shardings, is_leaf=_is_param)
        reading.result = f'read the weights in {folder}'
    return params


def check_weights(folder: str | os.PathLike[str], c: transformer.ModelConfig, head: bool = False) -> None:
    """BadInput when the folder's safetensors are not the model's parameters: their names, shapes and dtypes, and files.

    head: a sequence classification may be in the folder instead. Only the files' headers are read.
    """
    _check(folder, (heads if head and has_head(folder) else transformer).param_table(c), c)


def _check(folder, table, c):
    """(the tensors of the folder by name, the names of _tensor_names) when they fit; else BadInput.

    A tied head may be there, or be all that is there of head and embedding; and so may rotary frequencies.
    """
    stored = quantization.attach_scales(folder, tensor_files.list_tensors(folder))
    names = _tensor_names(table, c)
    embedding, head = NAMES['embed'][0], NAMES['lm_head'][0]
    if c.tie_embeddings and head in stored:
        stored = {embedding: stored[head]} | stored
        del stored[head]
    known = {name for layers, _ in names.values() for name in layers}
    missing = sorted(known - stored.keys())
    extra = sorted(name for name in stored.keys() - known if not name.endswith('rotary_emb.inv_freq'))
    if missing or extra:
        raise BadInput(
            'model.path', folder, f'the weights do not fit config.json: missing {missing[:3]}, left over {extra[:3]}'
        )
    for key, param in jax.tree_util.tree_leaves_with_path(table, is_leaf=_is_param):
        path = keystr(key, simple=True, separator='/')
        layers, axes = names[path]
        shape = param.shape[1:] if path.startswith('layers/') else param.shape
        for name in layers:
            tensor_files.check(stored[name], _their_shape(axes, shape))
    return stored, names


def _is_param(node):
    return isinstance(node, transformer.Param)


def has_head(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder's weights are those of a sequence classification."""
    return NAMES['value_head'][0] in tensor_files.list_tensors(folder)


def save(
    folder: str | os.PathLike[str],
    source: str | os.PathLike[str],
    params: Mapping[str, Any],
    c: transformer.ModelConfig,
    dtype: Any,
    **settings: Any,
) -> None:
    """Writes a folder that transformers loads: weights as `dtype`, and the config and tokenizer files of `source`.

    Params with a value_head become a sequence classification with one label. settings replace those of config.json.
    """
    os.makedirs(folder, exist_ok=True)
    copy_files(source, folder)
    names = _tensor_names(_table(params, c), c)
    tensors = {}
    for key, value in jax.tree_util.tree_leaves_with_path(params):
        path = keystr(key, simple=True, separator='/')
        layers, axes = names[path]
        value = np.asarray(value).astype(dtype)
        for name, array in zip(layers, value if path.startswith('layers/') else [value], strict=True):
            tensors[name] = np.ascontiguousarray(_to_theirs(axes, array))
    save_file(tensors, os.path.join(folder, 'model.safetensors'), metadata={'format': 'pt'})
    path = os.path.join(folder, 'config.json')
    with open(path, encoding='utf8') as file:
        config = json.load(file)
    for key in ('torch_dtype', *quantization.KEYS):  # of what was read, and not of what is written
        config.pop(key, None)
    config['dtype'] = str(np.dtype(dtype))
    if 'value_head' in params:
        config |= {
            'architectures': [f'{config["model_type"].capitalize()}ForSequenceClassification'],
            'id2label': {'0': 'score'},
            'label2id': {'score': 0},
        }
    config |= settings
    with open(path, 'w', encoding='utf8') as file:
        json.dump(config, file, indent=2)


def copy_files(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Copies config and tokenizer files, no weights, each whole or not at all; BadInput where one lies elsewhere."""
    folders.check(source)
    os.makedirs(folder, exist_ok=True)
    for name in config_files(source):
        with open(files.inside(source, name), 'rb') as original:
            with files.atomic_write(files.inside(folder, name), 'wb') as copy:
                shutil.copyfileobj(original, copy)


def config_files(folder: str | os.PathLike[str]) -> list[str]:
    """The names of a folder's config and tokenizer files, in order."""
    names = sorted(os.listdir(folder))
    return [name for name in names if folders.FILES.fullmatch(name) and not name.endswith('.index.json')]


def _table(tree, c):
    """The table of parameters like those of the tree: with a scalar head, or those of a language model."""
    return (heads if 'value_head' in tree else transformer).param_table(c)


def _tensor_names(table, c):
    """Our path -> (Hugging Face tensor names, one a layer for stacked parameters; axes as in NAMES)."""
    names = {path: ([name], axes) for path, (name, axes) in NAMES.items() if path in table}
    for key in table['layers']:
        name, axes = LAYER_NAMES[key]
        names[f'layers/{key}'] = [f'model.layers.{i}.{name}' for i in range(c.layers)], axes
    return names


def _their_shape(axes, shape):
    """The stored shape of our parameter of that shape; axes as in NAMES."""
    ours, theirs = axes.split('->')
    sizes = dict(zip(ours, shape, strict=True))
    return tuple(math.prod(sizes[axis] for axis in group) for group in theirs.split(','))


def _to_theirs(axes, array):
    """The array of ours as it is stored; axes as in NAMES."""
    ours, theirs = axes.split('->')
    sizes = dict(zip(ours, array.shape, strict=True))
    array = array.transpose([ours.index(axis) for axis in theirs.replace(',', '')])
    return array.reshape([math.prod(sizes[axis] for axis in group) for group in theirs.split(',')])
