"""Reads and writes Hugging Face folders: safetensors (single or sharded) and tokenizers; families.py reads config.json.

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
from grpo_jax.hosts import buckets, files, hub, json_file
from grpo_jax.models import heads, transformer
from grpo_jax.models.hf import families
from grpo_jax.models.hf import folder as folders
from grpo_jax.models.hf import tensors as tensor_files
from grpo_jax.models.hf.names import NAMES, find_tensors, to_stored
from grpo_jax.text import during

PATTERNS = ('*.json', '*.safetensors', '*.txt', '*.model', '*.jinja')  # files of a model that are fetched
REMEDY = 'take both from one model'


def find(path: str | os.PathLike[str]) -> str:
    """The local folder of a model, after a download where it is needed.

    path: a folder, relative to the working directory or to this package (configs/models/...); the URL of a folder in a
    bucket; or a name on the hub. Raises BadInput where there is none of these.
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
    """Loads the folder's tokenizer. Raises BadInput without a readable one, and for ids outside the model's vocabulary.

    A bare sentencepiece model is refused: without tokenizer_config.json, transformers guesses its prefix wrong.
    """
    if not any(os.path.isfile(os.path.join(folder, name)) for name in ('tokenizer.json', 'tokenizer_config.json')):
        raise BadInput('model.path', folder, 'has neither tokenizer.json nor tokenizer_config.json; add them')
    folders.check(folder)
    folders.check_tokenizer(folder)
    path = os.path.join(folder, 'config.json')
    # without this argument, transformers would read config.json by itself, and obey all of it
    given_config = {'config': families.read_config(folder, path)[1]} if os.path.isfile(path) else {}
    try:
        tokenizer = families.import_transformers().AutoTokenizer.from_pretrained(
            folder, **given_config, trust_remote_code=False, local_files_only=True
        )
        if given_config:
            _drop_added_tokens(tokenizer, given_config['config'].vocab_size)
        # some wrong settings raise here at first; a token that was dropped has the id None
        encoded = {*tokenizer.encode('1'), *tokenizer.all_special_ids} - {None}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises plain Exception for a malformed file, and its panics are none
        raise BadInput(
            'model.path',
            folder,
            f'has no readable tokenizer ({str(error)[:200]}); add tokenizer.json and tokenizer_config.json',
        ) from None
    if given_config:
        _check_vocabulary(tokenizer, encoded, folder, given_config['config'].vocab_size)
    return tokenizer


def _drop_added_tokens(tokenizer, size):
    """Removes a tokenizer's added tokens whose ids are not below `size`, the number of ids in the model's vocabulary.

    A text-only Gemma 3 has such tokens, for images. Removes nothing if one of them is the bos, eos, pad or unk token.
    """
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


def _check_vocabulary(tokenizer, encoded, folder, size):
    """Raises BadInput for a tokenizer with ids outside the model's vocabulary, which has `size` ids, or without tokens.

    encoded: ids that the tokenizer emitted, also special ones that may be missing in its vocabulary.
    """
    if len(tokenizer) > size:
        raise BadInput(
            'model.path', folder, f'its tokenizer has {len(tokenizer)} tokens and the model {size}; {REMEDY}'
        )
    last = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= last < size:
        remedy = f'the last token of its tokenizer is {last}, and the model has {size} tokens; {REMEDY}'
        raise BadInput('model.path', folder, remedy)
    if not all(0 <= token < size for token in encoded):
        raise BadInput(
            'model.path', folder, f'its tokenizer gives token {max(encoded)}, and the model has {size} tokens; {REMEDY}'
        )


def stop_tokens(
    folder: str | os.PathLike[str], tokenizer: Any, vocab_size: int | None = None, turn_end: int | None = None
) -> tuple[int, ...]:
    """Sorted ids that end a completion: those in generation_config.json and config.json, the tokenizer's, and turn_end.

    turn_end: the id with which the chat template ends a turn; None: no such id. Raises BadInput where there is no id,
    and for a number that is no id, or is not below vocab_size.
    """
    ids = {tokenizer.eos_token_id, turn_end} - {None}
    for name in ('generation_config.json', 'config.json'):
        ids.update(eos_tokens(folder, name, vocab_size))
    if not ids:
        raise BadInput('model.path', folder, 'names no end-of-sequence token; set eos_token in tokenizer_config.json')
    return tuple(sorted(ids))


def eos_tokens(folder: str | os.PathLike[str], name: str, vocab_size: int | None = None) -> list[int]:
    """The ids under eos_token_id in the folder's JSON file `name`, if any. Raises BadInput for what is no valid id."""
    listed = folders.read_settings(folder, name).get('eos_token_id')
    listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
    for i in listed:
        if type(i) is not int or i < 0 or (vocab_size is not None and i >= vocab_size):
            most, path = 'the last token' if vocab_size is None else vocab_size - 1, os.path.join(folder, name)
            raise BadInput(f'eos_token_id in {path}', i, f'must be the id of a token, 0 to {most}; {folders.REMEDY}')
    return listed


