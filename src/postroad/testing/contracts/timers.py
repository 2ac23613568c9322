"""What every timer store must do, for those who bring their own.

Subclass `TimerContract`, override the fixture `store`, and give the fixtures `run` (runs `fn(conn, *args,
now=..., **kwargs)` in a transaction that is committed) and `clock` (a FakeClock, the source of that `now`).
The suite is about one transaction after another: what it cannot catch is a store that fires and cancels at
the same time, loses a timer when its process dies, or is slow with many. Its expectations are written by hand.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from postroad.model import failpoints
from postroad.model.clock import SECOND, FakeClock
from postroad.model.errors import TimerConflict
from postroad.model.events import TIMER_FIRED_NAME
from postroad.model.rows import TimerChange
from postroad.store import timers
from postroad.store.statements import Statement
from postroad.store.timers import FiredTimers, TimerStore

STREAM = "load/481207"
KEY = "tmr:481207:A:1"
Run = Callable[..., Any]

_EVENTS = Statement("SELECT stream, event_id, kind, data, received_at FROM {p}inbox ORDER BY position")


class Fired(msgspec.Struct, frozen=True, kw_only=True):
    """An event that a timer published."""

    stream: str
    event_id: str
    kind: str
    data: str
    received_at: int


def events(conn: Connection) -> list[Fired]:
    """Everything in the inbox, oldest first."""
    return [Fired(**row) for row in _EVENTS(conn).mappings()]


class TimerContract:
    """The contract; see the module."""

    @pytest.fixture
    def store(self) -> TimerStore:
        """The store under test."""
        return timers

    @pytest.fixture
    def timer(self, run: Run, store: TimerStore, clock: FakeClock) -> Callable[..., None]:
        """Makes one change: `timer("set", KEY, 60)` is due in a minute."""

        def change(verb: Any, key: str = KEY, after: float = 60, stream: str = STREAM, **more: Any) -> None:
            fire_at = clock.wall() + round(after * SECOND)
            given = {"fire_at": fire_at, "spec": f"after {after}", **more}
            run(store.apply, [TimerChange(verb=verb, stream=stream, key=key, **given)])

        return change

    @pytest.fixture
    def pump(self, run: Run, store: TimerStore) -> Callable[..., FiredTimers]:
        """Fires what is due."""

        def fire(limit: int = 100) -> FiredTimers:
            fired: FiredTimers = run(store.fire, limit=limit)
            return fired

        return fire

    @pytest.fixture
    def published(self, run: Run) -> Callable[[], list[str]]:
        """The ids of all events, oldest first."""
        return lambda: [event.event_id for event in run(events)]

    @pytest.fixture
    def status(self, run: Run, store: TimerStore) -> Callable[[], dict[str, str]]:
        """The status of each timer of the stream."""
        return lambda: {row.key: row.status for row in run(store.list_, stream=STREAM)}

    @pytest.fixture
    def disarm(self) -> Iterator[None]:
        """Leaves no failpoint armed behind."""
        yield
        failpoints.arm(None)

    def test_a_timer_fires_when_it_is_due(self, timer: Any, pump: Any, run: Run, clock: FakeClock) -> None:
        """Not a microsecond early; then its event is in the stream's inbox with its data."""
        timer("set", data='{"ask":"A"}')
        clock.advance_to(clock.wall() + 60 * SECOND - 1)
        assert pump() == FiredTimers(0, 0)
        clock.advance_to(clock.wall() + 1)
        assert pump() == FiredTimers(1, 0)
        [event] = run(events)
        assert (event.stream, event.event_id) == (STREAM, "evt:tmr:481207:A:1")
        assert (event.kind, event.data) == (TIMER_FIRED_NAME, '{"ask":"A"}')
        assert event.received_at == clock.wall()

    def test_a_timer_fires_once(self, timer: Any, pump: Any, published: Any, clock: FakeClock) -> None:
        """However often the pump looks."""
        timer("set")
        clock.advance(60)
        assert [pump().count for _ in range(3)] == [1, 0, 0]
        assert published() == ["evt:tmr:481207:A:1"]

    def test_a_timer_without_data_has_an_empty_object(self, timer: Any, pump: Any, run: Run, clock: FakeClock) -> None:
        """Whoever reads the event always finds JSON."""
        timer("set")
        clock.advance(60)
        pump()
        assert [event.data for event in run(events)] == ["{}"]

    def test_setting_the_same_again_changes_nothing(
        self, timer: Any, pump: Any, run: Run, store: TimerStore, clock: FakeClock
    ) -> None:
        """A retry, later and with its JSON written otherwise, keeps the first time."""
        timer("set", data='{"a": 1, "b": 2.0}', spec="after 60")
        [first] = run(store.list_, stream=STREAM)
        clock.advance(10)
        timer("set", data='{"b":2,"a":1}', spec="after 60")
        assert run(store.list_, stream=STREAM) == [first]

    @pytest.mark.parametrize("other", [{"data": "1"}, {"spec": "after 61"}], ids=["data", "time"])
    def test_setting_other_content_is_refused(
        self, timer: Any, run: Run, store: TimerStore, other: dict[str, Any]
    ) -> None:
        """An armed timer with other data or another time is named; it stays as it was."""
        timer("set")
        before = run(store.list_, stream=STREAM)
        with pytest.raises(TimerConflict) as caught:
            timer("set", **other)
        assert caught.value.key == KEY
        assert run(store.list_, stream=STREAM) == before

    def test_setting_what_has_fired_is_refused(self, timer: Any, pump: Any, clock: FakeClock) -> None:
        """The same content too: its event is out."""
        timer("set")
        clock.advance(60)
        pump()
        with pytest.raises(TimerConflict, match="fired"):
            timer("set")

    def test_setting_what_was_cancelled_is_refused(self, timer: Any) -> None:
        """A late retry of the set must not undo the cancel."""
        timer("set")
        timer("cancel")
        with pytest.raises(TimerConflict, match="cancelled"):
            timer("set")

    def test_a_cancelled_timer_does_not_fire(
        self, timer: Any, pump: Any, published: Any, status: Any, clock: FakeClock
    ) -> None:
        """Cancelled before the pump took it: never."""
        timer("set")
        timer("cancel")
        clock.advance(3600)
        assert pump().count == 0
        assert published() == []
        assert status() == {KEY: "cancelled"}

    def test_cancelling_what_is_over_does_nothing(self, timer: Any, pump: Any, status: Any, clock: FakeClock) -> None:
        """A key that fired, was cancelled or was never heard of is no error."""
        timer("cancel")
        assert status() == {}
        timer("set")
        clock.advance(60)
        pump()
        timer("cancel")
        assert status() == {KEY: "fired"}

    def test_a_new_key_is_armed_by_rearm(self, timer: Any, pump: Any, published: Any, clock: FakeClock) -> None:
        """Its first generation, as if it had been set."""
        timer("rearm")
        clock.advance(60)
        pump()
        assert published() == ["evt:tmr:481207:A:1"]

    def test_rearm_starts_a_generation(self, timer: Any, pump: Any, published: Any, clock: FakeClock) -> None:
        """After it fired, after it was cancelled and while it is armed: each has an event id of its own."""
        timer("set")
        clock.advance(60)
        pump()
        timer("rearm")
        clock.advance(60)
        pump()
        timer("rearm")
        timer("cancel")
        timer("rearm", data="1")
        timer("rearm", data="2")
        clock.advance(60)
        pump()
        assert published() == ["evt:tmr:481207:A:1", "evt:tmr:481207:A:1#1", "evt:tmr:481207:A:1#4"]

    def test_rearm_replaces_time_and_data(self, timer: Any, pump: Any, run: Run, clock: FakeClock) -> None:
        """The old time is forgotten, the new data is published."""
        timer("set", after=60, data="1")
        timer("rearm", after=120, data="2")
        clock.advance(60)
        assert pump().count == 0
        clock.advance(60)
        assert pump().count == 1
        assert [event.data for event in run(events)] == ["2"]

    def test_cancels_come_first(self, run: Run, store: TimerStore, status: Any, clock: FakeClock) -> None:
        """In one call a cancel doesn't undo what the same call sets or rearms, whatever their order."""
        run(store.apply, changes(clock, ("set", "b"), ("set", "c")))
        run(
            store.apply,
            changes(clock, ("set", "a"), ("rearm", "b"), ("cancel", "a"), ("cancel", "b"), ("cancel", "c")),
        )
        assert status() == {"a": "armed", "b": "armed", "c": "cancelled"}

    def test_one_key_may_come_twice(self, run: Run, store: TimerStore, clock: FakeClock) -> None:
        """The same set twice is one timer; each rearm counts; the last one's content stands."""
        run(store.apply, changes(clock, ("set", "a"), ("set", "a"), ("rearm", "b"), ("rearm", "b")))
        rows = run(store.list_, stream=STREAM)
        assert [(row.key, row.generation) for row in rows] == [("a", 0), ("b", 1)]

    def test_a_refused_call_changes_nothing(
        self, run: Run, store: TimerStore, timer: Any, status: Any, clock: FakeClock
    ) -> None:
        """Even in a transaction that goes on after the refusal, none of the call's changes is there."""
        timer("set", "a")
        timer("set", "z")
        timer("cancel", "z")

        def swallow(conn: Connection, *, now: int) -> None:
            with pytest.raises(TimerConflict):
                store.apply(conn, changes(clock, ("cancel", "a"), ("set", "b"), ("set", "z")), now=now)

        run(swallow)
        assert status() == {"a": "armed", "z": "cancelled"}

    def test_nothing_to_change(self, run: Run, store: TimerStore, status: Any) -> None:
        """An empty call is one."""
        run(store.apply, [])
        assert status() == {}

    def test_streams_have_keys_of_their_own(self, timer: Any, pump: Any, run: Run, clock: FakeClock) -> None:
        """The same key in two streams is two timers."""
        timer("set", stream="load/1")
        timer("set", stream="load/2", data="2")
        timer("cancel", stream="load/1")
        clock.advance(60)
        pump()
        assert [(event.stream, event.data) for event in run(events)] == [("load/2", "2")]

    def test_the_longest_due_fire_first(self, timer: Any, pump: Any, published: Any, clock: FakeClock) -> None:
        """At most `limit` in one pass; the lag is that of the oldest."""
        for after in (30, 10, 20, 40):
            timer("set", f"t{after}", after)
        clock.advance(35)
        assert pump(2) == FiredTimers(2, 25 * SECOND)
        assert published() == ["evt:t10", "evt:t20"]
        assert pump(2) == FiredTimers(1, 5 * SECOND)

    def test_next_due(self, timer: Any, pump: Any, run: Run, store: TimerStore, clock: FakeClock) -> None:
        """The next armed timer's time; those that fired or were cancelled don't count."""
        assert run(store.next_due) is None
        start = clock.wall()
        for after in (10, 20, 30):
            timer("set", f"t{after}", after)
        assert run(store.next_due) == start + 10 * SECOND
        timer("cancel", "t10")
        assert run(store.next_due) == start + 20 * SECOND
        clock.advance(20)
        pump()
        assert run(store.next_due) == start + 30 * SECOND

    def test_lists(self, timer: Any, run: Run, store: TimerStore) -> None:
        """A stream's timers by key, whatever became of them; without a stream the armed ones by time."""
        timer("set", "b", 10)
        timer("set", "a", 20)
        timer("set", "c", 5, stream="load/2")
        timer("cancel", "a")
        timer("set", "d", 1)
        assert [row.key for row in run(store.list_, stream=STREAM)] == ["a", "b", "d"]
        assert [row.key for row in run(store.list_)] == ["d", "c", "b"]
        assert [row.key for row in run(store.list_, limit=1)] == ["d"]

    def test_a_forward_jump_fires_each_once(self, timer: Any, pump: Any, published: Any, clock: FakeClock) -> None:
        """A clock set ahead makes what is due by it fire, once; set back again nothing fires anew."""
        for hours in (1, 2, 30):
            timer("set", f"t{hours}", hours * 3600)
        clock.jump(86_400)
        assert pump().count == 2
        clock.jump(-86_400)
        assert pump().count == 0
        clock.jump(86_400)
        assert pump().count == 0
        assert published() == ["evt:t1", "evt:t2"]

    def test_a_backward_jump_delays(self, timer: Any, pump: Any, published: Any, status: Any, clock: FakeClock) -> None:
        """What has fired stays so, what is armed waits until the clock shows its time."""
        timer("set", "a", 60)
        timer("set", "b", 120)
        clock.advance(60)
        pump()
        clock.jump(-3600)
        clock.advance(120)
        assert pump().count == 0
        assert status() == {"a": "fired", "b": "armed"}
        clock.advance(3600)
        assert pump().count == 1
        assert published() == ["evt:a", "evt:b"]

    @pytest.mark.usefixtures("disarm")
    def test_an_outage_loses_none(
        self, run: Run, store: TimerStore, pump: Any, published: Any, clock: FakeClock
    ) -> None:
        """503 due at once, the pump breaking at each of its places in the middle: all fire, each once."""
        names = [f"t{n:03}" for n in range(503)]
        run(store.apply, changes(clock, *(("set", name) for name in names), after=1))
        clock.advance(3600)
        for broken in ("timers.due", "timers.published", "timers.marked"):
            assert pump(100).count == 100
            failpoints.arm(_break_at(broken))
            with pytest.raises(InterruptedError):
                pump(100)
            failpoints.arm(None)
        assert [pump(100).count for _ in range(4)] == [100, 100, 3, 0]
        assert sorted(published()) == sorted(f"evt:{name}" for name in names)


def changes(clock: FakeClock, *wanted: tuple[Any, str], after: float = 60) -> Sequence[TimerChange]:
    """Changes of several timers of the stream: `changes(clock, ("set", "a"), ("cancel", "b"))`."""
    fire_at = clock.wall() + round(after * SECOND)
    return [
        TimerChange(verb=verb, stream=STREAM, key=key, fire_at=fire_at, spec=f"after {after}") for verb, key in wanted
    ]


def _break_at(name: str) -> Callable[[str], None]:
    def reached(place: str) -> None:
        if place == name:
            raise InterruptedError(place)

    return reached
