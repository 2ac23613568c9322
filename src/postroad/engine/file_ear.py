"""Hearing of commits to a SQLite file: by looking at it, more often than anybody would notice.

A look costs little, but an idle process that wakes up forty times a second uses more of a core for that than for all
else. So where nothing was committed for a moment, the kernel is asked to tell of the next write, if it can. Its word
is a hint to look at once. Looks go on beside it, and one that finds a commit of which the kernel has told nothing, as
where another kernel has written to the same disk, ends the trust in it.
"""

import os
import socket
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing

from postroad.engine.ears import Deaf, Unsuited
from postroad.engine.file_watch import FileWatch, watched
from postroad.engine.telemetry import logger
from postroad.engine.wakeups import TOPICS, Topic
from postroad.model.clock import Clock
from postroad.model.errors import DatabaseReplaced
from postroad.store.database import Database
from postroad.store.sqlite_file import identity

CHANGES_EVERY_SECONDS = 0.015
# After a second without a commit, where nobody tells: a wake-up of the processor is what a look costs most.
QUIET_EVERY_SECONDS = 0.025
QUIET_LOOKS = 66
# Where the kernel tells, as soon as nothing is fresh; a look then is there to find out that it doesn't.
WATCHED_EVERY_SECONDS = 0.25
TOLD_AGAIN_SECONDS = 0.004  # it tells when a commit begins
TOLD_LATE_SECONDS = 0.005
# The time of a write is no finer than the kernel's tick, and a commit ends when the disk has it, some time later.
FRESH_LOOKS = 8


class FileEar:
    """Watches the file's counter of commits by others, on a connection of its own.

    What this process writes counts as well: the loops' own connection is another one.
    """

    def __init__(self, database: Database, heard: Callable[..., None], closing: threading.Event, clock: Clock) -> None:
        self._engine = database.engine
        self._heard = heard
        self._closing = closing
        self._ending, self._ended = socket.socketpair()

    def tell(self, topics: frozenset[Topic]) -> None:
        """Nothing to do: the commit itself has changed the file."""

    def stop(self) -> None:
        self._ending.close()  # which can be read at the other end

    def close(self) -> None:
        self._ending.close()
        self._ended.close()

    def serve(self) -> None:
        with closing(self._connect()) as connection:
            path = connection.execute("PRAGMA database_list").fetchone()[2]
            opened, looks = identity(path), _Looks(connection, path + "-wal")
            looks.changed(told=True)  # from now on there is a log to be watched
            self._heard(frozenset(TOPICS))
            with closing(_Rests(watched(path + "-wal", self._ended.fileno()), self._closing)) as rests:
                while not self._closing.is_set():
                    told = rests.rest(looks.quiet)
                    if identity(path) != opened:
                        raise DatabaseReplaced(path, path=path)
                    if looks.changed(told=told, surely=rests.long):
                        rests.found(new=looks.quiet < 0)
                        self._heard(frozenset(TOPICS))

    def _connect(self) -> sqlite3.Connection:
        path = self._engine.url.database or ""
        if path and not path.startswith("file:") and not os.path.exists(path):
            raise Deaf(f"{path} is missing.")  # connecting would create it
        borrowed = self._engine.pool.recreate().connect()
        connection = borrowed.driver_connection
        if not isinstance(connection, sqlite3.Connection):
            borrowed.invalidate()
            raise Unsuited("This engine's SQLite library is another one than this process's.")
        borrowed.detach()
        return connection


class _Looks:
    """Sees whether others have committed since the last look."""

    def __init__(self, connection: sqlite3.Connection, log: str) -> None:
        self._connection = connection
        self._log = log
        self._written: object = ()
        self._counted: int | None = None
        self._fresh = 0

    @property
    def quiet(self) -> int:
        """How many looks there were since the last at what was fresh; below 0: it still is, the log was written to."""
        return -self._fresh

    def changed(self, *, told: bool, surely: bool = False) -> bool:
        """Whether they have; `told`: the log is said to be written to; `surely`: ask whatever it looks like."""
        # A commit writes to the log beside the file: where that is as it was, asking costs more than it tells.
        written, before = _last_write(self._log), self._written
        self._written = written
        self._fresh = FRESH_LOOKS if told or written != before else self._fresh - 1
        if self._fresh <= 0 and not surely:
            return False
        # fetchall ends the statement: a read left open would hold back checkpoints.
        [(count,)] = self._connection.execute("PRAGMA data_version").fetchall()
        counted, self._counted = self._counted, count
        return bool(count != counted)


class _Rests:
    """Waits from one look to the next: shortly, or as long as the kernel, in which we trust, tells of nothing."""

    def __init__(self, watch: FileWatch | None, closing: threading.Event) -> None:
        self._watch = watch
        self._closing = closing
        self._told = False
        self.long = False
        """Whether the last one was a wait for the kernel's word."""

    def rest(self, quiet: int) -> bool:
        """Wait, after so many looks at a log that was as it had been; whether it is said to be written to."""
        before, self._told = self._told, False
        self.long = self._watch is not None and quiet > 0
        if self._watch is not None and quiet > 0:
            self._told = self._watch.wait(WATCHED_EVERY_SECONDS)
        elif before:
            self._closing.wait(TOLD_AGAIN_SECONDS)
        else:
            if self._watch is not None and quiet == 0:
                self._watch.forget()  # there is another look before we wait for what is told now
            self._closing.wait(QUIET_EVERY_SECONDS if quiet > QUIET_LOOKS else CHANGES_EVERY_SECONDS)
        return self._told

    def found(self, *, new: bool) -> None:
        """A look has found a commit, with a `new` write: what the kernel does not tell of even now it never will."""
        silent = self.long and new and not self._told
        if self._watch is not None and silent and not self._watch.wait(TOLD_LATE_SECONDS):
            logger.info("listener: the kernel does not tell of writes to this file; looking oftener")
            self.close()

    def close(self) -> None:
        """Ask the kernel no more."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()


def _last_write(path: str) -> tuple[int, int, int] | None:
    """When the log beside a SQLite file was written last, how long it is, and which file; None: there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
