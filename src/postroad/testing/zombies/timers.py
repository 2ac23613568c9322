"""Zombies among the pumps: a timer that was selected fires once, whoever else comes meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
from sqlalchemy import Connection

from postroad.model import failpoints
from postroad.model.clock import FakeClock
from postroad.model.ids import timer_event_id
from postroad.model.rows import TimerChange
from postroad.store import timers
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.store.timers import TimerStore
from postroad.testing.contracts.dispatches import Waiting, another, in_threads
from postroad.testing.zombies.traces import over

STREAM, KEY = "load/1", "t1"
VERBS = ("rearm", "cancel")
EVENTS = [timer_event_id(KEY, generation) for generation in range(2)]
_RANG = Statement("SELECT event_id FROM {p}inbox ORDER BY position")


def rang(conn: Connection) -> list[str]:
    """The ids of the events that timers have published, in order."""
    return list(_RANG(conn).scalars())


def change(verb: Any, fire_at: int) -> list[TimerChange]:
    """A change of the suite's timer."""
    return [TimerChange(verb=verb, stream=STREAM, key=KEY, fire_at=fire_at)]


@contextmanager
def at_failpoint(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Have `act` called when the failpoint is reached for the first time, in the middle of a transaction."""
    left = [act]

    def reached(place: str) -> None:
        if place == name and left:
            left.pop()()

    failpoints.arm(reached)
    try:
        yield
    finally:
        failpoints.arm(None)
    assert not left, f"{name} was never reached"


class TimerZombies:
    """A pump that sleeps between its look at what is due and the end of its transaction.

    The store must reach the failpoint `timers.due` when it has selected what is due.
    """

    timers: ClassVar[TimerStore] = timers

    @pytest.fixture
    def other(self, database: Database, clock: FakeClock) -> Iterator[Database]:
        """The database as another process has it."""
        opened = another(database, clock)
        yield opened
        opened.close()

    def test_a_pump_that_another_has_overtaken(self, database: Database, other: Database, clock: FakeClock) -> None:
        """Of two pumps that look at the same due timer one fires it, once."""
        database.transact(self.timers.apply, change("set", clock.wall()))
        call = partial(other.transact, self.timers.fire, limit=10)
        waiting: list[Waiting] = []
        counts: list[int] = []

        def overtake() -> None:
            if database.is_sqlite:  # it waits for this transaction
                waiting.append(Waiting(database, call))
                waiting[0].blocked()
            else:
                counts.extend(fired.count for fired in in_threads(call))

        with at_failpoint("timers.due", overtake):
            counts.append(database.transact(self.timers.fire, limit=10).count)
        counts.extend(late.result().count for late in waiting)
        assert sorted(counts) == [0, 1]
        assert database.read(rang) == EVENTS[:1]
        assert [row.status for row in database.read(self.timers.list_, stream=STREAM)] == ["fired"]

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_change_that_a_pump_overtakes(
        self, database: Database, other: Database, clock: FakeClock, verb: str
    ) -> None:
        """A change that waits for a pump finds the timer fired: only to arm it again makes it due another time."""
        database.transact(self.timers.apply, change("set", clock.wall()))
        waiting: list[Waiting] = []

        def begin() -> None:
            asked = change(verb, clock.wall() + 1)
            waiting.append(Waiting(database, partial(other.transact, self.timers.apply, asked)))
            waiting[0].blocked()

        with at_failpoint("timers.due", begin):
            assert database.transact(self.timers.fire, limit=10).count == 1
        waiting[0].result()
        clock.advance(1)
        again = int(verb == "rearm")
        assert database.transact(self.timers.fire, limit=10).count == again
        assert database.read(rang) == EVENTS[: 1 + again]

    @pytest.mark.parametrize("verb", VERBS)
    def test_a_pump_that_a_change_overtakes(
        self, database: Database, other: Database, clock: FakeClock, verb: str
    ) -> None:
        """What is armed again or cancelled does not fire as it was: a pump that comes meanwhile leaves it alone."""
        database.transact(self.timers.apply, change("set", clock.wall()))
        call = partial(other.transact, self.timers.fire, limit=10)
        with database.engine.connect() as conn, conn.begin() as transaction:
            over(database.bind(conn), clock)(self.timers.apply, change(verb, clock.wall() + 1))
            late: Any = call
            if database.is_sqlite:  # it waits for this transaction
                waiting = Waiting(database, call)
                waiting.blocked()
                late = waiting.result
            else:
                assert call().count == 0
            transaction.commit()
        assert late().count == 0
        assert database.read(rang) == []
