"""Hugging Face folders in and out: safetensors (single or sharded), tokenizer files; families.py reads config.json.

A path that is no folder is taken for a hub name.
"""

from collections.abc import Mapping
import json
import os
import re
import shutil
from typing import Any

import jax
from jax.tree_util import keystr
import numpy as np
from safetensors.numpy import save_file
import tokenizers

from grpo_jax import PACKAGE
from grpo_jax.errors import BadInput
from grpo_jax.hosts import buckets, files, hub
from grpo_jax.models import heads, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.hf import folder as folders
from grpo_jax.models.hf import tensors as tensor_files
from grpo_jax.models.hf.names import NAMES, find_tensors, to_theirs
from grpo_jax.text import during

PATTERNS = ('*.json', '*.safetensors', '*.txt', '*.model', '*.jinja')  # files of a model that are fetched


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
    known = {'config': families.read_config(folder, path)[1]} if os.path.isfile(path) else {}
    try:
        tokenizer = families.import_transformers().AutoTokenizer.from_pretrained(
            folder, **known, trust_remote_code=False, local_files_only=True
        )
        if known:
            _drop_added(tokenizer, known['config'].vocab_size)
        # what is wrong with some settings comes out here; a token that was dropped has no id
        given = {*tokenizer.encode('1'), *tokenizer.all_special_ids} - {None}
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


def _drop_added(tokenizer, size):
    """Takes added tokens out of a tokenizer that its model does not have: those of images, in Gemma 3 of text alone."""
    unknown = {str(token) for i, token in tokenizer.added_tokens_decoder.items() if i >= size}
    needed = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    if not unknown or unknown & needed:
        return
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content['added_tokens'] = [token for token in content['added_tokens'] if token['id'] < size]
    vocabulary = content['model']['vocab']
    if isinstance(vocabulary, dict):
        content['model']['vocab'] = {piece: i for piece, i in vocabulary.items() if i < size or piece not in unknown}
    tokenizer._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))


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
        place = names[keystr(key, simple=True, separator='/')]
        tensors = [stored[name] for name in place.names]
        array = tensor_files.load_parameter(tensors, place.axes, param.shape, sharding, first=place.rows.start or 0)
        reading.done += 1
        return array

    with during(f'reading the weights in {folder}', len(names)) as reading:
        params = jax.tree_util.tree_map_with_path(
            leaf, table, shardings, is_leaf=lambda node: isinstance(node, transformer.Param)
        )
        reading.result = f'read the weights in {folder}'
    return params


def check_weights(folder: str | os.PathLike[str], c: transformer.ModelConfig, head: bool = False) -> None:
    """BadInput when the folder's safetensors are not the model's parameters: their names, shapes and dtypes, and files.

    head: a sequence classification may be in the folder instead. Only the files' headers are read.
    """
    _check(folder, (heads if head and has_head(folder) else transformer).param_table(c), c)


def _check(folder, table, c):
    """(the tensors of the folder by name, find_tensors) when they fit; else BadInput.

    A tied head may be there, or be all that is there of head and embedding; and so may rotary frequencies.
    """
    stored = tensor_files.attach_scales(folder, tensor_files.list_tensors(folder))
    names = find_tensors(table, c)
    embedding, head = NAMES['embed'][0], NAMES['lm_head'][0]
    if c.tie_embeddings and head in stored:
        stored = {embedding: stored[head]} | stored
        del stored[head]
    known = {name for place in names.values() for name in place.names}
    missing = sorted(known - stored.keys())
    extra = sorted(name for name in stored.keys() - known if not name.endswith('rotary_emb.inv_freq'))
    if missing or extra:
        raise BadInput(
            'model.path', folder, f'the weights do not fit config.json: missing {missing[:3]}, left over {extra[:3]}'
        )
    for place in names.values():
        for name in place.names:
            tensor_files.check(stored[name], place.shape)
    return stored, names


def has_head(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder's weights are those of a sequence classification."""
    return NAMES['value_head'][0] in tensor_files.list_tensors(folder)


def save(
    folder: str | os.PathLike[str],
    source: str | os.PathLike[str],
    params: Mapping[str, Any],
    c: transformer.ModelConfig,
    dtype: Any,
    **changes: Any,
) -> None:
    """Writes a folder that transformers loads: weights as `dtype`, and the config and tokenizer files of `source`.

    Params with a value_head become a sequence classification with one label. changes replace values of config.json.
    """
    os.makedirs(folder, exist_ok=True)
    copy_files(source, folder)
    names = find_tensors(_table(params, c), c)
    tensors = {}
    for key, value in jax.tree_util.tree_leaves_with_path(params):
        path = keystr(key, simple=True, separator='/')
        layers, axes, shape, rows = names[path]
        value = np.asarray(value).astype(dtype)
        for name, array in zip(layers, value if path.startswith('layers/') else [value], strict=True):
            tensors.setdefault(name, np.empty(shape, dtype))[rows] = to_theirs(axes, array)
    save_file(tensors, os.path.join(folder, 'model.safetensors'), metadata={'format': 'pt'})
    path = os.path.join(folder, 'config.json')
    with open(path, encoding='utf8') as file:
        config = json.load(file)
    for key in ('torch_dtype', *tensor_files.KEYS):  # of what was read, and not of what is written
        config.pop(key, None)
    config['dtype'] = str(np.dtype(dtype))
    if 'value_head' in params:
        config |= {
            'architectures': [_classifier(config['model_type'])],
            'id2label': {'0': 'score'},
            'label2id': {'score': 0},
        }
    config |= changes
    with open(path, 'w', encoding='utf8') as file:
        json.dump(config, file, indent=2)


def _classifier(family):
    """The name of the family's sequence classification in transformers; None where it has none."""
    families.import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(family)


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
