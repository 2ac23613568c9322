"""Folds over a stream's log, with the last state kept in memory: thrown away at will, never wrong."""

import threading
from collections import OrderedDict
from typing import Any, TypeVar

from postroad.model.folds import Fold
from postroad.store import log
from postroad.store.database import Database

S = TypeVar("S")
PAGE = 1_000
STATES_MAX = 4_096


class Folding:
    """Computes folds from where the last one ended. A state is kept with the version of the log it stands for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._states: OrderedDict[tuple[str, str, int], tuple[int, Any]] = OrderedDict()

    def at(self, stream: str, fold: Fold[S], version: int) -> S:
        """The fold's state over the entries 1 … `version` of a stream."""
        key = (stream, fold.name, fold.version)
        with self._lock:
            kept: tuple[int, S] | None = self._states.get(key)
        seq, state = (0, fold.start()) if kept is None or kept[0] > version else kept
        while seq < version:
            entries = self._database.read(log.read, stream, after=seq, limit=min(PAGE, version - seq))
            if not entries:
                break
            state = fold.over(entries, state)
            seq = entries[-1].seq
        self._keep(key, seq, state)
        return state

    def _keep(self, key: tuple[str, str, int], seq: int, state: Any) -> None:
        if seq == 0:
            return
        with self._lock:
            self._states[key] = (seq, state)
            self._states.move_to_end(key)
            while len(self._states) > STATES_MAX:
                self._states.popitem(last=False)
