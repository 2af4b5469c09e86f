"""Lets several processes train as one: they start together, exchange host values, and agree at every step.

Each process runs the whole loop. Device programs span the devices of all processes. Each process makes every decision
on the host by itself, from numbers that all processes have. A single process does not communicate.

Within `group`, "all processes" means the processes of the group, for example the learner's side where the sampler has
other processes. A failure ends all processes of the job.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import glob
import importlib.util
import itertools
import json
import math
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

import jax
from jax._src import distributed  # jax has no public access to the coordination service
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Int
import numpy as np

from grpo_jax.errors import INTERRUPTED, BadInput, CannotWrite, Stopped
from grpo_jax.text import escape

HEARTBEAT_SECONDS = 30  # a process without a sign of life for this long counts as dead, and the others end
LEAVE_SECONDS = 20  # how long a process waits for the others at the end
MEETING_SECONDS = 3600  # how long a process waits in `exchange` for another one that is alive
POLL_SECONDS = 2  # how often a process checks whether another one has failed
NOTICE_SECONDS = 4  # how long a process may take to notice a failure in `exchange`, where its message names the place
FAILED = 'grpo_jax/failed/'  # prefix of the keys under which processes report why they end
LEFT = 'grpo_jax/left/'  # prefix of the keys that say which processes have ended
STOP = 'grpo_jax/stop/'  # prefix of the keys by which a process asks other groups to stop

# options of jax for transfers between CPUs of several processes; jax reads no environment variables of their names
TRANSFERS = ('jax_cross_host_transfer_socket_address', 'jax_cross_host_transport_addresses')

Place = tuple[tuple[int, int], ...]  # (start, end) of a part of an array, for each axis

# the group that this process is in, and numbers for the calls of `exchange` in each; global, since jax has one client
# of the coordination service per process
_group: tuple[int, ...] | None = None
_meeting_numbers: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class OtherFailed(RuntimeError):
    """Another process has failed, so this one ends too: with that one's reason and exit status."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


def _end_process(text: str, status: int) -> None:
    """Prints the text on stderr, tells the other processes, and ends this process with the status."""
    print(text, file=sys.stderr, flush=True)
    leave(text, status)
    os._exit(status)


@contextlib.contextmanager
def session(
    coordinator: str | None, processes: int | None, process: int | None, end: Callable[[str, int], None] = _end_process
) -> Iterator[None]:
    """Joins the other processes, and leaves them at the end of the context; tells them when this process fails.

    coordinator: HOST:PORT of process 0; without it, the hosts of a TPU pod find each other, and any other process is
    alone. processes: how many there are. process: this one's number. end(text, status): ends this process when another
    one has failed and this one does not notice, because a device program waits for the other. Raises BadInput when the
    first three arguments do not fit together.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not _start(coordinator, processes, process):
        yield
        return
    # jax has installed a handler that only notes the signal
    signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
    left = threading.Event()
    threading.Thread(target=_watch_failures, args=[left, end], name='failures', daemon=True).start()
    try:
        yield
    except Stopped:
        _shut_down(left)
        raise
    except (BadInput, CannotWrite, OtherFailed, KeyboardInterrupt) as error:
        report_failure(error)  # without a shutdown, which waits for the others and aborts if they do not come
        raise
    except Exception as error:
        print(*map(escape, traceback.format_exc().rstrip('\n').split('\n')), sep='\n', file=sys.stderr)
        report_failure(error)
        end(f'error: {_process_name()}: {type(error).__name__}: {error}', 1)
    else:
        _shut_down(left)


def _shut_down(left):
    """Ends jax's connection with the other processes when they do; left: the Event that ends _watch_failures."""
    left.set()
    try:
        jax.distributed.shutdown()
    except jax.errors.JaxRuntimeError as error:
        print(f'{_process_name()} leaves alone: {str(error).splitlines()[0]}', file=sys.stderr)


def report_failure(error: BaseException) -> None:
    """Tells the other processes why this one ends; they then end too, even while they wait for this one.

    Does nothing for Stopped and OtherFailed, since all processes know why.
    """
    if has_others() and not isinstance(error, (Stopped, OtherFailed)):
        interrupted = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        _post_failure(
            f'{_process_name()} failed: {str(error) or type(error).__name__}', getattr(error, 'status', interrupted)
        )


