"""What the rewards of a run share until the run ends: threads, processes, jails, reward models, an event loop."""

import asyncio
from collections.abc import Coroutine
import concurrent.futures
import threading
from typing import Any
import weakref

from grpo_jax.workers import Pool, Sandbox

LEAVE_SECONDS = 5  # for coroutines to end in, when the event loop closes


class EventLoop:
    """An asyncio event loop on its own thread, which starts at the first submit.

    The thread ends with close, or when the EventLoop is garbage-collected.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._loop: Any = None
        self._thread: Any = None

    def submit(self, coroutine: Coroutine) -> concurrent.futures.Future:
        """Starts a coroutine on the loop, and returns the future of the coroutine's result."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run_loop, args=[self._loop], name='rewards', daemon=True)
                self._thread.start()
                weakref.finalize(self, _stop_loop, self._loop)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self):
        """Cancels running coroutines and ends the thread; a later submit starts both anew.

        A coroutine that blocks the thread is left behind after LEAVE_SECONDS.
        """
        with self._lock:
            if self._loop is not None:
                _stop_loop(self._loop)
                self._thread.join(LEAVE_SECONDS)
                self._loop = None


def _run_loop(loop):
    """Runs an event loop until it is stopped, then cancels its tasks and closes it."""
    loop.run_forever()
    loop.run_until_complete(_cancel_others())
    loop.close()


async def _cancel_others():
    """Cancels all tasks of the loop but this one, and waits for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _stop_loop(loop):
    """Stops an event loop from another thread, unless it is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


class Services(dict):
    """The clients of services, {name of a part: its remote.Client}; the function remote.client adds them."""

    stores = True  # whether clients write verdicts to a file; else they keep them in memory


class Resources:
    """Threads, processes and models that a run's rewards share; each starts when first needed and ends with close."""

    def __init__(self, *, workers: int, deadline: float, memory_gib: float):
        """workers: judging threads, and the most worker processes; deadline: seconds that a call in a process may take;
        memory_gib: GiB of memory of a process. Nothing starts yet.
        """
        self.threads = concurrent.futures.ThreadPoolExecutor(workers, 'reward')
        self.pool = Pool(workers, deadline=deadline, memory_gib=memory_gib)
        self.sandbox = Sandbox()
        self.models = {}  # reward models by where they come from, see rewards.model.load
        self.services = Services()
        self.event_loop = EventLoop()

    def close(self, wait: bool = True):
        """Ends threads, processes and the event loop, and frees the models; rewards in the queue are cancelled.

        wait: whether to wait for rewards that are running on threads.
        """
        self.threads.shutdown(wait=wait, cancel_futures=True)
        self.event_loop.close()
        self.pool.close()
        self.sandbox.close()
        self.models.clear()
        self.services.clear()
