"""Ends a run before its last step on SIGTERM, Ctrl-C, SIGHUP, or when a step hangs.

In a command a thread waits for signals, so that it receives them at once while the main thread computes. In a notebook,
and wherever else `train.run` is called, signal handlers of the main thread receive them during a loop's steps.
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

_loops: list['Signals'] = []  # of the running loops, the innermost last


class Signals:
    """A context around a loop. The first signal sets `stopping`; the second ends the process.

    In a command the SignalThread sets it, but ends the process at once where there is no progress to save; elsewhere a
    handler of this context sets it. A step that takes longer than `limit`
    seconds (0: no limit) ends the process.
    """

    def __init__(self, limit: float):
        self.stopping = False
        self.has_progress = False  # whether there is progress that a checkpoint would save
        self._limit, self._timer, self._before = limit, None, {}

    def __enter__(self):
        _loops.append(self)
        # no other thread than the main one may set a handler
        if _signal_thread is None and threading.current_thread() is threading.main_thread():
            self._before = _set_handlers(self._stop)
        return self

    def __exit__(self, *_):
        self._disarm()
        self._restore()
        _loops.remove(self)

    def step(self, name: str) -> None:
        """Starts the timer that ends the process if step `name` hangs; stops the timer of the step before."""
        self._disarm()
        if self._limit:
            self._timer = threading.Timer(self._limit, _end_hung_process, (name, self._limit))
            self._timer.daemon = True
            self._timer.start()

    def _disarm(self):
        """Stops the timer of the step before."""
        if self._timer:
            self._timer.cancel()

    def _restore(self):
        """Restores the handlers that were there before this context; a second call does nothing."""
        _restore_handlers(self._before)
        self._before = {}

    def _stop(self, number, _):
        """Handles the first signal: sets `stopping`, and restores the earlier handlers for a second signal."""
        self.stopping = True
        self._restore()
        # on another thread, since this one may be printing and hold the console's lock
        threading.Thread(target=console.print, args=[f'{NAMES[number]}: {PROMISE}']).start()


class SignalThread:
    """Receives the signals of a command on a thread of its own."""

    def __init__(self):
        self._stopping = False  # whether a signal has come
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = _set_handlers(self._handle_without_run)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # a forked child must not write its signals here
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=self._listen, args=[reader], name='signals', daemon=True).start()

    def close(self) -> None:
        """Ends the thread and restores the earlier handlers."""
        signal.set_wakeup_fd(-1)
        os.close(self._writer)
        _restore_handlers(self._before)

    def _listen(self, reader):
        """Passes each signal whose number arrives in the pipe on to _receive, while a run holds its workdir."""
        while number := os.read(reader, 1):
            workdirs = lock.owned_folders()
            if number[0] in NAMES and workdirs:
                self._receive(signal.Signals(number[0]), workdirs[0])
        os.close(reader)

    def _receive(self, number, workdir):
        """Stops after the current step at the first signal, if there is progress to save; else ends the process now."""
        if number == signal.SIGHUP:  # the terminal is gone, so its output is discarded
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in self._terminals:
                os.dup2(nothing, descriptor)
        if self._stopping:
            stop_now(f'{NAMES[number]} once more: stopped at once; the same command goes on', 128 + number)
        self._stopping = True
        if not any(signals.has_progress for signals in _loops):
            text = f'{NAMES[number]}: stopped, with nothing to finish; the same command goes on with {workdir}'
            stop_now(text, TERMINATED)
        for signals in _loops:
            signals.stopping = True
        console.print(f'{NAMES[number]}: {PROMISE}')

    def _handle_without_run(self, number, _):
        """Handles a signal in the main thread: does the default action, unless a run holds its workdir."""
        if lock.owned_folders():
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_signal_thread: SignalThread | None = None


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Opens a context around a command, in which a SignalThread receives the signals."""
    global _signal_thread
    _signal_thread = SignalThread()
    try:
        yield
    finally:
        _signal_thread.close()
        _signal_thread = None


def stop_now(text: str, status: int) -> None:
    """Ends the process with a status: prints a line, releases its locks, and tells the other processes."""
    with contextlib.suppress(Exception):
        console.stop()
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
    lock.release_all()
    processes.leave(text, status)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)  # sys.exit would wait for threads that compile or compute rewards


def _set_handlers(handler):
    """Sets the handler of each signal in NAMES and returns {signal: earlier handler}.

    Signals that the process ignores, as under nohup or in a background job, stay ignored.
    """
    numbers = [number for number in NAMES if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def _restore_handlers(handlers):
    """Sets the handlers that _set_handlers returned."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: the handler was not Python's


def _end_hung_process(name, limit):
    """Prints the stacks of all threads and ends the process; name: of the step; limit: in seconds."""
    faulthandler.dump_traceback(all_threads=True)
    stop_now(
        f'error: {name} has taken more than log.hang_after = {limit:g} s; the stacks of all threads are above; the '
        'same command goes on from the last checkpoint',
        HUNG,
    )
