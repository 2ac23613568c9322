"""Prepared statements on Postgres: where they are made, and that nothing is lost or wrong where a session changes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model.clock import FakeClock
from postroad.store import dialects, outbox, preparing
from postroad.store.database import Database
from postroad.store.executor import Inline
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import dispatch

ROUNDS = preparing.PREPARED_AFTER + 2
DISPATCHES = Statement("SELECT count(*) FROM {p}outbox")
PREPARED = "SELECT statement FROM pg_prepared_statements"


@pytest.fixture
def opened(request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[Callable[[], Database]]:
    """Opens a database on Postgres that says all it has to say on one connection."""
    url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("migrated_schema")
    made: list[Database] = []

    def opens() -> Database:
        made.append(Database(url, schema=schema, clock=clock, executor=Inline()))
        return made[-1]

    yield opens
    for each in made:
        each.close()


def enqueue(conn: Connection, number: int, *, now: int) -> None:
    outbox.insert(conn, [dispatch(number)], source="test", actor="", in_turn=False, now=now)


def fill(database: Database, first: int = 0) -> None:
    """The same transaction more often than a statement is said before it is prepared."""
    for number in range(first, first + ROUNDS):
        database.transact(enqueue, number)


def prepared(database: Database) -> list[str]:
    return database.transact(lambda conn, *, now: list(conn.exec_driver_sql(PREPARED).scalars()))


def count(conn: Connection, **_: Any) -> Any:
    return DISPATCHES(conn).scalar_one()


def test_what_is_written_again_and_again_is_prepared(opened: Callable[[], Database]) -> None:
    """A session of our own parses and plans each statement of our transactions once."""
    database = opened()
    fill(database)
    assert sum("INTO" in sql and "postroad_outbox" in sql for sql in prepared(database)) == 1


def test_what_only_reads_is_not_prepared(opened: Callable[[], Database]) -> None:
    """Reads are planned by what the planner knows of the tables at that time."""
    database = opened()
    for _ in range(ROUNDS):
        assert database.read(count) == 0
    assert not [sql for sql in prepared(database) if "count" in sql]


def test_a_read_forgets_nothing(opened: Callable[[], Database]) -> None:
    """What is prepared stays so when the connection has read in between."""
    database = opened()
    fill(database)
    before = prepared(database)
    database.read(count)
    assert [sql for sql in before if sql not in prepared(database)] == []


def test_nothing_is_prepared_behind_a_pooler(opened: Callable[[], Database], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody else carries out what is said than the connection was told, sessions may change at any time."""
    monkeypatch.setattr(preparing, "_backend", lambda raw: raw.info.backend_pid + 1)
    database = opened()
    fill(database)
    assert prepared(database) == []
    assert database.read(count) == ROUNDS


def test_a_session_that_has_forgotten_is_not_heard_of(opened: Callable[[], Database]) -> None:
    """Another session than that in which something was prepared carries it out all the same, and prepares no more."""
    database = opened()
    fill(database)
    forget = "DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$"  # as a pooler would, of which the driver hears nothing
    database.transact(lambda conn, *, now: conn.exec_driver_sql(forget))
    fill(database, first=ROUNDS)
    assert database.read(count) == 2 * ROUNDS
    assert prepared(database) == []


def test_a_table_that_has_changed_is_not_heard_of(opened: Callable[[], Database]) -> None:
    """What was prepared before a table changed is prepared anew, as in a rolling update."""
    database, other = opened(), opened()
    fill(database)
    change = f'ALTER TABLE "{database.schema}".postroad_outbox ALTER COLUMN id TYPE varchar(64)'
    other.transact(lambda conn, *, now: conn.exec_driver_sql(change))
    fill(database, first=ROUNDS)
    assert database.read(count) == 2 * ROUNDS
    assert prepared(database)


@pytest.mark.parametrize("session", ["ours", "a pooler's", "another one"])
def test_the_planner_is_set_for_what_is_said(
    opened: Callable[[], Database], monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    """Our transactions that write have plans by indexes only; reads and the user's code those that the server makes."""
    if session == "a pooler's":
        monkeypatch.setattr(preparing, "_backend", lambda raw: None)
    database = opened()
    fill(database)
    if session == "another one":
        forget = "DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; EXECUTE 'RESET enable_seqscan'; END $$"
        database.transact(lambda conn, *, now: conn.exec_driver_sql(forget))
        fill(database, first=ROUNDS)

    def planner(conn: Connection) -> str:
        return str(conn.exec_driver_sql("SHOW enable_seqscan").scalar_one())

    def seen(conn: Connection, *, now: int) -> list[str]:
        before = planner(conn)
        with dialects.users_plans(conn):
            users = planner(conn)
        return [before, users, planner(conn)]

    for _ in range(2):
        assert database.transact(seen) == ["off", "on", "off"]
        assert database.read(planner) == "on"


def test_a_refused_transaction_prepares_anew(opened: Callable[[], Database]) -> None:
    """After a transaction that was rolled back the next ones are carried out as before."""
    database = opened()
    fill(database)

    def fails(conn: Connection, *, now: int) -> None:
        enqueue(conn, 1_000, now=now)
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        database.transact(fails)
    fill(database, first=ROUNDS)
    assert database.read(count) == 2 * ROUNDS
