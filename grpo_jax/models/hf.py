"""Hugging Face folders in and out: config.json, safetensors (single or sharded), tokenizer files.

Every field of ModelConfig is read from config.json through transformers, whose defaults are the
family's own. A folder name that is not on disk is taken for a hub name.
"""

import json
import os
import re
import shutil

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
import transformers

from grpo_jax import ROOT
from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.models import heads, transformer

FAMILIES = ('llama', 'qwen2', 'qwen3')
ROPE_TYPES = ('default', 'linear', 'llama3', 'yarn')
FILES = re.compile(
    r'(config|generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|merges|'
    r'chat_template).*\.(json|txt|jinja|model)'
)
LAYER_NAMES = {
    'attn_norm': 'input_layernorm.weight',
    'mlp_norm': 'post_attention_layernorm.weight',
    'wq': 'self_attn.q_proj.weight',
    'bq': 'self_attn.q_proj.bias',
    'q_norm': 'self_attn.q_norm.weight',
    'wk': 'self_attn.k_proj.weight',
    'bk': 'self_attn.k_proj.bias',
    'k_norm': 'self_attn.k_norm.weight',
    'wv': 'self_attn.v_proj.weight',
    'bv': 'self_attn.v_proj.bias',
    'wo': 'self_attn.o_proj.weight',
    'bo': 'self_attn.o_proj.bias',
    'w_gate': 'mlp.gate_proj.weight',
    'b_gate': 'mlp.gate_proj.bias',
    'w_up': 'mlp.up_proj.weight',
    'b_up': 'mlp.up_proj.bias',
    'w_down': 'mlp.down_proj.weight',
    'b_down': 'mlp.down_proj.bias',
}
NAMES = {
    'embed': 'model.embed_tokens.weight',
    'final_norm': 'model.norm.weight',
    'lm_head': 'lm_head.weight',
    'value_head': 'score.weight',
}


def find(path):
    """The local folder of a model: a path from here, one from the repository's root, or a hub snapshot."""
    for folder in (path, os.path.join(ROOT, path)):
        if path and os.path.isdir(folder):
            return folder
    if not re.fullmatch(r'[\w.-]+/[\w.-]+', path):
        raise BadInput(
            'model.path', path, 'no such folder; give a Hugging Face folder, or a hub name like Qwen/Qwen3-0.6B'
        )
    import huggingface_hub  # only for hub names

    try:
        wanted = ['*.json', '*.safetensors', '*.txt', '*.model', '*.jinja']
        return huggingface_hub.snapshot_download(path, allow_patterns=wanted)
    except Exception as error:  # the hub's client raises a different type for each way of failing
        raise BadInput(
            'model.path',
            path,
            f'no such folder, and the hub gave {type(error).__name__}; download it and give the folder',
        ) from None


def load_config(folder):
    """ModelConfig of a folder's config.json; BadInput for what the decoder cannot compute."""
    path = os.path.join(folder, 'config.json')
    if not os.path.isfile(path):
        raise BadInput('model.path', folder, 'has no config.json; give the folder that holds it beside the weights')
    try:
        with open(path, encoding='utf8') as file:
            family = json.load(file).get('model_type')
        hf = transformers.AutoConfig.from_pretrained(folder) if family in FAMILIES else None
    except Exception as error:  # transformers raises a different type for each way of being wrong
        raise BadInput(path, 'unreadable', f'{error}; take it again from the published model') from None
    if hf is None:
        raise BadInput(f'model_type in {path}', family, f'not supported; one of {", ".join(FAMILIES)} is')
    if hf.hidden_act != 'silu':
        raise BadInput(f'hidden_act in {path}', hf.hidden_act, 'only silu is supported')
    if family != 'llama' and hf.use_sliding_window:
        raise BadInput(f'use_sliding_window in {path}', True, 'sliding windows are not supported; set it to false')
    rope = dict(hf.rope_parameters)
    kind = rope.get('rope_type', 'default')
    if kind not in ROPE_TYPES:
        raise BadInput(f'rope_type in {path}', kind, f'not supported; one of {", ".join(ROPE_TYPES)} is')
    theta = rope.pop('rope_theta')
    if kind == 'yarn':
        rope['original_max_position_embeddings'] = (
            rope.get('original_max_position_embeddings') or hf.max_position_embeddings
        )
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise BadInput(
            f'num_key_value_heads in {path}',
            hf.num_key_value_heads,
            f'must divide num_attention_heads = {hf.num_attention_heads}',
        )
    biased = family == 'qwen2' or hf.attention_bias
    return transformer.ModelConfig(
        vocab_size=hf.vocab_size,
        width=hf.hidden_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, 'head_dim', None) or hf.hidden_size // hf.num_attention_heads,
        mlp=hf.intermediate_size,
        norm_eps=hf.rms_norm_eps,
        rope_theta=float(theta),
        rope_scaling=() if kind == 'default' else tuple(sorted(rope.items())),
        qk_norm=family == 'qwen3',
        qkv_bias=biased,
        out_bias=family != 'qwen2' and hf.attention_bias,
        mlp_bias=family == 'llama' and hf.mlp_bias,
        tie_embeddings=hf.tie_word_embeddings,
    )


