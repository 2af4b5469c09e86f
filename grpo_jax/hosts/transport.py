"""Sends messages and trees of arrays between two groups of processes of one job, by a Link.

Messages go through jax's coordination service. For trees there are two transports with one interface. Files writes
them to a folder that all processes share, for any meshes. Devices calls `jax.device_put` from devices to devices, for
meshes of equal sizes. The receiver waits until the sender has sent; nothing depends on clocks.
"""

from collections.abc import Callable, Iterable
import concurrent.futures
import contextlib
import glob
import itertools
import json
import os
import pickle
import threading
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from grpo_jax.errors import Stopped
from grpo_jax.hosts import files, processes

FOLDER = 'transport'  # of Files, in a workdir
PIECE = 2**20  # bytes of a message under one key of the coordination service, which limits them
THREAD = 'sampler'  # prefix of the name of a Link's thread

# the Link that `current` returns, and a counter for the names of Links, which all processes of a job make in the same
# order; global, since a job has two groups at a time
_current: 'Link | None' = None
_numbers = itertools.count()


class Link:
    """A context in which this process's group exchanges messages and weights with another group of processes.

    Every process of one group sends each message, and every process of the other group reads them all. The end of the
    context sends ('end', error), where error is the Stopped that ended the context, or None; other errors end all
    processes. A group answers a message once all its processes have read it; the answer lets the senders delete it.
    """

    def __init__(self, others: Iterable[int], folder: str | None, each_poll: Callable[[], Any] = lambda: None):
        """others: numbers of the other group's processes; this process is in the group processes.members().

        folder: for weights that cross as Files; None: they cross from Devices to devices. each_poll: called every few
        seconds while this process waits.
        """
        self.is_first, self.others = jax.process_index() == processes.members()[0], sorted(others)
        self.weights = Devices(self) if folder is None else Files(folder, self)
        self._name, self._each_poll = f'grpo_jax/link/{next(_numbers)}', each_poll
        self._sent = self._deleted = self._received = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, THREAD)

    def __enter__(self):
        global _current
        _current = self
        return self

    def __exit__(self, kind, error, trace):
        global _current
        _current = None
        if error is None or isinstance(error, Stopped):
            self.run(self.send, ('end', error))

    def start(self, function: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future:
        """Starts function(*arguments) on the Link's thread; calls run one after another, in the order of starts.

        All processes of a group start the same calls in the same order, whatever their threads do.
        """
        return self._thread.submit(function, *arguments)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls function(*arguments) on the Link's thread (at once, if this is that thread), and returns its result."""
        if threading.current_thread().name.startswith(THREAD):
            return function(*arguments)
        return self.start(function, *arguments).result()

    def send(self, value: Any = None) -> None:
        """Sends a value that can be pickled to every process of the other group."""
        content, key = pickle.dumps(value), self._key(jax.process_index(), self._sent)
        pieces = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
        for number, piece in enumerate(pieces):
            processes.post(f'{key}/{number}', piece)
        processes.post(f'{key}/pieces', str(len(pieces)).encode())
        self._sent += 1

    def receive(self) -> list[Any]:
        """Waits for the next message of each process of the other group, and returns them by process number.

        Then deletes the messages that this process has sent so far. Raises OtherFailed when a process has failed.
        """
        values, where = [], 'the meeting of learner and sampler'
        for process in self.others:
            key = self._key(process, self._received)
            count = int(processes.wait_for(f'{key}/pieces', where, each_poll=self._each_poll))
            values.append(pickle.loads(b''.join(processes.wait_for(f'{key}/{n}', where) for n in range(count))))
        self._received += 1
        for number in range(self._deleted, self._sent):
            processes.delete(self._key(jax.process_index(), number))
        self._deleted = self._sent
        return values

    def _key(self, process, number):
        return f'{self._name}/{process}/{number}'


class Files:
    """Sends and receives trees of arrays as files in a folder that all processes share; between any meshes."""

    def __init__(self, folder: str, link: Link):
        """folder: for these files alone. link: carries the messages that a tree has been written, and read."""
        self._folder, self._link = folder, link
        self._numbers = itertools.count()  # of the trees: both groups count them
        self._remove()  # left by a run that was killed

    def send(self, tree: Any, target: Any) -> None:
        """Sends a tree; returns when the other group has it. Each process writes the parts that its devices own.

        target: abstract arrays with the receiver's shardings, which only Devices needs.
        """
        parts = {}
        for leaf, array in enumerate(jax.tree.leaves(tree)):
            for shard in array.addressable_shards:
                if not shard.replica_id:
                    place = processes.as_place(shard.index, array.shape)
                    parts[json.dumps([leaf, place])] = np.asarray(shard.data).reshape(-1).view(np.uint8)
        with files.writing(self._folder):
            os.makedirs(self._folder, exist_ok=True)
        with files.atomic_write(self._path(next(self._numbers), jax.process_index()), 'wb') as file:
            np.savez(file, allow_pickle=False, **parts)
        self._link.send()
        self._link.receive()
        self._remove()

    def receive(self, target: Any, source: Mesh) -> Any:
        """Waits for the next tree, and returns it as jax Arrays with the shapes, dtypes and shardings of `target`.

        target: abstract arrays. source: the sender's mesh, which only Devices needs. Each process reads the parts that
        its devices hold.
        """
        self._link.receive()
        number = next(self._numbers)
        leaves, structure = jax.tree.flatten(target)
        parts: list[list[Any]] = [[] for _ in leaves]  # (Place, the file, the name in it) of each leaf
        with contextlib.ExitStack() as stack:
            for process in self._link.others:
                file = stack.enter_context(np.load(self._path(number, process)))
                for name in file.files:
                    leaf, place = json.loads(name)
                    parts[leaf].append((place, file, name))
            arrays = [_assemble(*leaf) for leaf in zip(leaves, parts, strict=True)]
        self._link.send()
        return jax.tree.unflatten(structure, arrays)

    def _path(self, number, process):
        return os.path.join(self._folder, f'{number}.{process}.npz')

    def _remove(self):
        """Removes the files that this process has written."""
        for path in glob.glob(f'{glob.escape(self._folder)}/*.{jax.process_index()}.npz*'):
            os.remove(path)


def _assemble(target, parts):
    """The jax Array with the shape, dtype and sharding of the abstract array `target`, assembled from parts in files.

    parts: (Place, npz file, name in it) of each part, however the sender cut the array. A process reads the parts that
    overlap with those of its own devices.
    """
    own = {}
    for place in processes.local_parts(target.sharding, target.shape):
        own[place] = whole = np.empty([end - start for start, end in place], target.dtype)
        for other, file, name in parts:
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(place, other, strict=True)]
            if all(start < end for start, end in common):
                part = file[name].view(target.dtype).reshape([end - start for start, end in other])
                whole[_slices(common, place)] = part[_slices(common, other)]
    return processes.put_parts(own, target.sharding, target.shape)


