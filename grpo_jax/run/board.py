"""Curves for TensorBoard: event files that are written at once, by no thread and through no queue.

tensorboardX hands its events to a thread, whose death on a full disk blocks the run when the queue is full.
"""

from collections.abc import Mapping
import importlib
import os
import socket
import struct
import time
from typing import Any

from grpo_jax.hosts.files import append_whole

FLUSH_SECONDS = 120  # between two uploads, where the folder is on a mounted bucket


class Board:
    """A new event file in a folder; on resume TensorBoard leaves out what older ones have from first_step on."""

    def __init__(self, folder: str, first_step: int):
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

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a step, by name. OSError when that cannot be; the file has none of it."""
        from tensorboardX import summary

        self._write(step, [summary.scalar(name, value) for name, value in values.items()])

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text of a step. OSError when that cannot be; the file has none of it."""
        from tensorboardX import summary

        self._write(step, [summary.text(name, text)])

    def _write(self, step, summaries):
        events = self._begin + [self._event(step=step, summary=summary) for summary in summaries]
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

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._file is not None:
            self._file.close()


def _record(event):
    """The bytes of an event in a TFRecord file: length, its checksum, content, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    event.wall_time = time.time()
    content = event.SerializeToString()
    length = struct.pack('<Q', len(content))
    return length + struct.pack('<I', masked_crc32c(length)) + content + struct.pack('<I', masked_crc32c(content))