def leave(text: str, status: int) -> None:
    """Tells the other processes that this one ends, with a text and an exit status. The caller must exit right after.

    The first process, which holds the messages, waits here until the others have left.
    """
    if not has_others():
        return
    for target, *arguments in ([_post_failure, f'{_process_name()}: {text}', status], [_note_leaving]):
        telling = threading.Thread(target=target, args=arguments, daemon=True)
        telling.start()
        telling.join(POLL_SECONDS)  # the first process may be gone
    if speaks():
        until = time.monotonic() + LEAVE_SECONDS
        count = distributed.global_state.num_processes or 1
        with contextlib.suppress(AttributeError):  # this process's other threads may end the session meanwhile
            while time.monotonic() < until and len(_client().key_value_dir_get(LEFT)) < count:
                time.sleep(0.2)
        time.sleep(0.5)  # the others end a moment after their note


def _note_leaving():
    """Notes under LEFT, for the first process, that this process ends."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _client().key_value_set(f'{LEFT}{distributed.global_state.process_id}', '')


def _post_failure(text, status):
    """Notes under FAILED, for the other processes, why this process ends and with which exit status."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the first process may be gone
        _client().key_value_set(f'{FAILED}{distributed.global_state.process_id}', json.dumps([text, status]))


def _watch_failures(left, end):
    """Calls end(text, status) some seconds after any process has failed, unless `left` (an Event) is set by then."""
    own_key = f'{FAILED}{distributed.global_state.process_id}'
    while not left.wait(POLL_SECONDS):
        try:
            failures = dict(_client().key_value_dir_get(FAILED))
        except (jax.errors.JaxRuntimeError, AttributeError):  # the first process has gone, or this one is going
            return
        if failures and not left.wait(LEAVE_SECONDS if own_key in failures else NOTICE_SECONDS):
            text, status = json.loads(next(iter(failures.values())))
            end(f'error: {text}', status)


def _start(coordinator, processes, process):
    """Joins the other processes, if there are any, and returns whether it did; raises BadInput as session does."""
    if coordinator is None:
        if processes is not None or process is not None:
            raise BadInput('--coordinator', coordinator, 'give HOST:PORT of process 0 with --processes and --process')
        if not _on_tpu():
            return False
        try:
            _initialize()
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
        raise BadInput('--coordinator', coordinator, 'is not HOST:PORT; give that of process 0')
    _initialize(coordinator, processes, process)
    if jax.default_backend() == 'cpu':
        # Only the first process would load programs from the cache. A loaded program of XLA's older emitters waits for
        # ever for the other processes, which have compiled the same program; and sums of one process's devices, which
        # go through the same library, are wrong now and then in a loaded program.
        jax.config.update('jax_enable_compilation_cache', False)
    return True


def _initialize(*address):
    """Calls jax.distributed.initialize(*address), with the options TRANSFERS from environment variables."""
    for name in TRANSFERS:
        if name.upper() in os.environ:
            jax.config.update(name, os.environ[name.upper()])
    jax.distributed.initialize(
        *address, heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=LEAVE_SECONDS
    )


