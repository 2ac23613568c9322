"""How a process tells the director what happens in it: lines of JSON over a socket.

What was written to the socket reaches the director even if the writer is killed a moment later.
"""

import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from postroad.model.errors import CommitUnknown
from postroad.store.dialects import is_away
from postroad.testing.chaos import faults
from postroad.testing.chaos.sizes import LIFE, SOCKET

ORPHANED = 70
_TOLD = frozenset({"dispatch.sending", "dispatch.settled", "loop.error", "turn.error"})


class Reporter:
    """Tells what happens, from any thread. A process whose director is gone ends itself."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def open(self) -> None:
        """Connect, and say who this is."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SOCKET])
        self.tell("hello")
        threading.Thread(target=self._watch, args=(self._socket,), name="chaos-orphan", daemon=True).start()

    def tell(self, what: str, **values: object) -> None:
        """Tell one thing."""
        assert self._socket is not None
        line = msgspec.json.encode({"what": what, "life": os.environ[LIFE], **values}) + b"\n"
        with self._lock:
            self._socket.sendall(line)

    def saw(self, name: str, values: Mapping[str, Any]) -> None:
        """Take in what the product's telemetry says."""
        if name in _TOLD and self._socket is not None:
            self.tell(name, **{**_plain(values), "at": faults.now()})

    @staticmethod
    def _watch(link: socket.socket) -> None:
        link.recv(1)  # the director never says anything: this is its end
        os._exit(ORPHANED)


def _plain(values: Mapping[str, Any]) -> dict[str, object]:
    said: dict[str, object] = {name: value for name, value in values.items() if isinstance(value, str | int)}
    error = values.get("error")
    if isinstance(error, BaseException):
        said["error"] = f"{type(error).__name__}: {error}"[:500]
        said["explained"] = explained(error)
    return said


def explained(error: BaseException) -> bool:
    """Whether a loop or a turn may fail with this when databases crash: it was away, or its answer was lost."""
    return isinstance(error, CommitUnknown) or (isinstance(error, Exception) and is_away(error))
