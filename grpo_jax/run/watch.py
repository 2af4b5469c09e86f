"""What may end a loop before its last step: SIGTERM, and a step that hangs."""

import faulthandler
import os
import signal
import sys
import threading

HUNG = 43  # exit status


class Watch:
    """A context around a loop. The first SIGTERM only sets `stopping`; a step longer than `limit` ends the process.

    limit is in seconds, 0: none. step(name) begins a step.
    """

    def __init__(self, limit):
        self.stopping = False
        self._limit, self._timer, self._before = limit, None, None

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # no other may set a handler
            self._before = signal.signal(signal.SIGTERM, self._terminated)
        return self

    def __exit__(self, *_):
        self._disarm()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

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

    def _terminated(self, *_):
        self.stopping = True
        signal.signal(signal.SIGTERM, self._before)  # a second one ends the process at once
        print('SIGTERM: stopping after this step, with a checkpoint', file=sys.stderr, flush=True)


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
