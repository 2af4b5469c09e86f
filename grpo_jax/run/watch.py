"""What may end a loop before its last step: SIGTERM, Ctrl-C, and a step that hangs."""

import faulthandler
import os
import signal
import sys
import threading

from grpo_jax.errors import INTERRUPTED, TERMINATED
from grpo_jax.run.console import console

HUNG = 43  # exit status
STATUS = {signal.SIGTERM: TERMINATED, signal.SIGINT: INTERRUPTED}
NAMES = {signal.SIGTERM: 'SIGTERM', signal.SIGINT: 'Ctrl-C'}


class Watch:
    """A context around a loop. The first SIGTERM or Ctrl-C only sets `stopping`; the second acts as it does elsewhere.

    A step longer than `limit` seconds (0: none) ends the process. step(name) begins a step.
    """

    def __init__(self, limit):
        self.stopping = 0  # the exit status of who asked
        self._limit, self._timer, self._before = limit, None, {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # no other may set a handler
            for number in STATUS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and background jobs have it
                    self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_):
        self._disarm()
        self._restore()

    def step(self, name):
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
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was none of Python's
        self._before = {}

    def _asked(self, number, _):
        self.stopping = STATUS[number]
        self._restore()
        text = f'{NAMES[number]}: stopping after this step, with a checkpoint; once more stops at once'
        # on another thread: this one may be in the middle of printing
        threading.Thread(target=console.print, args=[text]).start()


def _hang(name, limit):
    """Says where every thread is, and ends the process."""
    faulthandler.dump_traceback(all_threads=True)
    print(
        f'error: {name} has taken more than log.hang_after = {limit:g} s; the stacks of all threads are above; the '
        'same command goes on from the last checkpoint',
        file=sys.stderr,
        flush=True,
    )
    os._exit(HUNG)
