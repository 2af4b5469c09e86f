"""Keeps a run that saves often from growing.

tensorstore 0.1.86 never frees the texts of a JSON that it has answered. At each save and restore Orbax asks how many
bytes were moved, for a line of its log (40 KiB), and for each array anew what the folder's spec is in full (20 KiB for
80 arrays). Here the first is answered with 0, the second once a kind. And each save begins threads, whose memory glibc
takes from 8 arenas a core, each with gaps of its own; two arenas take as long.
"""

import contextlib
import copy
import ctypes
import functools
import importlib
import importlib.metadata
import json
import os
import re
import types
from typing import Any

import tensorstore

M_ARENA_MAX, ARENAS = -8, 2  # of malloc.h
ORBAX = (0, 12, 5)  # the first version whose files these replacements leave whole


class _KvStoreSpec(dict):
    """A KvStore.Spec as a dict, which tensorstore takes as well; it asks once for all that differ by paths alone."""

    def to_json(self) -> Any:
        """The spec in full."""
        paths: dict[str, str] = {}

        def stand_in(path):
            name = f'/{len(paths)}{"/" * path.endswith("/")}'
            paths[name] = path
            return name

        in_full = _resolved(json.dumps(_with_paths(self, stand_in)))
        return _with_paths(in_full, lambda name: paths.get(name, name))


def _with_paths(spec, replace):
    """A copy of the spec with other absolute paths."""
    return {
        name: replace(value)
        if name == 'path' and value.startswith('/')
        else _with_paths(value, replace)
        if isinstance(value, dict)
        else copy.deepcopy(value)
        for name, value in spec.items()
    }


@functools.lru_cache(maxsize=64)  # kinds of specs, which are a few
def _resolved(text):
    return tensorstore.KvStore.Spec(json.loads(text)).to_json()


def _orbax_version():
    return tuple(map(int, re.findall(r'\d+', importlib.metadata.version('orbax-checkpoint'))[:3]))


def apply() -> None:
    """From now on Orbax asks less and threads share arenas; nothing changes where Orbax or libc are of another kind."""
    if 'arena_max' not in os.environ.get('GLIBC_TUNABLES', '') and 'MALLOC_ARENA_MAX' not in os.environ:
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)
    if _orbax_version() < ORBAX:
        return
    try:
        orbax: Any = importlib.import_module('orbax.checkpoint._src.serialization.tensorstore_utils')
    except ImportError:
        return
    orbax.get_tensorstore_raw_bytes = lambda *_, **__: 0
    store = types.SimpleNamespace(Spec=_KvStoreSpec, open=tensorstore.KvStore.open)
    orbax.ts = types.SimpleNamespace(**vars(tensorstore) | {'KvStore': store})
