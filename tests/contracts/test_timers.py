"""Timers: the contract on both databases, and what happens at the same time."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Connection, text

from postroad.model.clock import SECOND, FakeClock
from postroad.model.dispatches import Alert
from postroad.model.errors import TimerConflict
from postroad.model.rows import NewEvent, TimerChange
from postroad.store import alerts, inbox, timers
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.store.timers import FiredTimers, TimerStore
from postroad.testing.contracts.timers import STREAM, TimerContract, changes, events

Run = Callable[..., Any]
DELETE = Statement("INSERT INTO {p}streams (id, type, version, deleted_at) VALUES (:stream, 'load', 0, :now)")


class TestTimers(TimerContract):
    """The timers of the decisions' own database."""


def test_the_module_is_a_timer_store() -> None:
    """A type checker holds the module against the protocol; here it only must not break."""
    store: TimerStore = timers
    assert store is timers


def test_a_deleted_stream_s_timers_end(run: Run, clock: FakeClock) -> None:
    """They are cancelled with one alert, the others fire, and the next pass finds nothing."""
    run(timers.apply, changes(clock, ("set", "a"), ("set", "b")))
    run(timers.apply, [TimerChange(verb="set", stream="load/2", key="c", fire_at=clock.wall())])
    run(DELETE, stream=STREAM, now=clock.wall())
    clock.advance(60)
    assert run(timers.fire, limit=10) == FiredTimers(1, 60 * SECOND, dropped=2)
    assert [event.stream for event in run(events)] == ["load/2"]
    assert {row.status for row in run(timers.list_, stream=STREAM)} == {"cancelled"}
    [(_, alert)] = run(alerts.unrung)
    assert (alert.severity, alert.code, alert.subject) == ("warning", "timer.refused", STREAM)
    assert alert.detail.startswith("2 due timers")
    assert run(timers.fire, limit=10) == FiredTimers(0, 0)


