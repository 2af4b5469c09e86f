"""Runs an untrusted program against tests; docs/sandbox.md says what such a program can do, and what it cannot.

A jail is a small interpreter that runs jail.py, confined by confinement.py; it starts once and serves many jobs. A job
costs two forks of this interpreter. A program cannot reach the trainer's memory, environment or open files.
"""

from collections.abc import Mapping, Sequence
import contextlib
import json
import logging
from multiprocessing import connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple
import weakref

from grpo_jax.errors import BadInput
from grpo_jax.workers.pool import STARTING, Died, Expired

logger = logging.getLogger('grpo_jax')
GRACE = 10.0  # seconds after its deadline until which a job must have ended itself
# the jail's program: of this package it can import only jail.py and confinement.py
SCRIPT = (
    f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import jail; sys.path.pop(0)\n'
    'jail.main(sys.argv[1])'
)
NEEDED = {'landlock', 'system calls'}


class Jail(NamedTuple):
    """A process that runs jail.py, and serves one job after another."""

    process: Any  # a subprocess.Popen with pipes
    folder: str  # in which programs may write
    layers: tuple[str, ...]  # names of the layers of confinement that are active


class Sandbox:
    """Runs programs in jails, one job at a time in each; starts a jail where none is idle. Several threads may use it.

    The jails end, and their folders are deleted, with close(), when the Sandbox is garbage-collected, and with the
    interpreter.
    """

    def __init__(self):
        self._idle = []  # jails that wait for a job
        weakref.finalize(self, _kill_all, self._idle)

    def run(
        self,
        program: str,
        tests: Sequence[str],
        *,
        names: Mapping[str, str],
        setup: str,
        timeout: float,
        memory_mib: int,
    ) -> list[bool]:
        """For each test, whether it passed; raises Expired after `timeout` seconds, and Died if jail or judge ended.

        program: a source. tests: sources, run in turn in one namespace that the program cannot reach; a test passes
        unless it raises. names: name in that namespace -> name of the program's object; setup: a source that runs in
        the namespace before the tests; memory_mib: MiB of address space for each of the two processes.
        """
        for name, value in [('timeout', timeout), ('memory_mib', memory_mib)]:
            if value <= 0:
                raise BadInput(name, value, 'must be above 0; raise it')
        job = {
            'program': program,
            'tests': list(tests),
            'names': dict(names),
            'setup': setup,
            'timeout': timeout,
            'memory': int(memory_mib * 2**20),
        }
        jail = self._idle_jail()
        try:
            jail.process.stdin.write(json.dumps(job).encode() + b'\n')
            jail.process.stdin.flush()
            answer = _read_answer(jail.process, timeout + GRACE)
        except BrokenPipeError as error:
            _kill(jail)
            raise Died('the process of the sandbox ended before it could take the program') from error
        except BaseException:
            _kill(jail)
            raise
        self._idle.append(jail)
        if answer['expired']:
            raise Expired(f'the program was still running after {timeout} s')
        if len(answer['passed']) != len(tests):
            raise Died(f'the tests of the program ended at number {len(answer["passed"])} of {len(tests)}')
        return [mark == '1' for mark in answer['passed']]

    def layers(self) -> tuple[str, ...]:
        """The names of the layers of confinement that hold programs on this machine, such as 'landlock'."""
        jail = self._idle_jail()
        self._idle.append(jail)
        return jail.layers

    def close(self):
        """Ends the waiting jails; the sandbox can be used again."""
        _kill_all(self._idle)

    def _idle_jail(self):
        """Takes a jail that waits for a job, or starts one."""
        with contextlib.suppress(IndexError):
            while True:  # other threads take and return jails
                jail = self._idle.pop()
                if jail.process.poll() is None:
                    return jail
                _kill(jail)
        return _start()


def _start():
    """Starts a Jail and returns it; warns when it lacks a layer in NEEDED, and raises Died when it does not answer."""
    folder = tempfile.mkdtemp(prefix='grpo_jax-')
    command = [sys.executable, '-s', '-S', '-P', '-B', '-Xutf8', '-c', SCRIPT, folder]
    # sets have the same order in every run; the interpreter may need the library path to start
    environment = {'PYTHONHASHSEED': '0', 'LD_LIBRARY_PATH': os.environ.get('LD_LIBRARY_PATH', '')}
    process = subprocess.Popen(
        command, env=environment, cwd='/', start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        layers = tuple(_read_answer(process, STARTING))
    except BaseException:
        _kill(Jail(process, folder, ()))
        raise
    if not NEEDED <= set(layers):
        logger.warning(
            'generated programs are held by %s alone: no %s on this machine; see docs/sandbox.md',
            ', '.join(layers),
            ', '.join(sorted(NEEDED - set(layers))),
        )
    return Jail(process, folder, layers)


def _read_answer(process, seconds):
    """The jail's next line, parsed as JSON; raises Died when none comes within `seconds`, or the jail ends."""
    if not connection.wait([process.stdout], seconds):
        raise Died(f'the sandbox said nothing for {seconds} s')
    line = process.stdout.readline()
    if not line:
        raise Died('the sandbox ended')
    return json.loads(line)


def _kill_all(jails):
    while jails:
        _kill(jails.pop())


def _kill(jail):
    """Ends the jail, by a signal if it does not end within a second, and deletes its folder."""
    with contextlib.suppress(BrokenPipeError):
        jail.process.stdin.close()  # it ends when there is nothing more to read
    try:
        jail.process.wait(1.0)
    except subprocess.TimeoutExpired:
        os.killpg(jail.process.pid, signal.SIGKILL)
        jail.process.wait()
    jail.process.stdout.close()
    shutil.rmtree(jail.folder, ignore_errors=True)
