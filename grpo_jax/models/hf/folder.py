"""Checks the files in a model's folder, which others have made, before a library reads them."""

import glob
import os
import re
from typing import Any

from grpo_jax.errors import NO_VALUE, BadInput
from grpo_jax.hosts import files, json_file

FILES = re.compile(
    r'(config|generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|merges|'
    r'chat_template).*\.(json|txt|jinja|model)'
)
TEMPLATES = 'additional_chat_templates'  # a subfolder with chat templates
INDEX = 'model.safetensors.index.json'
LARGEST = 2**27  # bytes of a file that holds no weights: four times the largest published tokenizer
PICKLED = ('.bin', '.pt', '.pth', '.ckpt', '.pkl', '.h5', '.msgpack')  # weights that are never read
REMEDY = 'take it again from the published model'


def check(folder: str | os.PathLike[str]) -> None:
    """Raises BadInput for a model's folder that cannot be read, or that has a link out of it or an unfit file.

    Unfit is a file of a model that is no plain file or, weights aside, has more than LARGEST bytes. Subfolders are
    skipped, except TEMPLATES.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise BadInput('model.path', os.fspath(folder), f'{error.strerror}; give a folder that you may read') from None
    names += [os.path.join(TEMPLATES, name) for name in glob.glob('*', root_dir=os.path.join(folder, TEMPLATES))]
    for name in names:
        if name != TEMPLATES and os.path.isdir(os.path.join(folder, name)):
            continue
        path = files.path_inside(folder, name)
        is_text = FILES.fullmatch(name) or name == INDEX or name.endswith('.jinja')
        if (is_text or name.endswith('.safetensors')) and not os.path.isfile(path):
            raise BadInput('model.path', path, f'is no plain file; {REMEDY}')
        if is_text and os.path.getsize(path) > LARGEST:
            raise BadInput(
                path, NO_VALUE, f'has {os.path.getsize(path)} bytes, and at most {LARGEST} are read; {REMEDY}'
            )


def read_settings(folder: str | os.PathLike[str], name: str, remedy: str = REMEDY) -> dict[str, Any]:
    """The object in the folder's JSON file `name`; {} without that file. Raises BadInput where it holds no object."""
    path = os.path.join(folder, name)
    return json_file.read_object(files.path_inside(folder, name), remedy) if os.path.lexists(path) else {}


def check_tokenizer(folder: str | os.PathLike[str]) -> None:
    """Raises BadInput for settings of the tokenizer that transformers must not read.

    Refused is a fast_tokenizer_files that is not a list of file names within the folder, and a setting whose name has
    control characters, since transformers would print it.
    """
    config = read_settings(folder, 'tokenizer_config.json')
    versions = config.get('fast_tokenizer_files') or []
    if not isinstance(versions, list) or not all(isinstance(name, str) for name in versions):
        remedy = f'must be a list of names of files; {REMEDY}'
        raise BadInput(f'fast_tokenizer_files in {os.path.join(folder, "tokenizer_config.json")}', versions, remedy)
    for name in versions:
        files.path_inside(folder, name)
    settings = [config, read_settings(folder, 'special_tokens_map.json')]
    if 'added_tokens_decoder' not in config:  # transformers then takes the added tokens from tokenizer.json
        settings.append({'added_tokens': read_settings(folder, 'tokenizer.json').get('added_tokens')})
    for key in (key for value in settings for key in _nested_keys(value)):
        if not key.isprintable():
            raise BadInput(f'a setting of the tokenizer in {folder}', key, f'no setting has this name; {REMEDY}')


def _nested_keys(value):
    """Yields the keys of all objects that a JSON value contains, but not the value's own keys."""
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(child, dict):
            yield from child
        yield from _nested_keys(child)


def pickled_weights(folder: str | os.PathLike[str]) -> list[str]:
    """Names of weight files that would have to be unpickled, which runs code in them; we do not read them."""
    return sorted(name for name in os.listdir(folder) if name.endswith(PICKLED))
