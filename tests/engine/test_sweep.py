"""Retention beside the pump's other work: rarely, in short pieces, and never in the way of a timer."""

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad import Postroad
from postroad.engine import sweep
from postroad.engine.loop import Step
from postroad.engine.pump import Pump
from postroad.model.clock import SECOND, FakeClock
from postroad.model.entropy import SeededEntropy
from postroad.model.retention import DAY, Retention
from postroad.model.rows import TimerChange
from postroad.store import audit, migrations, retention, timers
from postroad.store.database import Database
from postroad.store.executor import Inline
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import dispatch, enqueue, outbox_rows

_OLD = Statement("UPDATE {p}outbox SET status = 'delivered', due_at = NULL")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def pump(place: dict[str, Any], clock: FakeClock) -> Iterator[Pump]:
    """A pump in this thread, by a clock that the test moves, of a process that has just been started."""
    post = Postroad()
    post._opened = Database(place["database"], schema=place.get("schema"), clock=clock, executor=Inline())
    post.entropy = SeededEntropy(0)
    migrations.migrate(post.database)
    yield Pump(post.parts())
    post.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the chunks that retention has looked for."""
    sizes: list[int] = []
    real = retention.look

    def look(conn: Connection, *args: Any, limit: int, **more: Any) -> Any:
        sizes.append(limit)
        return real(conn, *args, limit=limit, **more)

    monkeypatch.setattr(retention, "look", look)
    return sizes


def step(pump: Pump) -> Step:
    async def work() -> Step:
        stepped = await pump.step()
        await pump.finish()
        return stepped

    return asyncio.run(work())


def old(pump: Pump, clock: FakeClock, rows: int) -> None:
    """Dispatches that were delivered eight days ago."""
    run = pump.parts.database.transact
    enqueue(run, *(dispatch(n) for n in range(rows)))
    run(lambda conn, *, now: _OLD(conn))
    clock.advance_to(clock.wall() + 8 * DAY)


def left(pump: Pump) -> int:
    return len(pump.parts.database.read(outbox_rows))


def test_a_pass_comes_now_and_then(pump: Pump, clock: FakeClock, looks: list[int]) -> None:
    """The first pass begins a moment after the start, another one about an hour later; the pump knows when."""
    step(pump)
    assert looks == []
    due = asyncio.run(pump.due())
    assert due is not None
    assert sweep.FIRST // 2 <= due - clock.wall() <= sweep.FIRST * 3 // 2
    clock.advance_to(due - 1)
    step(pump)
    assert looks == []
    clock.advance_to(due)
    assert step(pump) is Step.NOTHING
    assert len(looks) == len(retention._STAGES), "each stage once"
    due = asyncio.run(pump.due())
    assert due is not None
    assert sweep.EVERY // 2 <= due - clock.wall() <= sweep.EVERY * 3 // 2
    clock.advance_to(due)
    step(pump)
    assert len(looks) == 2 * len(retention._STAGES)


def test_old_rows_go_and_it_is_told(pump: Pump, clock: FakeClock) -> None:
    """A pass deletes what is old, telemetry says how much, and the audit has one row."""
    told: list[Any] = []
    pump.parts.post.observe(lambda name, values: told.append((name, values)))
    old(pump, clock, 1_200)
    step(pump)
    assert left(pump) == 0
    assert ("retention.swept", {"delivered": 1_200}) in told
    (row,) = pump.parts.database.read(audit.list_)
    assert row.after == '{"delivered":1200}'


def test_without_retention_nothing_goes(pump: Pump, clock: FakeClock, looks: list[int]) -> None:
    """Where it is switched off the pump neither looks nor wakes for it."""
    pump.parts.retention = None
    old(pump, clock, 1)
    step(pump)
    assert looks == []
    assert asyncio.run(pump.due()) is None


def test_a_piece_is_short_and_a_rest_long(
    pump: Pump, clock: FakeClock, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow database gets small chunks: a piece ends with the chunk that used its time up, and a long rest follows."""
    real = retention.end

    def end(conn: Connection, found: Any, *args: Any, **more: Any) -> Any:
        clock.advance(len(found.rows) / 1_000)  # a millisecond for each row
        return real(conn, found, *args, **more)

    monkeypatch.setattr(retention, "end", end)
    old(pump, clock, 1_000)
    began = clock.wall()
    step(pump)
    assert left(pump) == 500
    step(pump)
    assert left(pump) == 500, "it rests"
    due = asyncio.run(pump.due())
    assert due is not None
    assert due - clock.wall() == sweep.REST * (clock.wall() - began)
    clock.advance_to(due)
    step(pump)
    # In 50 ms: one transaction of that length, or where it holds up other writers five short ones.
    assert looks == [500, *([10] * 5 if pump.parts.database.is_sqlite else [50])]
    assert left(pump) == 450
    assert asyncio.run(pump.due()) == clock.wall() + sweep.REST * sweep.PIECE
    for _ in range(9):
        clock.advance(2)
        step(pump)
    assert left(pump) == 0


def test_what_fails_is_tried_again_where_it_was(
    pump: Pump, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of retention ends neither the step nor the timers of the next; it goes on a moment later."""
    broken = partial(monkeypatch.setattr, retention, "end", lambda *_args, **_more: 1 / 0)
    real = retention.end
    old(pump, clock, 10)
    broken()
    with caplog.at_level(logging.WARNING, "postroad"):
        step(pump)
    assert "division by zero" in caplog.text
    change = TimerChange(verb="set", stream="load/1", key="t", fire_at=clock.wall())
    pump.parts.database.transact(timers.apply, [change])
    assert step(pump) is Step.SOME
    assert left(pump) == 10
    monkeypatch.setattr(retention, "end", real)
    clock.advance(2 * sweep.AGAIN / SECOND)
    step(pump)
    assert left(pump) == 0


def test_a_pass_goes_on_where_an_error_ended_it(
    pump: Pump, clock: FakeClock, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was deleted before an error is in one row of the audit, what is deleted after it in another."""
    real, times = retention.end, []

    def end(*args: Any, **more: Any) -> Any:
        times.append(1)
        if len(times) == 2:
            raise ZeroDivisionError
        return real(*args, **more)

    monkeypatch.setattr(retention, "end", end)
    old(pump, clock, 700)
    step(pump)
    assert left(pump) == 200
    clock.advance(2 * sweep.AGAIN / SECOND)
    step(pump)
    assert left(pump) == 0
    assert [row.after for row in pump.parts.database.read(audit.list_)] == ['{"delivered":200}', '{"delivered":500}']


def test_history_may_go_with_its_dispatch(pump: Pump, clock: FakeClock) -> None:
    """As the app's setting says."""
    pump.parts.retention = Retention(history=False)
    old(pump, clock, 3)
    step(pump)
    assert pump.parts.database.read(lambda conn: Statement("SELECT id FROM {p}transitions")(conn).all()) == []