def _on_tpu():
    """Whether this machine has TPUs that jax may use; initializes no device."""
    platforms = os.environ.get('JAX_PLATFORMS', '')
    return bool(
        (not platforms or 'tpu' in platforms)
        and importlib.util.find_spec('libtpu')
        and (glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*'))
    )


@functools.cache
def start_devices() -> None:
    """Starts jax's devices, and hides the error that libtpu prints where it is installed and no TPU is there."""
    if _on_tpu() or importlib.util.find_spec('libtpu') is None:
        return
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            jax.devices()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


@contextlib.contextmanager
def group(numbers: Iterable[int]) -> Iterator[None]:
    """A context in which this process works as one with the processes of these numbers, apart from all others."""
    global _group
    _group = tuple(sorted(numbers))
    try:
        yield
    finally:
        _group = None


def in_group() -> bool:
    """Whether this process is inside the context `group`, so that the job has processes in another group."""
    return _group is not None


def members() -> tuple[int, ...]:
    """The numbers of the processes that work as one, this process's own among them, ascending."""
    return _group or tuple(range(jax.process_count()))


def is_first() -> bool:
    """Whether this process is the first, which writes the files that all processes share."""
    return jax.process_index() == 0


def has_others() -> bool:
    """Whether this process trains with others as one; initializes no device."""
    return (distributed.global_state.num_processes or 1) > 1


def speaks() -> bool:
    """Whether this process prints messages for people, which the first one does; initializes no device."""
    return not distributed.global_state.process_id


def put(tree: Any, sharding: Sharding) -> Any:
    """Puts a tree of host arrays onto devices by the sharding; each process has whole arrays, and fills its shards."""

    def put_array(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(put_array, tree)


def local_parts(sharding: Any, shape: tuple[int, ...]) -> list[Place]:
    """The distinct Places of an array with `shape` on this process's devices, sorted; sharding may be a device."""
    indices = _as_sharding(sharding).addressable_devices_indices_map(shape).values()
    return sorted({as_place(index, shape) for index in indices})


def put_parts(parts: Mapping[Place, np.ndarray], sharding: Any, shape: tuple[int, ...]) -> jax.Array:
    """The jax Array with this shape and sharding; parts: {Place: host array} for this process's local_parts."""
    return jax.make_array_from_callback(shape, _as_sharding(sharding), lambda index: parts[as_place(index, shape)])


def as_place(index: Any, shape: tuple[int, ...]) -> Place:
    """The Place that slices, one for each axis, select in an array with `shape`."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _as_sharding(sharding) -> Any:
    """A sharding as it is; for a single device, its SingleDeviceSharding."""
    return jax.sharding.SingleDeviceSharding(sharding) if isinstance(sharding, jax.Device) else sharding


def fetch(tree: Any) -> Any:
    """The tree with whole host arrays in place of jax Arrays, gathered from all processes; all must call it."""

    def fetch_array(array):
        if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
            return multihost_utils.process_allgather(array, tiled=True)
        return array

    return jax.device_get(jax.tree.map(fetch_array, tree))


def exchange(where: str, value: str) -> list[str]:
    """A list of all processes' values, in the order of their numbers; all processes must call it, in the same order.

    where: names the place in the program. value: a small text. Raises OtherFailed when another process has failed, and
    RuntimeError when one is at another place or does not come.
    """
    if len(members()) == 1:
        return [value]
    client, meeting = _client(), next(_meeting_numbers[members()])
    client.key_value_set(_meeting_key(meeting, jax.process_index()), json.dumps([where, _process_name(), value]))
    keys = [_meeting_key(meeting, process) for process in members()]
    messages = [json.loads(wait_for(key, where, MEETING_SECONDS)) for key in keys]
    if meeting:  # every process is at this meeting, hence has read the messages of the meeting before
        client.key_value_delete(_meeting_key(meeting - 1, jax.process_index()))
    _check_equal(where, [(name, {'place in the program': place}) for place, name, _ in messages])
    return [value for _, _, value in messages]


def wait_for(key: str, where: str, seconds: float = math.inf, each_poll: Callable[[], Any] = lambda: None) -> bytes:
    """Waits until a process has set a key of the coordination service, and returns the key's value.

    where: names the place in the program. each_poll: called every POLL_SECONDS. Raises OtherFailed when a process has
    failed, and RuntimeError when nobody has set the key for so many seconds.
    """
    client, until = _client(), time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return client.blocking_key_value_get_bytes(key, POLL_SECONDS * 1000)
        except jax.errors.JaxRuntimeError as error:
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise
        for _, message in client.key_value_dir_get(FAILED):
            text, status = json.loads(message)
            raise OtherFailed(f'at {where}: {text}', status)
        each_poll()
    raise RuntimeError(f'at {where}: process {key.rpartition("/")[2]} has not come for {seconds} s')


def exchange_stop(where: str, values: Mapping[str, Any], stop: bool = False) -> bool:
    """Whether any process wants to stop. Raises RuntimeError, with the process's name, where values differ.

    where: names the place in the program. values: texts and numbers by name, which must be equal everywhere. stop:
    whether this process wants to stop. All processes must call it, in the same order.
    """
    if len(members()) == 1:
        return stop
    texts = {name: str(value) for name, value in values.items()}
    messages = [json.loads(text) for text in exchange(where, json.dumps([_process_name(), texts, stop]))]
    _check_equal(where, [(name, texts) for name, texts, _ in messages])
    return any(stops for _, _, stops in messages)


def ask_to_stop() -> None:
    """Asks the processes of other groups to stop, which see it in `asked_to_stop`."""
    _client().key_value_set(f'{STOP}{jax.process_index()}', '', allow_overwrite=True)


def asked_to_stop() -> bool:
    """Whether a process of another group has asked this one to stop."""
    return in_group() and bool(_client().key_value_dir_get(STOP))


def _check_equal(where, values_by_process):
    """Raises RuntimeError unless all dicts are equal; values_by_process: pairs (name of a process, its dict)."""
    for key in {key: None for _, values in values_by_process for key in values}:
        column = [values.get(key) for _, values in values_by_process]
        usual = max(column, key=column.count)
        odd = [
            f'{name} has {value!r}'
            for (name, _), value in zip(values_by_process, column, strict=True)
            if value != usual
        ]
        if odd:
            raise RuntimeError(
                f'at {where}, the processes differ in {key}: {"; ".join(odd)}; the others have '
                f'{usual!r}; start all with the same code, command and data, and one shared workdir'
            )


def gather(value: Any) -> list[Any]:
    """A list of all processes' values, in the order of their numbers; all must call it. value: can be pickled."""
    if len(members()) == 1:
        return [value]
    content = pickle.dumps(value)
    # exchange comes first, since a collective on CPUs waits at most 30 s for another process
    sizes = [int(size) for size in exchange('gathering', str(len(content)))]
    padded = np.zeros(1 << (max(sizes) - 1).bit_length(), np.uint8)  # powers of two, so that few sizes are compiled
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    devices = [device for device in jax.devices() if device.process_index in members()]
    mesh = Mesh(np.array(devices).reshape(len(sizes), -1), ('processes', 'devices'))
    over_processes = NamedSharding(mesh, PartitionSpec('processes'))
    rows = fetch(jax.make_array_from_callback((len(sizes), len(padded)), over_processes, lambda _: padded[None]))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def gather_rows(rows: Sequence[int] | Int[np.ndarray, ' R'], tree: Any) -> Any:
    """Host arrays with the rows of all processes, sorted by row number; all processes must call it.

    rows: numbers of this process's rows. tree: host arrays with these rows.
    """
    if len(members()) == 1:
        return tree
    rows_by_process, trees = zip(*gather((np.asarray(rows, int), tree)), strict=True)
    order = np.argsort(np.concatenate(rows_by_process))
    return jax.tree.map(lambda *arrays: np.concatenate(arrays)[order], *trees)


def by_group(
    function: Callable[..., Any], groups: Sequence[Any] | np.ndarray, *columns: Sequence[Any] | np.ndarray
) -> Any:
    """The result of function(groups, *columns); each process computes its share of the groups. All must call it.

    columns: sequences over rows, with the same number of rows for each group. The function and this call return a tree
    of arrays over rows.
    """
    if len(members()) == 1:
        return function(groups, *columns)
    own, size = share(len(groups)), len(columns[0]) // len(groups)
    rows = range(own.start * size, own.stop * size)
    return gather_rows(rows, function(groups[own.start : own.stop], *(x[rows.start : rows.stop] for x in columns)))


def share(count: int) -> range:
    """The indices, of 0 to count - 1, that are this process's share where the processes share evenly."""
    place, processes = members().index(jax.process_index()), len(members())
    return range(count * place // processes, count * (place + 1) // processes)


def _meeting_key(meeting, process):
    return f'grpo_jax/meeting/{members()[0]}+{len(members())}/{meeting}/{process}'


def _process_name():
    state = distributed.global_state
    return f'process {state.process_id} of {state.num_processes} on {socket.gethostname()}'


def post(key: str, value: bytes) -> None:
    """Sets a key of the coordination service, for which others wait by wait_for."""
    _client().key_value_set_bytes(key, value)


def delete(key: str) -> None:
    """Deletes a key of the coordination service, and all keys below it."""
    _client().key_value_delete(key)


def _client() -> Any:
    return distributed.global_state.client
