"""Several processes that train as one: how they start, exchange what the host knows, and agree at every step.

Each runs the whole loop. Device programs span the devices of all; what the host decides is decided by each alike, from
numbers that all have. With one process nothing here talks to anybody.
"""

import contextlib
import glob
import importlib.util
import itertools
import json
import os
import pickle
import signal
import socket
import sys
import traceback

import jax
from jax._src import distributed  # the coordination service has no public door
from jax.experimental import multihost_utils
import numpy as np

from grpo_jax.errors import BadInput, Stopped

HEARTBEAT = 30  # seconds without a sign of life after which a process counts as dead, and the others end
LEAVING = 20  # seconds to wait for the others at the end
PATIENCE = 3600  # seconds that a process waits for one that lives, but does not come
LOOK = 2  # seconds between looks whether another has failed
FAILED = 'grpo_jax/failed/'

_meetings = itertools.count()


@contextlib.contextmanager
def session(coordinator, processes, process):
    """Joins this process with the others; they part at the end, and learn it when this one fails.

    coordinator is HOST:PORT of process 0. Without one, hosts of a TPU pod find each other, and elsewhere there is
    one process. BadInput when the three do not fit together.
    """
    if not _start(coordinator, processes, process):
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX put a handler there that only notes it
    try:
        yield
    except (BadInput, Stopped):
        raise
    except Exception as error:
        # now, since parting from the others may end the process
        traceback.print_exc()
        print(f'error: {_name()}: {type(error).__name__}: {error}', file=sys.stderr, flush=True)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # where the others are gone already
            _client().key_value_set(f'{FAILED}{jax.process_index()}', f'{_name()} failed: {error}')
        sys.exit(1)
    finally:
        try:
            jax.distributed.shutdown()
        except jax.errors.JaxRuntimeError as error:
            print(f'{_name()} leaves alone: {str(error).splitlines()[0]}', file=sys.stderr)


def _start(coordinator, processes, process):
    """Whether this process joined others."""
    patience = dict(heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=LEAVING)
    if coordinator is None:
        if processes is not None or process is not None:
            raise BadInput('--coordinator', coordinator, '--processes and --process need it: HOST:PORT of process 0')
        if not _on_tpu():
            return False
        try:
            jax.distributed.initialize(**patience)
        except ValueError:  # a TPU without a cluster around it
            return False
        return True
    if processes is None or process is None or not 0 <= process < processes:
        raise BadInput(
            '--processes, --process',
            (processes, process),
            'with --coordinator, say how many processes there are, and which this one is, counted from 0',
        )
    if not coordinator.rpartition(':')[2].isdigit():
        raise BadInput('--coordinator', coordinator, 'is not HOST:PORT of process 0')
    jax.distributed.initialize(coordinator, processes, process, **patience)
    return True