def context_length(folder):
    """Positions that the model was made for (max_position_embeddings)."""
    return transformers.AutoConfig.from_pretrained(folder).max_position_embeddings


def load_tokenizer(folder):
    """The folder's tokenizer; BadInput when there is none.

    A bare sentencepiece model is refused: without tokenizer_config.json, transformers guesses its prefix wrong.
    """
    if not any(os.path.isfile(os.path.join(folder, name)) for name in ('tokenizer.json', 'tokenizer_config.json')):
        raise BadInput('model.path', folder, 'has neither tokenizer.json nor tokenizer_config.json; add them')
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # tokenizers raises plain Exception for a malformed file
        raise BadInput(
            'model.path',
            folder,
            f'has no readable tokenizer ({str(error).splitlines()[0]}); add tokenizer.json and tokenizer_config.json',
        ) from None


def stop_tokens(folder, tokenizer):
    """Sorted ids that end a completion: eos of generation_config.json, and of the tokenizer."""
    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = os.path.join(folder, 'generation_config.json')
    if os.path.isfile(path):
        with open(path, encoding='utf8') as file:
            listed = json.load(file).get('eos_token_id')
        ids |= set(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if not ids:
        raise BadInput('model.path', folder, 'names no end-of-sequence token; set eos_token in tokenizer_config.json')
    return tuple(sorted(ids))


def load_params(folder, c, shardings):
    """Float32 parameters of the folder's safetensors, each leaf placed by its sharding (or device) as it is read.

    A process keeps what its own devices hold, and of the rest no more than a tensor at a time.

    With a value_head among the shardings, those of a sequence classification with one label. BadInput when a tensor
    is missing, left over, or of the wrong shape.
    """
    files = _tensor_files(folder)
    table = _table(shardings, c)
    known = {name for names in _tensor_names(table, c).values() for name in names}
    missing = sorted(known - files.keys())
    extra = sorted(
        n
        for n in files.keys() - known
        if not n.endswith('rotary_emb.inv_freq') and not (c.tie_embeddings and n == NAMES['lm_head'])
    )
    if missing or extra:
        raise BadInput(
            'model.path', folder, f'the weights do not fit config.json: missing {missing[:3]}, left over {extra[:3]}'
        )
    names = _tensor_names(table, c)

    def leaf(key, param, sharding):
        path = '/'.join(k.key for k in key)
        layered = path.startswith('layers/')
        shape = param.shape[1:] if layered else param.shape
        held = processes.local_slices(sharding, param.shape)
        of_layer = held[1:] if layered else held
        arrays = [
            _to_ours(path, _read(files[name], name), shape, name)[of_layer]
            for name in (names[path][held[0]] if layered else names[path])
        ]
        return processes.put_local(np.stack(arrays) if layered else arrays[0], held, sharding, param.shape)

    return jax.tree_util.tree_map_with_path(
        leaf, table, shardings, is_leaf=lambda node: isinstance(node, transformer.Param)
    )


def has_head(folder):
    """Whether the folder's weights are those of a sequence classification."""
    return NAMES['value_head'] in _tensor_files(folder)


def save(folder, source, params, c, dtype, **settings):
    """Writes a folder that transformers loads: weights as `dtype`, and the config and tokenizer files of `source`.

    Params with a value_head become a sequence classification with one label. settings replace those of config.json.
    """
    os.makedirs(folder, exist_ok=True)
    copy_files(source, folder)
    table = _table(params, c)
    names = _tensor_names(table, c)
    tensors = {}

    def leaf(path, _, value):
        value = np.asarray(value).astype(dtype)
        layers = value if path.startswith('layers/') else [value]
        for name, array in zip(names[path], layers, strict=True):
            tensors[name] = np.ascontiguousarray(_to_theirs(path, array))

    jax.tree_util.tree_map_with_path(
        lambda path, param, value: leaf('/'.join(k.key for k in path), param, value),
        table,
        params,
        is_leaf=lambda node: isinstance(node, transformer.Param),
    )
    save_file(tensors, os.path.join(folder, 'model.safetensors'), metadata={'format': 'pt'})
    path = os.path.join(folder, 'config.json')
    with open(path, encoding='utf8') as file:
        config = json.load(file)
    config.pop('torch_dtype', None)
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


def copy_files(source, folder):
    """Copies config and tokenizer files, no weights."""
    os.makedirs(folder, exist_ok=True)
    for name in sorted(os.listdir(source)):
        if FILES.fullmatch(name) and not name.endswith('.index.json'):
            shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))


