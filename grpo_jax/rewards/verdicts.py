"""A file with services' verdicts by the hash of the request. Runs may share it, so each verdict is paid for once.

Each line is a JSON object with its key. Of several records with one key the first counts, so all runs read the same.
"""

import fcntl
import json
import os
import threading
from typing import Any

from grpo_jax.hosts import files

BLOCK = 1 << 24  # bytes of the file that are read at once


class Store:
    """Records by key in a file of lines; threads and processes may use it at once, and may be killed at any moment.

    A line that a killed process left unfinished is passed over. Records are kept in memory until the file's folder
    exists, and always in a Store that does not write. Of records in the file, memory holds only the places, since
    answers may be long.
    """

    def __init__(self, path: str, writes: bool = True):
        """path: of the file, which need not exist yet; writes: whether records are written to it."""
        self.path, self._writes, self._lock = path, writes, threading.Lock()
        self._places: dict[str, int] = {}  # key -> the record's first byte in the file
        self._waiting: dict[str, dict] = {}  # key -> a record that no file has yet
        self._indexed = 0  # bytes of the file that are in _places
        self._cost = 0.0

    @property
    def count(self) -> int:
        """The number of records: in the file when it was last read, and in memory alone."""
        return len(self._places) + len(self._waiting)

    @property
    def cost(self) -> float:
        """The sum of the costs of all records that `count` counts."""
        return self._cost + sum(record.get('cost', 0.0) for record in self._waiting.values())

    def get(self, key: str) -> dict[str, Any] | None:
        """The record of a key; None where neither this Store nor another process has put one."""
        with self._lock:
            self._index()
            return self._read(key)

    def put(self, key: str, record: dict[str, Any]) -> dict[str, Any]:
        """Adds a record, which survives a kill, unless the key has one; returns the key's. Raises CannotWrite."""
        with self._lock:
            self._waiting.setdefault(key, record)
            if not self._writes or not os.path.isdir(os.path.dirname(self.path)):
                return self._waiting[key]
            with files.writing(self.path), open(self.path, 'ab', buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # closing the file, or a kill, frees the lock
                self._index()
                # first ends the line that a killed process has left unfinished
                lines = [''] if os.fstat(file.fileno()).st_size > self._indexed else []
                new = {name: value for name, value in self._waiting.items() if name not in self._places}
                lines += [json.dumps({'key': name} | value) for name, value in new.items()]
                files.append_whole(file, ''.join(f'{line}\n' for line in lines).encode())
                self._index()
            self._waiting.clear()
            return self._read(key) or record

    def _read(self, key):
        """The record of a key from memory or from the file as it was last indexed; None without one."""
        if key in self._waiting or key not in self._places:
            return self._waiting.get(key)
        with open(self.path, 'rb') as file:
            file.seek(self._places[key])
            return json.loads(file.readline())

    def _index(self):
        """Notes the places of records that were appended since the last call; begins anew where the file is shorter."""
        size = os.path.getsize(self.path) if os.path.isfile(self.path) else 0
        if size < self._indexed:
            self._places, self._indexed, self._cost = {}, 0, 0.0
        while self._indexed < size:
            with open(self.path, 'rb') as file:
                file.seek(self._indexed)
                block = file.read(min(BLOCK, size - self._indexed))
            whole = block[: block.rfind(b'\n') + 1]
            if not whole:
                return  # a line that is being written, or was never finished
            for line in whole.splitlines(keepends=True):
                try:
                    record = json.loads(line)
                    key, cost = record['key'], float(record.get('cost', 0.0))
                except (ValueError, TypeError, KeyError):
                    key, cost = None, 0.0
                if isinstance(key, str) and key not in self._places:
                    self._places[key] = self._indexed
                    self._cost += cost
                self._indexed += len(line)