def _slices(place, outer):
    """The slices that select the Place `place` in an array that holds the Place `outer` of the whole array."""
    return tuple(slice(start - first, end - first) for (start, end), (first, _) in zip(place, outer, strict=True))


class Devices:
    """Sends and receives trees of arrays from devices to devices, between meshes of equal sizes."""

    def __init__(self, link: Link):
        self._link = link

    def send(self, tree: Any, target: Any) -> None:
        """Sends a tree as Files.send does; the sender's devices first cut the arrays as `target` is cut."""

        def cut(array, like):
            return jax.device_put(array, NamedSharding(array.sharding.mesh, _cutting_spec(like.sharding)))

        cut_tree = jax.tree.map(cut, tree, target)
        jax.block_until_ready(cut_tree)  # else the receiver's time limit runs while they are computed
        jax.device_put(cut_tree, jax.tree.map(lambda x: x.sharding, target))
        self._link.receive()  # until the receiver has read them, their memory must not be used again

    def receive(self, target: Any, source: Mesh) -> Any:
        """Waits for the next tree, and returns it as Files.receive does."""

        def stand_in(like):
            sharding = NamedSharding(source, _cutting_spec(like.sharding))
            return jax.make_array_from_single_device_arrays(like.shape, sharding, [], dtype=like.dtype)

        sent = jax.tree.map(stand_in, target)
        arrays = jax.block_until_ready(jax.device_put(sent, jax.tree.map(lambda x: x.sharding, target)))
        self._link.send()
        return arrays


def _cutting_spec(sharding):
    """A NamedSharding's PartitionSpec with None for mesh axes of size 1, which may be larger on another mesh."""
    return PartitionSpec(*(axis if axis and sharding.mesh.shape[axis] > 1 else None for axis in sharding.spec))


def current() -> Link | None:
    """The Link of this process; None outside of its context."""
    return _current
