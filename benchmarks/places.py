"""Databases to measure on: a SQLite file in WAL with synchronous=FULL, a schema of an embedded Postgres."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal

from sqlalchemy import Connection, make_url

from benchmarks import work
from postroad.demo.embedded import passing_postgres
from postroad.model.rows import NewDispatch, NewEvent, TimerChange
from postroad.store import inbox, migrations, outbox, schema, timers
from postroad.store.database import Database
from postroad.store.executor import Inline

Kind = Literal["sqlite", "postgres"]
SEEDED_AT_ONCE = 2_000


class Place:
    """A database with Postroad's tables, for one of the two sides."""

    def __init__(self, url: str, pg_schema: str | None) -> None:
        self.url = url
        self.schema = pg_schema
        self.database = Database(url, schema=pg_schema, executor=Inline())
        prefix = f'"{pg_schema}".' if pg_schema else ""
        self._tables = [prefix + table.name for table in schema.metadata.sorted_tables]
        migrations.migrate(self.database)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a SQLite file."""
        return self.database.is_sqlite

    @property
    def path(self) -> str:
        """The SQLite file."""
        path = make_url(self.url).database
        assert path is not None
        return path

    def clear(self) -> None:
        """Remove every row, and what the removal leaves behind in the log of the database."""
        self.database.transact(_clear, self._tables)
        if self.is_sqlite:
            with self.database.engine.connect() as conn:
                raw = conn.connection.dbapi_connection
                assert raw is not None
                raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def seed_events(self, count: int) -> None:
        """One event for each of `count` streams, all in one transaction."""
        events = [
            NewEvent(stream=work.stream(n), event_id=f"e{n}", kind=work.EVENT, data=work.text(work.event(n)))
            for n in range(count)
        ]
        self.database.transact(_publish, events)

    def seed_dispatches(self, count: int, streams: int) -> None:
        """Due dispatches, shared out among the streams, all in one transaction."""
        due = work.now()
        self.database.transact(_insert, [_dispatch(n, streams, due) for n in range(count)])

    def seed_timers(self, count: int, streams: int) -> None:
        """Due timers, shared out among the streams, all in one transaction."""
        due = work.now()
        self.database.transact(_set_timers, [_timer(n, streams, due) for n in range(count)])

    def rows(self) -> Mapping[str, int]:
        """How many rows each table has that has any."""
        return self.database.read(_count, self._tables)

    def close(self) -> None:
        """Close our own connections."""
        self.database.close()


def _clear(conn: Connection, tables: Sequence[str], *, now: int) -> None:
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql(f"TRUNCATE {', '.join(tables)} RESTART IDENTITY")
        return
    for table in tables:
        conn.exec_driver_sql(f"DELETE FROM {table}")


def _publish(conn: Connection, events: list[NewEvent], *, now: int) -> None:
    for start in range(0, len(events), SEEDED_AT_ONCE):
        inbox.publish(conn, events[start : start + SEEDED_AT_ONCE], now=now)


def _insert(conn: Connection, rows: list[NewDispatch], *, now: int) -> None:
    for start in range(0, len(rows), SEEDED_AT_ONCE):
        part = rows[start : start + SEEDED_AT_ONCE]
        outbox.insert(conn, part, source="bench", actor="bench", in_turn=False, now=now)


def _set_timers(conn: Connection, changes: list[TimerChange], *, now: int) -> None:
    for start in range(0, len(changes), SEEDED_AT_ONCE):
        timers.apply(conn, changes[start : start + SEEDED_AT_ONCE], now=now)


def _timer(number: int, streams: int, due: int) -> TimerChange:
    return TimerChange(
        verb="set",
        stream=work.stream(number % streams),
        key=f"t{number}",
        fire_at=due,
        data=work.text(work.event(number)),
        spec="after 0",
    )


def _dispatch(number: int, streams: int, due: int) -> NewDispatch:
    body = work.text(work.mail(f"{number:06}"))
    return NewDispatch(
        id=work.token(),
        key=f"d{number}",
        stream=work.stream(number % streams),
        kind=work.MAIL,
        destination="driver",
        body=body,
        due_at=due,
        content_hash=work.content_hash(work.MAIL, body),
    )


def _count(conn: Connection, tables: Sequence[str]) -> dict[str, int]:
    counts = {t: conn.exec_driver_sql(f"SELECT count(*) FROM {t}").scalar_one() for t in tables}
    return {table.rpartition(".")[2]: count for table, count in counts.items() if count}


@contextmanager
def sqlite_places() -> Iterator[tuple[Place, Place]]:
    """Two files in a temporary directory."""
    folder = Path(tempfile.mkdtemp(prefix="postroad-bench-"))
    try:
        with _both(
            Place(f"sqlite:///{folder / 'ours.db'}", None), Place(f"sqlite:///{folder / 'limit.db'}", None)
        ) as both:
            yield both
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres_places() -> Iterator[tuple[Place, Place]]:
    """Two schemas of one server, which is started for this and listens on a Unix socket."""
    with passing_postgres() as url, _both(Place(url, "ours"), Place(url, "hand")) as both:
        yield both


@contextmanager
def _both(ours: Place, limit: Place) -> Iterator[tuple[Place, Place]]:
    try:
        yield ours, limit
    finally:
        ours.close()
        limit.close()


def places(kind: Kind) -> AbstractContextManager[tuple[Place, Place]]:
    """A place for ours and one for the limit, on the same kind of database."""
    return sqlite_places() if kind == "sqlite" else postgres_places()
