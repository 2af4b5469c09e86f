"""What Orbax asks of tensorstore too often: tensorstore 0.1.86 never frees the texts of a JSON that it has answered.

At each save and restore Orbax asks how many bytes were moved, for a line of its log (40 KiB), and for each array anew
what the folder's spec is in full (20 KiB for 80 arrays). Here the first is answered with 0, the second once a folder.
"""

import copy
import functools
import importlib
import json
import types
from typing import Any

import tensorstore


class _KvStoreSpec(dict):
    """A KvStore.Spec as a dict, which tensorstore takes as well; its JSON is kept."""

    def to_json(self) -> Any:
        """The spec in full."""
        return copy.deepcopy(_resolved(json.dumps(self)))


@functools.lru_cache(maxsize=8)  # a few folders are in use at a time
def _resolved(text):
    return tensorstore.KvStore.Spec(json.loads(text)).to_json()


def apply() -> None:
    """From now on Orbax asks less; where an Orbax is arranged otherwise, nothing changes."""
    try:
        orbax: Any = importlib.import_module('orbax.checkpoint._src.serialization.tensorstore_utils')
    except ImportError:
        return
    orbax.get_tensorstore_raw_bytes = lambda *_, **__: 0
    store = types.SimpleNamespace(Spec=_KvStoreSpec, open=tensorstore.KvStore.open)
    orbax.ts = types.SimpleNamespace(**vars(tensorstore) | {'KvStore': store})
