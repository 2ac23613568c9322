"""Two transactions that are stopped before each of their statements and go on in an order that a test gives.

Each has a thread and a connection of its own, so a wait for a lock is a real one: the server says who is blocked
by whom (`pg_blocking_pids`), and nothing goes on by the passing of time.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from sqlalchemy import Connection, event
from sqlalchemy.engine import URL

from postroad.store.database import Database

LOOK_SECONDS = 0.003  # a statement that has not come back after this long may wait for a lock: then the server is asked
PATIENCE = 10_000  # looks at a statement that neither comes back nor waits for the other
OPTIONS = "-c deadlock_timeout=20ms -c synchronous_commit=off"
Work = Callable[[Connection], Any]
_current = threading.local()


class Crash(Exception):
    """Ends a transaction before its COMMIT, as the death of its process does."""


class Stuck(AssertionError):
    """A statement neither ends nor waits for the other transaction."""


class Actor:
    """One transaction, in a thread of its own."""

    def __init__(self, database: Database, work: Work, *, crashes: bool = False) -> None:
        self.answer: Any = None
        self.done = False
        self.blocked = False
        self.pid = 0
        self._go = threading.Semaphore(0)
        self._moved = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(database, work, crashes))
        self._thread.start()
        self._moved.acquire()

    def _run(self, database: Database, work: Work, crashes: bool) -> None:
        _current.actor = self
        try:
            with database.engine.connect() as conn, conn.begin():
                raw: Any = conn.connection.dbapi_connection
                self.pid = raw.info.backend_pid
                self._pause()
                self.answer = work(database.bind(conn))
                if crashes:
                    raise Crash
        except Exception as error:
            self.answer = error
        self.done = True
        self._moved.release()

    def _pause(self) -> None:
        self._moved.release()
        self._go.acquire()

    def pause(self) -> None:
        """Wait until a test says to go on. In the actor's own thread."""
        self._pause()

    def step(self, is_blocked: Callable[[int], bool]) -> None:
        """Carry out the next statement, until the one after it, the end, or a wait for the other's lock."""
        if not self.blocked:
            self._go.release()
        for _ in range(PATIENCE):
            if self._moved.acquire(timeout=LOOK_SECONDS):
                self.blocked = False
                return
            if is_blocked(self.pid):
                self.blocked = True
                return
        raise Stuck(self.pid)

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()


class Race:
    """Runs pairs of transactions over one database."""

    def __init__(self, database: Database, monitor: "psycopg.Connection[Any]") -> None:
        self.database = database
        self._monitor = monitor
        self.waits = 0

    def run(self, works: tuple[Work, Work], order: Iterable[int], *, crash: bool = False) -> tuple[list[Any], int]:
        """Play the two in this order of 0 and 1, then the first to its end, then the second.

        Whoever cannot go on gives way to the other. The answers, an exception for what was refused, and how many
        steps of the order there were until one of them had ended. `crash`: the first does not commit.
        """
        actors = [Actor(self.database, work, crashes=crash and place == 0) for place, work in enumerate(works)]
        steps = 0
        for place in order:
            if actors[0].done or actors[1].done:
                break
            steps += 1
            self._step(actors, place)
        while not (actors[0].done and actors[1].done):
            self._step(actors, 0)
        for actor in actors:
            actor.join()
        return [actor.answer for actor in actors], steps

    def _step(self, actors: list[Actor], place: int) -> None:
        chosen, other = actors[place], actors[1 - place]
        if chosen.done or (chosen.blocked and not other.blocked and not other.done):
            chosen, other = other, chosen
        chosen.step(self._is_blocked)
        self.waits += chosen.blocked
        if other.blocked:
            other.step(self._is_blocked)  # the lock that it waits for may be free now

    def _is_blocked(self, pid: int) -> bool:
        row = self._monitor.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", (pid,)).fetchone()
        return bool(row and row[0])


@contextmanager
def racing(url: URL, schema: str) -> Iterator[Race]:
    """A race track: connections that find deadlocks fast, stopped before each statement and each COMMIT."""
    database = Database(url.update_query_dict({"options": OPTIONS}), schema=schema)
    monitor = psycopg.connect(url.set(drivername="postgresql").render_as_string(False), autocommit=True)
    event.listen(database.engine, "before_cursor_execute", _before_statement)
    event.listen(database.engine, "commit", _before_commit)
    yield Race(database, monitor)
    monitor.close()
    database.close()


def _before_statement(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
    actor = getattr(_current, "actor", None)
    if actor is not None and not statement.startswith("SELECT set_config"):
        actor.pause()


def _before_commit(_conn: Any) -> None:
    actor = getattr(_current, "actor", None)
    if actor is not None:
        actor.pause()
