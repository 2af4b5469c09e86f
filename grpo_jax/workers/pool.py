"""Worker processes for calls that may hang, crash or exhaust memory; the parent kills them at a deadline.

Threads would not do: nothing can stop a thread, and math-verify's alarms fail in one. Workers are fresh interpreters,
so that JAX's state is not forked and the main module is not imported again.
"""

from collections.abc import Callable
import concurrent.futures
import contextlib
import importlib
import math
from multiprocessing import connection, reduction
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
from typing import Any
import weakref

STARTING = 120.0  # seconds for a worker to start, and to import the module of a function
CACHED = 100_000  # results that `call_cached` remembers


class Expired(Exception):
    """A call was still running at its deadline."""


class Died(Exception):
    """A worker ended, or ran out of memory, during a call."""


class Pool:
    """Calls functions in up to `workers` processes, which start when first needed; several threads may use it.

    The processes end with close(), when the Pool is garbage-collected, and with the interpreter.
    """

    def __init__(self, workers: int, *, deadline: float, memory_gib: float):
        """workers: the most processes; deadline: seconds a call may take; memory_gib: address space of a worker."""
        self.workers, self._deadline, self._memory = workers, deadline, int(memory_gib * 2**30)
        self._running = set()
        self._idle = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._results, self._lock = {}, threading.Lock()
        weakref.finalize(self, _kill_all, self._running)

    def call(self, function: Callable, *args) -> Any:
        """Calls function(*args) in a worker; returns the result, or raises the function's exception.

        Raises Expired at the deadline, and Died when the worker ends or its memory does not suffice. The function must
        be importable; arguments and result are pickled.
        """
        worker = self._idle.get()
        try:
            if worker is None or not worker.is_alive():
                self._running.discard(worker)
                worker = _Worker(self._deadline, self._memory)
                self._running.add(worker)
            return worker.call(function, args, self._deadline)
        except (Expired, Died):
            self._running.discard(worker)  # killed
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def call_cached(self, function: Callable, *args) -> Any:
        """Does what `call` does, and remembers a result, Expired or Died by function and arguments for later calls.

        Threads that make the same call at once wait for one call. Exceptions of the function are not remembered.
        """
        key = function, args
        with self._lock:
            future = self._results.get(key)
            if future is None:
                while len(self._results) >= CACHED:
                    self._results.pop(next(iter(self._results)))  # the oldest
                self._results[key] = mine = concurrent.futures.Future()
        if future is None:
            self._fill(key, mine)
            future = mine
        kind, value = future.result()
        if kind == 'result':
            return value
        raise kind(value) if kind in (Expired, Died) else value

    def _fill(self, key, future):
        """Sets the future of key = (function, args) to ('result', value), (failure type, message) or (None, error)."""
        outcome: Any = None, RuntimeError('interrupted')
        try:
            outcome = 'result', self.call(key[0], *key[1])
        except (Expired, Died) as failure:
            outcome = type(failure), str(failure)
        except Exception as error:
            outcome = None, error
        finally:
            if outcome[0] is None:
                with self._lock:
                    self._results.pop(key, None)
            future.set_result(outcome)

    def close(self):
        """Ends each worker after its current call; the pool can be used again."""
        for worker in [self._idle.get() for _ in range(self.workers)]:
            if worker is not None:
                self._running.discard(worker)
                worker.kill()
            self._idle.put(None)


class _Worker:
    """A worker process, which starts when this object is made, and the pipe to it."""

    def __init__(self, deadline, memory):
        self._pipe, child_end = connection.Pipe()
        environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path), 'OPENBLAS_NUM_THREADS': '1'}
        command = 'import sys; from grpo_jax.workers import pool; pool.serve(*map(float, sys.argv[1:]))'
        self._process = subprocess.Popen(
            [sys.executable, '-c', command, str(child_end.fileno()), str(deadline), str(memory)],
            env=environment,
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        child_end.close()
        self._imported = set()

    def is_alive(self):
        return self._process.poll() is None

    def call(self, function, args, deadline):
        """Calls function(*args) as Pool.call does; at first, imports the function's module within STARTING seconds."""
        if function.__module__ not in self._imported:
            self._request((importlib.import_module, (function.__module__,), False), STARTING)
            self._imported.add(function.__module__)
        return self._request((function, args, True), deadline)

    def _request(self, request, deadline):
        """Sends (function, args, whether to return the result), and returns the result; raises what Pool.call does."""
        name = request[0].__name__
        try:
            self._pipe.send(request)
            if not self._pipe.poll(deadline):
                self.kill()
                raise Expired(f'{name} was still running after {deadline} s')
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.kill()
            raise Died(f'{name} ended its worker (status {self._process.returncode})') from error
        if kind == 'result':
            return value
        if isinstance(value, MemoryError):
            self.kill()  # a process that ran out of memory is not to be trusted
            raise Died(f'{name} ran out of memory')
        raise value

    def kill(self):
        """Kills the process and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()


def _kill_all(workers):
    while workers:
        workers.pop().kill()


def serve(pipe: float, deadline: float, memory: float):
    """The main loop of a worker process: calls the functions that come through the pipe, until it closes.

    pipe: number of a file descriptor; deadline: seconds; memory: bytes.
    """
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    # when the parent is killed, the pipe closes; the worker then ends silently
    with contextlib.suppress(EOFError, ConnectionError), connection.Connection(int(pipe)) as conversation:
        while True:
            function, args, wants_result = conversation.recv()
            # if the parent is killed during a call, only this limit ends the call
            used = resource.getrusage(resource.RUSAGE_SELF)
            most = math.ceil(used.ru_utime + used.ru_stime + (deadline if wants_result else STARTING)) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
            try:
                result = function(*args)
                conversation.send_bytes(reduction.ForkingPickler.dumps(('result', result if wants_result else None)))
            except Exception as error:
                conversation.send(('raised', _make_sendable(error)))


def _make_sendable(error):
    """The exception, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f'{type(error).__name__}: {error}')
