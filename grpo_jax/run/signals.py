"""What may end a run before its last step: SIGTERM, Ctrl-C, SIGHUP, and a step that hangs.

In a command a thread waits for the signals, so that they are heard at once, whatever the main thread computes. In a
notebook, and wherever else `train.run` is called, handlers of the main thread hear them while a loop takes its steps.
"""

from collections.abc import Iterator
import contextlib
import faulthandler
import os
import signal
import sys
import threading

from grpo_jax.errors import TERMINATED
from grpo_jax.hosts import lock, processes
from grpo_jax.run.console import console

HUNG = 43  # exit status
NAMES = {signal.SIGTERM: 'SIGTERM', signal.SIGINT: 'Ctrl-C', signal.SIGHUP: 'SIGHUP'}
PROMISE = 'stopping after this step, with a checkpoint; once more stops at once'

_underway: list['Signals'] = []  # of the loops that take their steps now, the innermost last


class Signals:
    """A context around a loop. The first signal only sets `stopping`; the second ends the process.

    In a command the SignalThread hears them and sets it; elsewhere a handler of this context does.
    A step longer than `limit` seconds (0: none) ends the process. step(name) begins a step.
    """

    def __init__(self, limit: float):
        self.stopping = False
        self.underway = False  # whether there is something that a checkpoint would save
        self._limit, self._timer, self._before = limit, None, {}

    def __enter__(self):
        _underway.append(self)
        # no other thread than the main one may set a handler
        if _signal_thread is None and threading.current_thread() is threading.main_thread():
            self._before = _handle(self._asked)
        return self

    def __exit__(self, *_):
        self._disarm()
        self._restore()
        _underway.remove(self)

    def step(self, name: str) -> None:
        """Begins a step, and ends the one before."""
        self._disarm()
        if self._limit:
            self._timer = threading.Timer(self._limit, _hang, (name, self._limit))
            self._timer.daemon = True
            self._timer.start()

    def _disarm(self):
        if self._timer:
            self._timer.cancel()

    def _restore(self):
        _set_back(self._before)
        self._before = {}

    def _asked(self, number, _):
        self.stopping = True
        self._restore()
        # on another thread: this one may be in the middle of printing
        threading.Thread(target=console.print, args=[f'{NAMES[number]}: {PROMISE}']).start()


class SignalThread:
    """Hears the signals of a command on a thread of its own."""

    def __init__(self):
        self._asked = False
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = _handle(self._in_main_thread)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not this one's
        threading.Thread(target=self._listen, args=[reader], name='signals', daemon=True).start()

    def close(self) -> None:
        """Sets the handlers back."""
        signal.set_wakeup_fd(-1)
        os.close(self._writer)
        _set_back(self._before)

    def _listen(self, reader):
        while number := os.read(reader, 1):
            workdirs = lock.held()
            if number[0] in NAMES and workdirs:
                self._hear(signal.Signals(number[0]), workdirs[0])
        os.close(reader)

    def _hear(self, number, workdir):
        """The first signal is obeyed when the step is finished, if there is one worth that; all others at once."""
        if number == signal.SIGHUP:  # the terminal is gone: what went there goes nowhere
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in self._terminals:
                os.dup2(nothing, descriptor)
        if self._asked:
            stop_now(f'{NAMES[number]} once more: stopped at once; the same command goes on', 128 + number)
        self._asked = True
        if not any(signals.underway for signals in _underway):
            text = f'{NAMES[number]}: stopped, with nothing to finish; the same command goes on with {workdir}'
            stop_now(text, TERMINATED)
        for signals in _underway:
            signals.stopping = True
        console.print(f'{NAMES[number]}: {PROMISE}')

    def _in_main_thread(self, number, _):
        """Where no run is under way, a signal does what it does elsewhere."""
        if lock.held():
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_signal_thread: SignalThread | None = None


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """A context around a command: signals end its runs, in one line each, whatever the main thread computes."""
    global _signal_thread
    _signal_thread = SignalThread()
    try:
        yield
    finally:
        _signal_thread.close()
        _signal_thread = None


def stop_now(text: str, status: int) -> None:
    """Ends the process: one line, the other processes told, no lock left behind; what is on the disk is whole."""
    with contextlib.suppress(Exception):
        console.stop()
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    lock.release_all()
    processes.leave(text, status)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)  # sys.exit would wait for the threads that compile and judge


def _handle(handler):
    """{number: handler so far}; the signals that are ignored, as nohup and background jobs have it, stay so."""
    numbers = [number for number in NAMES if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def _set_back(handlers):
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was none of Python's


def _hang(name, limit):
    """Says where every thread is, and ends the process."""
    faulthandler.dump_traceback(all_threads=True)
    stop_now(
        f'error: {name} has taken more than log.hang_after = {limit:g} s; the stacks of all threads are above; the '
        'same command goes on from the last checkpoint',
        HUNG,
    )