def _table(tree, c):
    """The table of parameters like those of the tree: with a scalar head, or those of a language model."""
    return (heads if 'value_head' in tree else transformer).param_table(c)


def _tensor_names(table, c):
    """Our path -> Hugging Face tensor names, one a layer for stacked parameters."""
    names = {path: [name] for path, name in NAMES.items() if path in table}
    for key in table['layers']:
        names[f'layers/{key}'] = [f'model.layers.{i}.{LAYER_NAMES[key]}' for i in range(c.layers)]
    return names


def _tensor_files(folder):
    """Tensor name -> safetensors file."""
    index = os.path.join(folder, 'model.safetensors.index.json')
    if os.path.isfile(index):
        with open(index, encoding='utf8') as file:
            return {name: os.path.join(folder, shard) for name, shard in json.load(file)['weight_map'].items()}
    single = os.path.join(folder, 'model.safetensors')
    if not os.path.isfile(single):
        raise BadInput('model.path', folder, 'has no model.safetensors; add the weights or set model.random_init=True')
    with _open(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


def _open(path):
    """A safetensors file; BadInput when it is absent, cut short or something else."""
    try:
        return safe_open(path, 'np')
    except (SafetensorError, OSError) as error:
        raise BadInput('model.path', path, f'not a safetensors file ({error}); fetch it again') from None


def _read(path, name):
    """A tensor as float32; through ml_dtypes, since numpy alone has no bfloat16."""
    with _open(path) as tensors:
        return np.asarray(tensors.get_tensor(name)).astype(np.float32)


def _to_ours(path, array, shape, name):
    """Hugging Face stores linear weights [out, in]; ours are [in, out] with heads split."""
    ours = array if array.ndim < 2 or path == 'embed' else array.T
    # the way back tells a transposed weight, which has as many numbers
    if ours.size != np.prod(shape) or _to_theirs(path, ours.reshape(shape)).shape != array.shape:
        raise BadInput(name, array.shape, f'does not fit the shape {shape} that config.json gives')
    return ours.reshape(shape)


def _to_theirs(path, array):
    """The inverse of _to_ours for one layer."""
    key = path.rpartition('/')[2]
    if path == 'embed' or key.endswith('norm'):
        return array
    if path == 'value_head':
        return array[None]
    if key.startswith('b'):
        return array.reshape(-1)
    inputs = array.shape[0] * array.shape[1] if key == 'wo' else array.shape[0]
    return array.reshape(inputs, -1).T
