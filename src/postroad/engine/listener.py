"""Wake-ups from and for other processes. Losing all of it costs latency only: the loops poll.

On Postgres a connection of its own LISTENs, and carries what this process announces to the others; a query never
waits for long, since a connection that is half open answers nothing and breaks nothing. On SQLite the file is watched.
"""

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from postroad.engine.ears import Deaf, Ear, Unsuited
from postroad.engine.file_ear import FileEar
from postroad.engine.telemetry import logger
from postroad.engine.wakeups import TOPICS, Topic, Wakeups
from postroad.model.clock import SECOND, Clock, SystemClock
from postroad.model.retry import Retry
from postroad.store import dialects
from postroad.store.database import Database

if TYPE_CHECKING:
    from psycopg import Connection as Psycopg
    from psycopg.pq.abc import PGresult

COALESCE = SECOND // 200
PROBE_EVERY = 5 * SECOND
PROBE_WAIT = 5 * SECOND
ANSWER_WAIT = 5 * SECOND
CLOSE_SECONDS = 5
AGAIN = Retry(attempts=1, first=0.2, cap=15, jitter=False)
PROBE = "probe"


class Listener:
    """Listens from a daemon thread, and begins again, ever more slowly, whenever that fails."""

    def __init__(self, database: Database, wakeups: Wakeups, *, clock: Clock | None = None) -> None:
        self._database = database
        self._wakeups = wakeups
        self._clock = clock or SystemClock()
        self._closing = threading.Event()
        self._failures = 0
        self._end: Callable[[], None] | None = None

    def start(self) -> None:
        """Listen from now on."""
        if self._end is not None:
            return
        build = FileEar if self._database.is_sqlite else PostgresEar
        ear = build(self._database, self._heard, self._closing, self._clock)
        thread = threading.Thread(target=self._run, args=(ear,), name="postroad-listener", daemon=True)
        end_relay = self._wakeups.relay(ear.tell)

        def end() -> None:
            end_relay()
            ear.stop()
            thread.join(timeout=CLOSE_SECONDS)

        self._end = end
        thread.start()

    def close(self) -> None:
        """Stop listening; what was announced before is told first, if the database can be reached."""
        self._closing.set()
        if self._end is not None:
            self._end()
            self._end = None

    def _heard(self, topics: frozenset[Topic], *, sound: bool = True) -> None:
        """Something was heard; `sound`: by a connection that has shown that it works."""
        if sound:
            self._wakeups.hearing = True
        if sound and self._failures:
            logger.info("listener: listening again after %d failures", self._failures)
            self._failures = 0
        self._wakeups.ping(topics)

    def _run(self, ear: Ear) -> None:
        try:
            self._serve(ear)
        finally:
            self._wakeups.hearing = False
            ear.close()

    def _serve(self, ear: Ear) -> None:
        while not self._closing.is_set():
            try:
                ear.serve()
            except Unsuited as error:
                logger.info("listener: %s Other processes' work is found by polling.", error)
                return
            except Exception as error:
                self._wakeups.hearing = False
                self._failures += 1
                if self._failures == 1:
                    logger.warning("listener: %s (polling goes on; trying again)", str(error).strip())
                self._closing.wait(AGAIN.delay(self._failures, 1.0) / SECOND)


