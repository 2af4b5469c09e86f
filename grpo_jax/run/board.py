"""TensorBoard: event files that are written at once, by no thread and through no queue.

tensorboardX hands its events to a thread, whose death on a full disk blocks the run when the queue is full.
"""

from collections.abc import Mapping, Sequence
import importlib
import os
import socket
import struct
import time
from typing import Any

import numpy as np

from grpo_jax.hosts.files import append_whole
from grpo_jax.text import cut

FLUSH_SECONDS = 120  # between two uploads, where the folder is on a mounted bucket
SAMPLES, LONGEST = 4, 2000  # completions of a step that are shown as text, and characters of one
# what the page of hyperparameters compares
COMPARED = ('reward', 'length', 'evaluation/reward', 'evaluation/greedy', 'evaluation/pass_at_1')


class Board:
    """A new event file in a folder; on resume TensorBoard leaves out what older ones have from first_step on."""

    def __init__(self, folder: str, first_step: int, config: Mapping[str, Any] | None = None):
        """config: the hyperparameters, as nested dicts."""
        # a second, where torch is installed
        event_pb2: Any = importlib.import_module('tensorboardX.proto.event_pb2')
        self._event, log = event_pb2.Event, event_pb2.SessionLog
        name = f'events.out.tfevents.{time.time():.6f}.{socket.gethostname()}'  # the names sort by time
        self._path, self._file = os.path.join(folder, name), None
        self._flushed = time.monotonic()
        self._begin = [
            self._event(file_version='brain.Event:2'),
            self._event(step=first_step, session_log=log(status=log.START)),
        ]
        if config is not None:
            from tensorboardX import summary

            parts = summary.hparams(dict(_flat(config)), dict.fromkeys(COMPARED, 0.0))
            self._begin += [self._event(summary=part) for part in parts]

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step, by name. OSError when that cannot be; the file has none of it."""
        from tensorboardX import summary

        self._write(step, [summary.scalar(name, value) for name, value in values.items()])

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text of a step, its lines cut and inert. OSError when that cannot be; the file has none of it."""
        from tensorboardX import summary

        # a block of code, in which neither Markdown nor HTML means anything
        lines = [f'    {cut(line, LONGEST)}' for line in text.split('\n')]
        self._write(step, [summary.text(name, '\n'.join(lines))])

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes histograms of rewards, lengths and advantages of a rollout's rows, and some of its completions."""
        from tensorboardX import summary

        summaries = []
        for name in ('reward', 'length', 'advantage'):
            values = [np.ravel(row[name]) for row in rows if row.get(name) is not None]
            known = np.concatenate([*values, []]).astype(float)
            known = known[np.isfinite(known)]
            if len(known):
                summaries.append(summary.histogram(f'rollout/{name}', known, bins=30))
        self._write(step, summaries)
        shown = [
            cut(f'{_number(row.get("reward"))}  {row["prompt"]} -> {row["completion"]}', LONGEST)
            for row in rows[:SAMPLES]
        ]
        self.text(step, 'rollout/completions', '\n'.join(shown))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()

    def _write(self, step, summaries):
        events = [*self._begin, *(self._event(step=step, summary=one) for one in summaries)]
        if self._file is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._file = open(self._path, 'ab', buffering=0)
        size = os.fstat(self._file.fileno()).st_size
        try:
            append_whole(self._file, b''.join(map(_record, events)))
        except OSError:
            self._file.truncate(size)  # half a record would end the file for those who read it
            raise
        self._begin = []
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            os.fsync(self._file.fileno())
            self._flushed = time.monotonic()
        os.stat(self._path)  # a file that was removed takes what is written, and loses it


def _flat(tree, prefix=''):
    """(dotted name, number or text) of the leaves of nested dicts."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f'{prefix}{name}.')
        else:
            yield prefix + name, value if isinstance(value, (bool, int, float, str)) else repr(value)


def _number(value):
    return '?' if value is None else f'{value:.3g}'


def _record(event):
    """The bytes of an event in a TFRecord file: length, its checksum, content, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    event.wall_time = time.time()
    content = event.SerializeToString()
    length = struct.pack('<Q', len(content))
    return length + struct.pack('<I', masked_crc32c(length)) + content + struct.pack('<I', masked_crc32c(content))