def test_a_stream_deleted_meanwhile(run: Run, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion that the inbox sees first ends that stream's timers alone."""
    monkeypatch.setattr(timers, "_DELETED", Statement("SELECT id FROM {p}streams WHERE :streams = ''"))
    run(timers.apply, changes(clock, ("set", "a"), ("set", "b")))
    run(timers.apply, [TimerChange(verb="set", stream="load/2", key="c", fire_at=clock.wall())])
    run(DELETE, stream=STREAM, now=clock.wall())
    clock.advance(60)
    assert run(timers.fire, limit=10) == FiredTimers(1, 60 * SECOND, dropped=2)
    assert [event.stream for event in run(events)] == ["load/2"]


def test_an_event_s_id_that_is_taken_ends_the_timer(run: Run, clock: FakeClock) -> None:
    """A timer whose event came before with other content does not hold up its neighbours for ever."""
    run(inbox.publish, [NewEvent(stream=STREAM, event_id="evt:a", kind="other", data="{}")])
    run(timers.apply, changes(clock, ("set", "a"), ("set", "b")))
    clock.advance(60)
    assert run(timers.fire, limit=10) == FiredTimers(1, 0, dropped=1)
    assert {row.key: row.status for row in run(timers.list_, stream=STREAM)} == {
        "a": "cancelled",
        "b": "fired",
    }
    found: list[tuple[int, Alert]] = run(alerts.unrung)
    assert len(found) == 1


def test_a_set_that_meets_others_for_ever_is_refused(
    run: Run, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded: a key that others make and remove each time is a conflict in the end; nothing is written."""
    monkeypatch.setattr(timers, "_FIND", Statement("SELECT * FROM {p}timers WHERE :keys = ''"))
    run(timers.apply, changes(clock, ("set", "a")))
    with pytest.raises(TimerConflict):
        run(timers.apply, changes(clock, ("set", "a"), ("set", "b")))
    assert [row.key for row in run(timers.list_, stream=STREAM)] == ["a"]


@pytest.fixture
def databases(database: Database) -> Iterator[tuple[Database, Database]]:
    """The database, opened twice: two processes, as far as the database can tell."""
    other = Database(database.engine.url, schema=database.schema, clock=database.clock)
    yield database, other
    other.close()


def test_cancel_against_fire(databases: tuple[Database, Database], clock: FakeClock) -> None:
    """200 times at once: either it fired and its event is there, or it was cancelled and none is."""
    one, other = databases
    start = threading.Barrier(2)

    def fire() -> FiredTimers:
        start.wait()
        return one.transact(timers.fire, limit=10)

    def cancel(key: str) -> None:
        start.wait()
        other.transact(timers.apply, changes(clock, ("cancel", key)))

    with ThreadPoolExecutor(2) as pool:
        for n in range(200):
            one.transact(timers.apply, changes(clock, ("set", f"t{n}"), after=0))
            fired, _ = pool.submit(fire), pool.submit(cancel, f"t{n}").result()
            fired.result()
    one.transact(timers.fire, limit=200)
    ended = {row.key: row.status for row in one.read(timers.list_, stream=STREAM, limit=200)}
    published = {event.event_id.removeprefix("evt:") for event in one.read(events)}
    assert len(ended) == 200
    assert published == {key for key, status in ended.items() if status == "fired"}
    assert set(ended.values()) <= {"fired", "cancelled"}


def test_two_pumps_share_the_work(databases: tuple[Database, Database], clock: FakeClock) -> None:
    """Both fire at once until nothing is due: each timer once."""
    one, other = databases
    one.transact(timers.apply, changes(clock, *(("set", f"t{n:03}") for n in range(200)), after=0))

    def pump(database: Database) -> int:
        fired, total = -1, 0
        while fired:
            fired = database.transact(timers.fire, limit=7).count
            total += fired
        return total

    with ThreadPoolExecutor(2) as pool:
        totals = list(pool.map(pump, databases))
    # A pump that found the rest locked by the other one has stopped before the end.
    assert sum(totals) == 200
    assert len(one.read(events)) == 200
    assert other.read(timers.next_due) is None


class Interleaved:
    """A second transaction that runs beside the test's open one, on Postgres."""

    def __init__(self, database: Database, pool: ThreadPoolExecutor) -> None:
        self.database = database
        self._pool = pool

    def start(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Begin it in a thread; wait until the database says that it waits for a lock."""
        pid: list[int] = []

        def announced(conn: Connection, *, now: int) -> Any:
            pid.append(conn.execute(text("SELECT pg_backend_pid()")).scalar_one())
            return fn(conn, *args, now=now, **kwargs)

        future = self._pool.submit(self.database.transact, announced)
        blocked = False
        with self.database.engine.connect() as conn:
            while not blocked and not future.done():
                asked = text("SELECT cardinality(pg_blocking_pids(:pid)) > 0")
                blocked = bool(pid) and bool(conn.execute(asked, {"pid": pid[0]}).scalar_one())
        assert blocked, "it went through without waiting"
        return future


on_postgres = pytest.mark.parametrize("database", ["postgres"], indirect=True)  # SQLite has one writer


@pytest.fixture
def beside(database: Database) -> Iterator[Interleaved]:
    """Runs transactions beside the test's own."""
    with ThreadPoolExecutor(1) as pool:
        yield Interleaved(database, pool)


@on_postgres
def test_a_cancel_that_waits_for_the_pump(beside: Interleaved, clock: FakeClock) -> None:
    """It sees that the timer fired, and changes nothing."""
    database = beside.database
    database.transact(timers.apply, changes(clock, ("set", "a"), after=0))
    with database.engine.begin() as conn:
        assert timers.fire(database.bind(conn), limit=10, now=clock.wall()).count == 1
        cancel = beside.start(timers.apply, changes(clock, ("cancel", "a")))
        conn.commit()
    cancel.result()
    assert [row.status for row in database.read(timers.list_, stream=STREAM)] == ["fired"]


@on_postgres
def test_a_pump_does_not_wait_for_a_cancel(database: Database, clock: FakeClock) -> None:
    """It leaves the locked timer out; once the cancel has committed it never fires."""
    database.transact(timers.apply, changes(clock, ("set", "a"), ("set", "b"), after=0))
    with database.engine.begin() as conn:
        timers.apply(database.bind(conn), changes(clock, ("cancel", "a")), now=clock.wall())
        assert database.transact(timers.fire, limit=10).count == 1
    assert database.transact(timers.fire, limit=10).count == 0
    assert [event.event_id for event in database.read(events)] == ["evt:b"]


@on_postgres
@pytest.mark.parametrize("end", ["the same", "other", "rolled back", "rearm"])
def test_two_set_one_new_key(beside: Interleaved, clock: FakeClock, end: str) -> None:
    """The second waits: the same content is a no-op, other a conflict, a rollback leaves the key free."""
    database = beside.database
    second = [("set", "a0"), ("rearm" if end == "rearm" else "set", "a"), ("rearm", "z")]
    with database.engine.connect() as conn:
        timers.apply(database.bind(conn), changes(clock, ("set", "a")), now=clock.wall())
        other = beside.start(timers.apply, changes(clock, *second, after=61 if end == "other" else 60))
        conn.rollback() if end == "rolled back" else conn.commit()
    if end == "other":
        with pytest.raises(TimerConflict):
            other.result()
    else:
        other.result()
    found = {row.key: row.generation for row in database.read(timers.list_, stream=STREAM)}
    expected = {"a": 1 if end == "rearm" else 0, "a0": 0, "z": 0}
    assert found == ({"a": 0} if end == "other" else expected)