def _on_tpu():
    platforms = os.environ.get('JAX_PLATFORMS', '')
    return bool(
        (not platforms or 'tpu' in platforms)
        and importlib.util.find_spec('libtpu')
        and (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*'))
    )


def is_first():
    """Whether this process writes the files that all share."""
    return jax.process_index() == 0


def put(tree, sharding):
    """Host arrays that every process has, laid out by a sharding; each puts what its own devices hold."""

    def one(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(one, tree)


def held(sharding, shape):
    """Slices of the part of an array that this process's devices hold; sharding may be a device."""
    indices = list(_sharding(sharding).addressable_devices_indices_map(shape).values())
    ends = [[index[axis].indices(size) for index in indices] for axis, size in enumerate(shape)]
    return tuple(slice(min(start for start, _, _ in found), max(stop for _, stop, _ in found)) for found in ends)


def put_held(part, slices, sharding, shape):
    """The array of a shape whose part at those slices this process has, laid out."""

    def local(index):
        ends = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
        return part[
            tuple(
                slice(start - whole.start, stop - whole.start)
                for (start, stop), whole in zip(ends, slices, strict=True)
            )
        ]

    return jax.make_array_from_callback(shape, _sharding(sharding), local)


def _sharding(place):
    return jax.sharding.SingleDeviceSharding(place) if isinstance(place, jax.Device) else place


def fetch(tree):
    """Arrays on the host, whole, wherever their parts lie; all processes must call it."""

    def whole(array):
        if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
            return multihost_utils.process_allgather(array, tiled=True)
        return array

    return jax.device_get(jax.tree.map(whole, tree))


def exchange(where, value):
    """[value of process 0, of process 1, ...], small texts; all processes must call it, in the same order.

    where names the place in the program. RuntimeError when a process is at another one, failed, or does not come.
    """
    if jax.process_count() == 1:
        return [value]
    client, meeting = _client(), next(_meetings)
    client.key_value_set(_key(meeting, jax.process_index()), json.dumps([where, _name(), value]))
    said = [json.loads(_wait(client, meeting, process, where)) for process in range(jax.process_count())]
    if meeting:  # all have read what was said before
        client.key_value_delete(_key(meeting - 1, jax.process_index()))
    _compare(where, [(name, {'place in the program': place}) for place, name, _ in said])
    return [value for _, _, value in said]


def _wait(client, meeting, process, where):
    """What a process says at a meeting."""
    for _ in range(PATIENCE // LOOK):
        try:
            return client.blocking_key_value_get(_key(meeting, process), LOOK * 1000)
        except jax.errors.JaxRuntimeError as error:
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise
        for _, message in client.key_value_dir_get(FAILED):
            raise RuntimeError(f'at {where}: {message}')
    raise RuntimeError(f'at {where}: process {process} has not come for {PATIENCE} s')


def agree(where, values, stop=False):
    """Whether any process wants to stop; RuntimeError naming the process whose values are not those of the others.

    values is a dict of texts and numbers. All processes must call it, in the same order.
    """
    if jax.process_count() == 1:
        return stop
    values = {name: str(value) for name, value in values.items()}
    said = [json.loads(text) for text in exchange(where, json.dumps([_name(), values, stop]))]
    _compare(where, [(name, found) for name, found, _ in said])
    return any(wants for _, _, wants in said)


def _compare(where, said):
    """RuntimeError when the dicts of (name of the process, dict) differ."""
    for key in {key: None for _, values in said for key in values}:
        found = [values.get(key) for _, values in said]
        usual = max(found, key=found.count)
        odd = [f'{name} has {value!r}' for (name, _), value in zip(said, found, strict=True) if value != usual]
        if odd:
            raise RuntimeError(
                f'at {where}, the processes differ in {key}: {"; ".join(odd)}; the others have '
                f'{usual!r}; start all with the same code, command and data, and one shared workdir'
            )


def gather(value):
    """[value of process 0, of process 1, ...], anything that can be pickled; all processes must call it."""
    if jax.process_count() == 1:
        return [value]
    content = pickle.dumps(value)
    # coming together first: on CPUs a collective waits no longer than 30 s for another process
    sizes = [int(size) for size in exchange('gathering', str(len(content)))]
    padded = np.zeros(1 << (max(sizes) - 1).bit_length(), np.uint8)  # few sizes, each compiled once
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    pieces = multihost_utils.process_allgather(padded)
    return [pickle.loads(piece[:size].tobytes()) for piece, size in zip(pieces, sizes, strict=True)]


def gather_rows(rows, tree):
    """The tree of host arrays of all rows in order, from those of this process's rows."""
    if jax.process_count() == 1:
        return tree
    places, trees = zip(*gather((np.asarray(rows, int), tree)), strict=True)
    order = np.argsort(np.concatenate(places))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[order], *trees)


def by_group(function, groups, *columns):
    """function(groups, *columns), a tree of arrays of rows; each process does its share of the groups.

    A column has equally many rows for each group. All processes must call it.
    """
    if jax.process_count() == 1:
        return function(groups, *columns)
    start, stop = (len(groups) * edge // jax.process_count() for edge in (jax.process_index(), jax.process_index() + 1))
    size = len(columns[0]) // len(groups)
    rows = range(start * size, stop * size)
    return gather_rows(rows, function(groups[start:stop], *(column[rows.start : rows.stop] for column in columns)))


def _key(meeting, process):
    return f'grpo_jax/meeting/{meeting}/{process}'


def _name():
    return f'process {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}'


def _client():
    return distributed.global_state.client