def load_params(folder: str | os.PathLike[str], c: transformer.ModelConfig, shardings: Any) -> dict[str, Any]:
    """Loads float32 parameters from the folder's safetensors; each is put onto its devices as soon as it is read.

    shardings: for each parameter a sharding or a device; with a value_head, the folder must be a sequence
    classification with one label. A process reads what its own devices hold, tensor_files.BLOCK bytes at a time. Raises
    BadInput as check_weights does.
    """
    table = _table_like(shardings, c)
    stored, places = _match_tensors(folder, table, c)

    def leaf(key, param, sharding):
        place = places[keystr(key, simple=True, separator='/')]
        tensors = [stored[name] for name in place.names]
        array = tensor_files.load_parameter(tensors, place.axes, param.shape, sharding, first=place.rows.start or 0)
        reading.done += 1
        return array

    with during(f'reading the weights in {folder}', len(places)) as reading:
        params = jax.tree_util.tree_map_with_path(
            leaf, table, shardings, is_leaf=lambda node: isinstance(node, transformer.Param)
        )
        reading.result = f'read the weights in {folder}'
    return params


def check_weights(folder: str | os.PathLike[str], c: transformer.ModelConfig, head: bool = False) -> None:
    """Raises BadInput when files, names, shapes or dtypes in the folder's safetensors do not fit the model.

    head: whether the folder may be a sequence classification too. Only the files' headers are read.
    """
    _match_tensors(folder, (heads if head and has_head(folder) else transformer).param_table(c), c)


def _match_tensors(folder, table, c):
    """({name: StoredTensor} of the folder, {path: Stored} of the table). Raises BadInput where they do not fit.

    With a tied head, the folder may have the embedding, the head, or equal ones. Rotary frequencies are ignored.
    """
    stored = tensor_files.attach_scales(folder, tensor_files.list_tensors(folder))
    places = find_tensors(table, c)
    embedding, head = NAMES['embed'][0], NAMES['lm_head'][0]
    if c.tie_embeddings and head in stored:
        stored = {embedding: stored[head]} | stored
        del stored[head]
    expected = {name for place in places.values() for name in place.names}
    missing = sorted(expected - stored.keys())
    extra = sorted(name for name in stored.keys() - expected if not name.endswith('rotary_emb.inv_freq'))
    if missing or extra:
        remedy = f'the weights do not fit config.json: missing {missing[:3]}, left over {extra[:3]}; {REMEDY}'
        raise BadInput('model.path', folder, remedy)
    for place in places.values():
        for name in place.names:
            tensor_files.check(stored[name], place.shape)
    return stored, places


def has_head(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder's weights have the scalar head of a sequence classification."""
    return NAMES['value_head'][0] in tensor_files.list_tensors(folder)


def save(
    folder: str | os.PathLike[str],
    source: str | os.PathLike[str],
    params: Mapping[str, Any],
    c: transformer.ModelConfig,
    dtype: Any,
    **changes: Any,
) -> None:
    """Writes a folder that transformers can load: params in `dtype`, and the config and tokenizer files from `source`.

    params: on the host; with a value_head, they become a sequence classification with one label. changes: values to
    replace in config.json.
    """
    os.makedirs(folder, exist_ok=True)
    copy_files(source, folder)
    places = find_tensors(_table_like(params, c), c)
    tensors = {}
    for key, value in jax.tree_util.tree_leaves_with_path(params):
        path = keystr(key, simple=True, separator='/')
        names, axes, shape, rows = places[path]
        value = np.asarray(value).astype(dtype)
        for name, array in zip(names, value if path.startswith('layers/') else [value], strict=True):
            tensors.setdefault(name, np.empty(shape, dtype))[rows] = to_stored(axes, array)
    save_file(tensors, os.path.join(folder, 'model.safetensors'), metadata={'format': 'pt'})
    path = os.path.join(folder, 'config.json')
    with open(path, encoding='utf8') as file:
        config = json.load(file)
    for key in ('torch_dtype', *tensor_files.KEYS):  # they describe the source's weights
        config.pop(key, None)
    config['dtype'] = str(np.dtype(dtype))
    if 'value_head' in params:
        config |= {
            'architectures': [_classifier_name(config['model_type'])],
            'id2label': {'0': 'score'},
            'label2id': {'score': 0},
        }
    config |= changes
    with open(path, 'w', encoding='utf8') as file:
        json.dump(config, file, indent=2)


def _classifier_name(family):
    """The class in transformers for the family's sequence classification; None where there is none."""
    families.import_transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(family)


def copy_files(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Copies config and tokenizer files, each whole or not at all. Raises BadInput for a link out of the source.

    If the source's weights have a head of their own, the copied config.json says tie_word_embeddings = false.
    """
    folders.check(source)
    os.makedirs(folder, exist_ok=True)
    for name in config_files(source):
        with open(files.path_inside(source, name), 'rb') as original:
            with files.atomic_write(files.path_inside(folder, name), 'wb') as copy:
                shutil.copyfileobj(original, copy)
    config = folders.read_settings(
        source, 'config.json'
    )  # the copy has no weights, from which one could tell that the head is not tied
    if config and config.get('tie_word_embeddings') is not False and families.has_own_head(source):
        json_file.write(os.path.join(folder, 'config.json'), config | {'tie_word_embeddings': False})


def config_files(folder: str | os.PathLike[str]) -> list[str]:
    """The sorted names of a folder's config and tokenizer files."""
    names = sorted(os.listdir(folder))
    return [name for name in names if folders.FILES.fullmatch(name) and not name.endswith('.index.json')]


def _table_like(tree, c):
    """The parameter table for a tree's keys: with a scalar head if it has a value_head, else a language model's."""
    return (heads if 'value_head' in tree else transformer).param_table(c)