class PostgresEar:
    """LISTEN and NOTIFY on one connection, which is never inside a transaction.

    The connection is made as the engine makes its own, but is not one of the pool's. From time to time it
    notifies itself: a connection that does not bring that back is replaced.
    """

    def __init__(self, database: Database, heard: Callable[..., None], closing: threading.Event, clock: Clock) -> None:
        self._database = database
        self._heard = heard
        self._closing = closing
        self._clock = clock
        self._channel = dialects.channel(database.schema)
        self._lock = threading.Lock()
        self._untold: set[Topic] = set()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)

    def tell(self, topics: frozenset[Topic]) -> None:
        with self._lock:
            fresh = not topics <= self._untold
            self._untold |= topics
        if fresh:
            self._wake()

    def stop(self) -> None:
        self._wake()

    def close(self) -> None:
        self._waker.close()
        self._woken.close()

    def serve(self) -> None:
        with closing(self._connect()) as connection, Line(connection, self._woken, self._clock) as line:
            mine = int(line.ask("SELECT pg_backend_pid()"))
            line.ask(f"LISTEN {self._channel}")
            self._heard(frozenset(TOPICS), sound=False)
            self._listen(line, mine)
            if self._untold:
                self._pass_on(line)

    def _listen(self, line: "Line", mine: int) -> None:
        probe_due, probed, told = self._clock.monotonic(), None, 0
        while not self._closing.is_set():
            now = self._clock.monotonic()
            if probed is not None and now - probed > PROBE_WAIT:
                raise Deaf("No notification came back in time; a pooler in transaction mode?")
            if probed is None and now >= probe_due:
                line.ask(f"NOTIFY {self._channel}, '{PROBE}'")
                probed, probe_due = now, now + PROBE_EVERY
            if self._untold and now - told >= COALESCE:
                self._pass_on(line)
                told = now
            line.wait(self._pause(probe_due if probed is None else probed + PROBE_WAIT, told))
            if self._take_in(line, mine):
                probed = None

    def _pause(self, probe: int, told: int) -> int:
        """How long nothing but a notification or an announcement matters."""
        until = min(probe, told + COALESCE) if self._untold else probe
        return max(0, until - self._clock.monotonic())

    def _take_in(self, line: "Line", mine: int) -> bool:
        """Pass on what others said; whether our own probe was among it."""
        topics: set[Topic] = set()
        probed = False
        for sender, said in line.heard():
            if sender != mine:
                topics |= topics_of(said)
            elif said == PROBE:
                probed = True
        if topics or probed:
            self._heard(frozenset(topics))
        return probed

    def _pass_on(self, line: "Line") -> None:
        with self._lock:
            topics, self._untold = self._untold, set()
        try:
            line.ask(f"NOTIFY {self._channel}, '{','.join(sorted(topics))}'")
        except BaseException:
            self.tell(frozenset(topics))
            raise

    def _wake(self) -> None:
        try:
            self._waker.send(b"!")
        except OSError:
            return  # full of wake-ups that were not looked at yet, or closed: nobody listens any more

    def _connect(self) -> "Psycopg[Any]":
        from psycopg import Connection

        # The pool's own way to connect, with the user's hooks and arguments, but beside the pool: a connection
        # that is taken for good must not be missing from it.
        borrowed = self._database.engine.pool.recreate().connect()
        connection = borrowed.driver_connection
        if not isinstance(connection, Connection):
            borrowed.invalidate()
            raise Unsuited("Listening needs psycopg 3.")
        borrowed.detach()
        connection.rollback()
        connection.autocommit = True
        return connection


class Line:
    """A psycopg connection whose every wait is bounded and can be woken."""

    def __init__(self, connection: "Psycopg[Any]", woken: socket.socket, clock: Clock) -> None:
        self._pg = connection.pgconn
        self._pg.nonblocking = 1
        self._woken = woken
        self._clock = clock
        self._said: deque[tuple[int, str]] = deque()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pg.socket, selectors.EVENT_READ)
        self._waking = self._selector.register(woken, selectors.EVENT_READ)

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()

    def wait(self, length: int) -> None:
        """Wait for a notification, for something to read, for a wake-up, or `length` microseconds."""
        if self._said:
            return
        ready = self._selector.select(length / SECOND)
        if any(key is self._waking for key, _ in ready):
            self._woken.recv(4096)

    def heard(self) -> Iterator[tuple[int, str]]:
        """The notifications that have come: the sender's process in the server and what it said."""
        self._take_in()
        while self._said:
            yield self._said.popleft()

    def _take_in(self) -> None:
        self._pg.consume_input()
        while (found := self._pg.notifies()) is not None:
            self._said.append((found.be_pid, found.extra.decode("utf-8", "replace")))

    def ask(self, sql: str) -> str:
        """Run one statement; the first value of its answer, or ''. Notifications wait for `heard`.

        Raises:
            Deaf: There was no answer in time.
        """
        until = self._clock.monotonic() + ANSWER_WAIT
        self._pg.send_query(sql.encode())
        said = ""
        while True:
            self._pg.flush()
            self._take_in()
            if not self._pg.is_busy():
                result = self._pg.get_result()
                if result is None:
                    return said
                said = _value(result)
                continue
            left = until - self._clock.monotonic()
            if left <= 0:
                raise Deaf("The database does not answer.")
            # Not `wait`: a wake-up that comes meanwhile must still be there afterwards.
            with _reading(self._pg.socket) as selector:
                selector.select(left / SECOND)


def topics_of(said: str) -> frozenset[Topic]:
    """The topics of a notification; all of them where it says something that we don't know."""
    names = said.split(",")
    if names == [PROBE]:
        return frozenset()
    known = frozenset(topic for topic in TOPICS if topic in names)
    return known if len(known) == len(names) else frozenset(TOPICS)


def _value(result: "PGresult") -> str:
    from psycopg.pq import ExecStatus

    if result.status not in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
        raise Deaf(result.get_error_message())
    value = result.get_value(0, 0) if result.ntuples else None
    return "" if value is None else value.decode()


@contextmanager
def _reading(descriptor: int) -> Iterator[selectors.DefaultSelector]:
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        yield selector
