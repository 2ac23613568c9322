"""Commit → send by hand: the statements of the limit, and the fastest bell that each database has beside it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg

from benchmarks import limit_postgres, work
from benchmarks.limit_sqlite import SQLiteLimit
from benchmarks.places import Place

CLAIMED_AT_ONCE = 10
LOOK_SECONDS = 0.1  # how often a loop that hears nothing looks whether it is to end

SEND = """
WITH sent AS (
    INSERT INTO postroad_outbox
        (id, key, stream, kind, version, destination, body, headers, policy, status, attempt, epoch, due_at,
         content_hash, origin, created_at, updated_at)
    VALUES (%(id)s, %(key)s, '', %(mail)s, 1, 'driver', %(body)s, '{}', 'event', 'pending', 0, 0, %(now)s, %(hash)s,
        '{}', %(now)s, %(now)s)),
recorded AS (
    INSERT INTO postroad_transitions
        (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
    VALUES (%(id)s, NULL, 'pending', 'dispatch.pending.enqueued', 'enqueued kind=' || %(mail)s, 'app', 'begin', '[]',
        '{}', %(now)s))
SELECT pg_notify('bell', '')
"""


@contextmanager
def _thread(target: Callable[[threading.Event, threading.Event], None]) -> Iterator[None]:
    """Run `target(ready, over)` in a thread until the block is left."""
    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=target, args=(ready, over), name="by-hand", daemon=True)
    thread.start()
    while not ready.wait(LOOK_SECONDS):
        if not thread.is_alive():
            raise RuntimeError("the loop by hand could not begin")
    try:
        yield
    finally:
        over.set()
        thread.join()


class PostgresByHand:
    """NOTIFY in the statement that writes the rows; one connection that listens, claims and settles."""

    def __init__(self, url: str, schema: str | None) -> None:
        self._url, self._schema = url, schema
        self._conn = limit_postgres.connect(url, schema)
        self._arrivals: dict[str, int] = {}

    @contextmanager
    def receiving(self) -> Iterator[dict[str, int]]:
        """A loop in a thread of its own."""
        with _thread(self._listen):
            yield self._arrivals

    def send(self, key: str) -> None:
        """One statement, which is a transaction."""
        body = work.text(work.mail(key))
        self._conn.execute(
            SEND,
            {"id": work.token(), "key": key, "mail": work.MAIL, "body": body, "hash": work.content_hash(body),
             "now": work.now()},
        )  # fmt: skip

    def close(self) -> None:
        """Close the connection."""
        self._conn.close()

    def _listen(self, ready: threading.Event, over: threading.Event) -> None:
        with limit_postgres.connect(self._url, self._schema) as conn:
            conn.execute("LISTEN bell")
            ready.set()
            while not over.is_set():
                for _ in conn.notifies(timeout=LOOK_SECONDS, stop_after=1):
                    pass
                self._carry_out(conn.cursor())

    def _carry_out(self, cursor: "psycopg.Cursor[tuple[object, ...]]") -> None:
        while True:
            token, claimed = limit_postgres.start_sends(cursor, CLAIMED_AT_ONCE)
            if not claimed:
                return
            for row in claimed:
                self._arrivals[row[1]] = time.monotonic_ns()
            limit_postgres.settle_sends(cursor, token, claimed)


class SQLiteByHand:
    """A datagram to the receiver's socket after each commit."""

    def __init__(self, url: str, schema: str | None) -> None:
        self._place = Place(url, schema)
        self._limit = SQLiteLimit(self._place)
        self._bell = Path(self._place.path).with_suffix(".bell")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._arrivals: dict[str, int] = {}

    @contextmanager
    def receiving(self) -> Iterator[dict[str, int]]:
        """A loop in a thread of its own."""
        try:
            with _thread(self._listen):
                yield self._arrivals
        finally:
            self._bell.unlink()

    def send(self, key: str) -> None:
        """One transaction, then a datagram."""
        self._limit.send(key)
        self._socket.sendto(b"!", str(self._bell))

    def close(self) -> None:
        """Close the connection and the socket."""
        self._socket.close()
        self._limit.close()
        self._place.close()

    def _listen(self, ready: threading.Event, over: threading.Event) -> None:
        with closing(SQLiteLimit(self._place)) as limit, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
            ear.bind(str(self._bell))
            ear.settimeout(LOOK_SECONDS)
            ready.set()
            while not over.is_set():
                try:
                    ear.recv(1)
                except TimeoutError:
                    continue
                self._carry_out(limit)

    def _carry_out(self, limit: SQLiteLimit) -> None:
        token, claimed = limit.start_sends(CLAIMED_AT_ONCE)
        for row in claimed:
            self._arrivals[row[1]] = time.monotonic_ns()
        if claimed:
            limit.settle_sends(token, claimed)
