"""A journal of JSON lines, on the disk before anything else happens."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journal:
    """Appends lines; each is synced before `append` returns. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def append(self, line: Line) -> None:
        """Write a line and wait until the disk has it."""
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


class Follower:
    """Reads a journal that another process writes, from where it last stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[Line]:
        """The lines that are whole and new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._offset += len(raw)
                yield json.loads(raw)
