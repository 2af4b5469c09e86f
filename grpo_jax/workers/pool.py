"""Worker processes for work that may hang, die or eat memory: killed at a deadline that the parent keeps, and replaced.

Threads would not do: nothing stops one, and math-verify's alarms fail in them. Workers are fresh interpreters, so that
nothing of JAX is forked and the program's main module is not imported again.
"""

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

from grpo_jax.errors import BadInput

STARTING = 120.0  # seconds for a worker to start, and to import the module of a function
CACHED = 100_000  # results that are remembered


class Expired(Exception):
    """A call was still running at its deadline."""


class Died(Exception):
    """A worker ended, or ran out of memory, in a call."""


class Pool:
    """Up to `workers` processes, started when first needed; usable from several threads."""

    def __init__(self, workers, *, deadline, memory_gib):
        """deadline: seconds a call may take; memory_gib: GiB of address space of a worker."""
        for name, value in [
            ('reward.workers', workers),
            ('reward.deadline', deadline),
            ('reward.memory_gib', memory_gib),
        ]:
            if value <= 0:
                raise BadInput(name, value, 'must be above 0')
        self.workers, self._deadline, self._memory = workers, deadline, int(memory_gib * 2**30)
        self._idle = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._results, self._lock = {}, threading.Lock()

    def call(self, function, *args):
        """function(*args) in a worker: its result, or what it raises; Expired at the deadline, Died with the worker.

        The function is one of an importable module; it, its arguments and its result are pickled.
        """
        worker = self._idle.get()
        try:
            if worker is None or not worker.alive():
                worker = _Worker(self._deadline, self._memory)
            return worker.call(function, args, self._deadline)
        except (Expired, Died):
            worker = None  # killed
            raise
        finally:
            self._idle.put(worker)

    def cached(self, function, *args):
        """call(function, *args), remembered by function and arguments; those that fail are tried again."""
        key = function, args
        with self._lock:
            if key in self._results:
                return self._results[key]
        result = self.call(function, *args)
        with self._lock:
            while len(self._results) >= CACHED:
                self._results.pop(next(iter(self._results)))  # the oldest
            self._results[key] = result
        return result

    def close(self):
        """Ends the workers; the pool can be used again."""
        for _ in range(self.workers):
            worker = self._idle.get()
            if worker is not None:
                worker.kill()
            self._idle.put(None)


class _Worker:
    """One process, and the pipe to it."""

    def __init__(self, deadline, memory):
        self._pipe, theirs = connection.Pipe()
        environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path), 'OPENBLAS_NUM_THREADS': '1'}
        command = 'import sys; from grpo_jax.workers import pool; pool.serve(*map(float, sys.argv[1:]))'
        self._process = subprocess.Popen(
            [sys.executable, '-c', command, str(theirs.fileno()), str(deadline), str(memory)],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._imported = set()

    def alive(self):
        return self._process.poll() is None

    def call(self, function, args, deadline):
        if function.__module__ not in self._imported:
            self._ask((importlib.import_module, (function.__module__,), False), STARTING)
            self._imported.add(function.__module__)
        return self._ask((function, args, True), deadline)

    def _ask(self, what, deadline):
        try:
            self._pipe.send(what)
            if not self._pipe.poll(deadline):
                self.kill()
                raise Expired(f'{what[0].__name__} was still running after {deadline} s')
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.kill()
            raise Died(f'{what[0].__name__} ended its worker (status {self._process.returncode})') from error
        if kind == 'result':
            return value
        if isinstance(value, MemoryError):
            self.kill()  # what is left of it is not to be trusted
            raise Died(f'{what[0].__name__} ran out of memory')
        raise value

    def kill(self):
        """Ends the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()


def serve(pipe, deadline, memory):
    """The main loop of a worker process: calls what the pipe says, until it closes."""
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    with connection.Connection(int(pipe)) as conversation:
        while True:
            try:
                function, args, answer = conversation.recv()
            except EOFError:
                return
            # should the parent be killed in a call, nobody else would end it
            used = resource.getrusage(resource.RUSAGE_SELF)
            most = math.ceil(used.ru_utime + used.ru_stime + (deadline if answer else STARTING)) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
            try:
                result = function(*args)
                conversation.send_bytes(reduction.ForkingPickler.dumps(('result', result if answer else None)))
            except Exception as error:
                conversation.send(('raised', _sendable(error)))


def _sendable(error):
    """The exception, or one that says the same and survives the pipe."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f'{type(error).__name__}: {error}')
