"""Two sides of a run on devices of their own: the learner on one mesh, the sampler on another.

The policy's weights cross in the form in which the sampler reads them, and rollouts cross as host arrays. No clock
decides when weights cross: the schedule of the steps does, and the side that is early waits.
"""

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import os
import threading
import time
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from grpo_jax.errors import BadInput
from grpo_jax.hosts import processes
from grpo_jax.sharding import batches
from grpo_jax.sharding import mesh as meshes

ADDRESS = processes.TRANSFERS[0].upper()  # variable with the place where a CPU takes arrays of other processes


class Sides:
    """The learner's mesh and the sampler's, which share no device.

    Programs of the sampler's mesh are dispatched by one thread at a time, since programs that communicate between
    devices must run in one order on all devices.
    """

    def __init__(self, learner: Mesh, sampler: Mesh):
        self.learner, self.sampler = learner, sampler
        # whether the sampler's devices belong to other processes, which serve this one
        self.remote = not meshes.is_here(sampler)
        self._lasting: Any = None  # what move_once has moved
        self.crossed = False  # whether the frozen weights have gone to a remote side
        # starts a function on the sampler's thread, which begins with the first call; a RemoteEngine sets Link.start
        self.submit: Callable[..., Any] = concurrent.futures.ThreadPoolExecutor(1, 'sampler').submit
        self._sampling, self._counting = threading.Lock(), threading.Lock()
        self._busy, self._began, self._read = 0.0, 0.0, time.monotonic()  # began: 0 while nothing is sampled

    def move(self, tree: Any, target: Any) -> Any:
        """Copies arrays of the learner's side to the sampler's devices; returns the copies at once, not yet computed.

        target: a tree of abstract arrays with the copies' shardings. An update may take the memory of the originals
        once this call has returned. Where the sampler's side is remote, the tree is returned as it is.
        """
        return tree if self.remote else jax.device_put(tree, jax.tree.map(lambda x: x.sharding, target))

    def move_once(self, tree: Any, target: Any) -> Any:
        """As move, for weights that no step changes: later calls return what the first one has moved."""
        if self._lasting is None:
            self._lasting = self.move(tree, target)
        return self._lasting

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """A context in which this thread alone dispatches programs of the sampler's mesh."""
        with self._sampling:
            self._began = time.monotonic()
            try:
                yield
            finally:
                with self._counting:
                    self._busy, self._began = self._busy + time.monotonic() - self._began, 0.0

    def read_clock(self) -> tuple[float, float]:
        """(seconds since the last call, seconds since then in which a thread was in the context `sampling`)."""
        with self._counting:
            now = time.monotonic()
            busy = self._busy + (now - self._began if self._began else 0.0)
            passed, self._read, self._busy = now - self._read, now, 0.0
            self._began = now if self._began else 0.0
        return passed, busy

    def start(self, function: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future:
        """Starts function(*arguments) on the sampler's thread; calls run one after another, in the order of starts.

        The Future's result() returns the function's result, or raises its error. An update takes the TrainState's
        memory, so the function may read only copies from it: weights that Engine.send has sent, and host arrays.
        """

        def run():
            # else small arrays, like keys, would be made on the learner's first device, behind what it has to do
            with jax.default_device(self._idle_device):
                return function(*arguments)

        return self.submit(run)

    @property
    def _idle_device(self):
        """A device that is not busy with the learner's programs; None where there is none."""
        with contextlib.suppress(RuntimeError):  # this process has no CPU
            return jax.local_devices(backend='cpu')[-1] if self.remote else self.sampler.devices.flat[0]
        return None


def make_sides(section: Any, learner: Mesh, devices: Sequence[Any]) -> Sides | None:
    """The Sides that config.mesh names; None where mesh.sampler is 0. The sampler has the last of the devices.

    learner: the mesh of the other axes, over the first devices. Raises BadInput where mesh.sampler cannot work, or
    mesh.transport where the devices belong to several processes.
    """
    count = section.get('sampler', 0)
    if not count:
        return None
    if learner.size + count > len(devices):
        remedy = f'makes {learner.size + count} devices with the {learner.size} of the other axes, and only '
        remedy += f'{len(devices)} are here; lower mesh.sampler or another axis'
        raise BadInput('mesh.sampler', count, remedy)
    owners, own = split_processes(devices, count)
    if len(owners | own) > 1:
        if owners & own:
            whole = sum(device.process_index in own for device in devices)
            fits = whole if whole < len(devices) else sum(device.process_index in own - owners for device in devices)
            raise BadInput('mesh.sampler', count, f'is not all devices of the last processes; choose {fits}')
        if section.get('transport') == 'devices':
            check_devices(learner, devices[-count:], len(owners), len(own))
    return Sides(learner, make_sampler_mesh(learner, devices[-count:]))


def split_processes(devices: Sequence[Any], count: int) -> tuple[set[int], set[int]]:
    """(the learner's process numbers, the sampler's), where the sampler has the last `count` of the devices."""
    owners, own = ({device.process_index for device in some} for some in (devices[:-count], devices[-count:]))
    return owners, own


def check_devices(learner: Mesh, devices: Sequence[Any], owners: int, own: int) -> None:
    """Raises BadInput where weights cannot cross from devices to devices: mesh.transport='devices'.

    devices: the sampler's. owners, own: how many processes the learner has, and the sampler.
    """
    hindered = {
        f'the learner has {learner.size} devices and the sampler {len(devices)}': learner.size != len(devices),
        f'the sampler has {own} processes and the learner {owners}': own > owners,
        f'CPUs need {ADDRESS}': devices[0].platform == 'cpu' and not os.environ.get(ADDRESS),
    }
    for reason, hinders in hindered.items():
        if hinders:
            raise BadInput('mesh.transport', 'devices', f'cannot work, since {reason}; use files')


def make_sampler_mesh(learner: Mesh, devices: Sequence[Any]) -> Mesh:
    """The mesh of a sampler on these devices: axis tensor has the learner's size, and data takes all other devices.

    Raises BadInput where the learner's tensor size does not divide the number of devices.
    """
    tensor, count = learner.shape['tensor'], len(devices)
    if count % tensor:
        remedy = f'must be a multiple of mesh.tensor = {tensor}, since both sides cut weights alike'
        raise BadInput('mesh.sampler', count, f'{remedy}; choose {count + -count % tensor}')
    return meshes.arrange(devices, (count // tensor, 1, 1, tensor))


def move_rows(tree: Any, mesh: Mesh) -> Any:
    """Puts arrays over rows on the mesh: from the host, or from other devices by the host; others stay as they are."""
    if isinstance(jax.tree.leaves(tree)[0], np.ndarray):
        return batches.put_rows(tree, mesh)
    elsewhere = {*mesh.devices.flat}.isdisjoint(jax.tree.leaves(tree)[0].sharding.device_set)
    return batches.put_rows(processes.fetch(tree), mesh) if elsewhere else tree
