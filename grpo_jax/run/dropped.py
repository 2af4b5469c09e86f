"""What is written for looking and not for keeping: a full disk drops it, and the run goes on."""

from collections import Counter
from collections.abc import Iterator
import contextlib
import logging
import os

from grpo_jax.hosts import files
from grpo_jax.run import events

logger = logging.getLogger('grpo_jax')


class Dropped:
    """Counts what could not be written, by kind; a kind is a folder or a file of the workdir."""

    def __init__(self, workdir: str):
        self._workdir = workdir
        self.counts: Counter[str] = Counter()

    @contextlib.contextmanager
    def unless_written(self, step: int, kind: str) -> Iterator[None]:
        """A context in which something of a step is written; when the disk refuses it, it is counted and recorded.

        The first of a kind is a warning, each is an event.
        """
        try:
            yield
        except Exception as error:
            cause = files.disk_error(error)
            if cause is None:
                raise
            self.counts[kind] += 1
            reason = cause.strerror or str(cause)
            if self.counts[kind] == 1:
                path = os.path.join(self._workdir, kind)
                logger.warning('cannot write %s: %s; the run goes on without, and counts what it drops', path, reason)
            with contextlib.suppress(OSError):  # the same disk, at times
                events.append(self._workdir, step, 'dropped', kind=kind, reason=reason)

    def summary(self) -> str:
        """How many of each kind; '' for none."""
        return ', '.join(f'{count} of {kind}' for kind, count in sorted(self.counts.items()))
