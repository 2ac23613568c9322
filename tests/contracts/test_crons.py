"""The timers of crons in the database: looked after by many at once, armed once, never while their event waits."""

from functools import partial

import pytest
from sqlalchemy import Connection

from postroad.engine.schedules import cron_of
from postroad.model import crons as rules
from postroad.model.clock import SECOND, FakeClock
from postroad.model.crons import TIMER, Cron, Fire, Standing
from postroad.model.errors import TimerConflict
from postroad.model.rows import TimerChange
from postroad.store import crons, inbox, timers
from postroad.store.database import Database
from postroad.store.statements import Statement
from tests.contracts.test_timers import Interleaved, beside, on_postgres

__all__ = ["beside"]
STREAM = "cron:report/runs"
HOUR = 3_600
CONSUMED = Statement("DELETE FROM {p}inbox WHERE stream = :stream")


def cron(spec: str = "0 * * * *") -> Cron:
    return cron_of("report", spec, "UTC", "once")


def decide(declared: Cron, since: int, standing: Standing, now: int) -> TimerChange | Fire | None:
    return rules.kept(declared, standing, since=since, now=now)


def keep(database: Database, declared: Cron, *, since: int = 0) -> TimerChange | Fire | None:
    """What a process that started so many seconds after the first does about the timer."""
    return database.transact(crons.keep, STREAM, partial(decide, declared, since * SECOND))


def timer(database: Database) -> timers.TimerRow:
    (found,) = database.read(timers.list_, stream=STREAM)
    return found


def waiting(database: Database) -> int:
    return database.read(inbox.waiting, STREAM)


def test_it_is_armed_once_and_then_left_alone(database: Database, clock: FakeClock) -> None:
    """The first that looks arms it, for the next hour; the others find it as it should be."""
    assert isinstance(keep(database, cron()), TimerChange)
    assert keep(database, cron()) is None
    assert keep(database, cron(), since=5) is None
    found = timer(database)
    assert (found.status, found.generation) == ("armed", 0)
    assert found.fire_at == clock.wall() + HOUR * SECOND


def test_what_fired_is_left_alone_as_long_as_its_event_waits(database: Database, clock: FakeClock) -> None:
    """Neither a new schedule nor a long wait arms it beside its event; without the event it is armed again."""
    keep(database, cron())
    clock.advance(HOUR)
    assert database.transact(timers.fire, limit=10).count == 1
    assert keep(database, cron("30 * * * *"), since=9) is None
    clock.advance(24 * HOUR)
    assert keep(database, cron("30 * * * *"), since=9) is None
    assert (timer(database).status, waiting(database)) == ("fired", 1)
    database.transact(lambda conn, now: CONSUMED(conn, stream=STREAM))
    assert isinstance(keep(database, cron()), TimerChange)
    assert (timer(database).status, timer(database).generation) == ("armed", 1)


def test_a_later_generation_knows_its_own_event(database: Database, clock: FakeClock) -> None:
    """After it was armed again, the event that it waits for is that of its generation."""
    keep(database, cron())
    keep(database, cron("30 * * * *"), since=1)
    clock.advance(HOUR)
    database.transact(timers.fire, limit=10)
    assert timer(database).generation == 1
    assert keep(database, cron(), since=2) is None
    assert waiting(database) == 1


def test_a_confirmation_changes_nothing_but_its_time(database: Database, clock: FakeClock) -> None:
    """Once a minute the payload is written anew; what is armed, and how often it was, stays."""
    keep(database, cron())
    before = timer(database)
    clock.advance(60)
    assert isinstance(keep(database, cron()), Fire)
    after = timer(database)
    assert (after.fire_at, after.generation, after.status) == (before.fire_at, before.generation, "armed")
    fire = rules.read(after.data)
    assert fire is not None
    assert fire.declared.confirmed == clock.wall()


@on_postgres
def test_a_new_schedule_that_waits_for_the_pump(beside: Interleaved, clock: FakeClock) -> None:
    """It sees that the timer has fired meanwhile, and leaves it to the turn: none is armed beside the event."""
    database = beside.database
    keep(database, cron())
    with database.engine.begin() as conn:
        due = clock.wall() + HOUR * SECOND  # the pump's clock is ahead of the other's
        assert timers.fire(database.bind(conn), limit=10, now=due).count == 1
        changed = beside.start(crons.keep, STREAM, partial(decide, cron("30 * * * *"), 9 * SECOND))
        conn.commit()
    assert changed.result() is None
    assert (timer(database).status, waiting(database)) == ("fired", 1)


@on_postgres
def test_a_look_that_waits_for_a_turns_commit(beside: Interleaved, clock: FakeClock) -> None:
    """It sees the timer that the turn has armed, not one that was lost."""
    database = beside.database
    keep(database, cron())
    clock.advance(HOUR)
    database.transact(timers.fire, limit=10)
    with database.engine.begin() as conn:
        CONSUMED(database.bind(conn), stream=STREAM)
        fire = rules.armed(
            cron().schedule,
            "report",
            cron().declared(since=0, now=clock.wall()),
            clock.wall() + HOUR * SECOND,
            last=None,
        )
        timers.apply(database.bind(conn), [rules.change(STREAM, fire)], now=clock.wall())
        look = beside.start(crons.keep, STREAM, partial(decide, cron(), 0))
        conn.commit()
    assert look.result() is None
    assert (timer(database).status, timer(database).generation) == ("armed", 1)


@on_postgres
def test_two_that_arm_it_for_the_first_time(beside: Interleaved, clock: FakeClock) -> None:
    """The second waits for the first, is refused, and has changed nothing."""
    database = beside.database

    def first(conn: Connection) -> None:
        decided = partial(decide, cron(), 0)
        assert isinstance(crons.keep(database.bind(conn), STREAM, decided, now=clock.wall()), TimerChange)

    with database.engine.begin() as conn:
        first(conn)
        second = beside.start(crons.keep, STREAM, partial(decide, cron("30 * * * *"), SECOND))
        conn.commit()
    with pytest.raises(TimerConflict):
        second.result()
    assert (timer(database).key, timer(database).generation) == (TIMER, 0)
    assert timer(database).fire_at == clock.wall() + HOUR * SECOND
    assert isinstance(keep(database, cron("30 * * * *"), since=1), TimerChange), "the next look puts it right"
