"""What the simulation has found, each as a script of its own."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from postroad import Dispatch, Kind, Postroad, Turn
from postroad.engine.worker import Worker
from postroad.model.clock import SECOND, FakeClock
from postroad.model.errors import CommitUnknown, GiveUp
from postroad.store import log, migrations, operations, queues
from postroad.store.database import Database
from postroad.store.executor import Inline
from postroad.testing import Harness
from postroad.testing.simulation.virtual import VirtualLoop

NOTE = Kind("note", dict[str, int])


@pytest.fixture
def clock() -> FakeClock:
    """The clock of the database and of the event loop."""
    return FakeClock()


@pytest.fixture
def post(sqlite_path: Path, clock: FakeClock) -> Iterator[Postroad]:
    """An app on a database in this thread, with that clock."""
    database = Database(f"sqlite:///{sqlite_path}", clock=clock, executor=Inline())
    migrations.migrate(database)
    post = Postroad(f"sqlite:///{sqlite_path}")
    post._opened = database
    yield post
    post.close()


def run_worker(post: Postroad, clock: FakeClock, *, poll: int, seconds: float) -> None:
    """Run the app's worker for a while of virtual time."""

    async def main() -> None:
        worker = Worker(post.parts(poll=poll))
        stop = asyncio.Event()
        running = asyncio.ensure_future(worker.run(stop))
        await asyncio.sleep(seconds)
        stop.set()
        await running
        await worker.finish()

    loop = VirtualLoop(clock)
    loop.run_until_complete(main())
    loop.close()


def test_a_loop_that_polls_seldom_takes_over(post: Postroad, clock: FakeClock) -> None:
    """A poll interval longer than a sixth of the lease is no stall: the claim of a dead worker is taken over."""
    attempts = []

    @post.turn("load", lease=6)
    async def decide(turn: Turn) -> None:
        attempts.append(turn.attempt)

    with post.begin() as tx:
        tx.publish("load/1", NOTE, {"n": 1})
    post.database.transact(queues.claim, stream_type="load", token="0" * 32, limit=1, batch=9, lease=6 * SECOND)
    run_worker(post, clock, poll=4 * SECOND, seconds=20)
    assert attempts == [2]


def test_a_partial_of_an_async_sender_is_awaited() -> None:
    """A functools.partial of an async function sends as the function itself does."""
    post = Postroad("sqlite:///unused.db")
    sent = []

    async def send(dispatch: Dispatch[dict[str, int]], *, to: list[str]) -> None:
        to.append(dispatch.key)

    post.sender(NOTE)(partial(send, to=sent))
    with Harness(post, senders="run") as harness:
        with post.begin() as tx:
            tx.send(NOTE, {"n": 1}, key="k")
        harness.drain()
    assert sent == ["k"]


async def test_a_loop_that_cannot_finish_hinders_no_other(post: Postroad) -> None:
    """What one loop raises while the process ends takes nothing from the grace of those after it."""
    runtime = post.runtime()
    finished: list[str] = []

    async def fails() -> None:
        raise CommitUnknown("the answer of marking an alert was lost")

    async def finishes(name: str) -> None:
        finished.append(name)

    first, *others = runtime.loops
    first.finish = fails
    for loop in others:
        loop.finish = partial(finishes, loop.name)
    stop = asyncio.Event()
    stop.set()
    await runtime.run(stop)
    assert finished == [loop.name for loop in others]


def test_a_parked_stream_that_is_deleted_is_let_go(post: Postroad, clock: FakeClock) -> None:
    """What waits in a parked stream ends with its deletion, also where nothing else is to do: nobody resolves it."""

    @post.tool(effect="unsafe")
    async def pay() -> None: ...

    @post.turn("desk", when_interrupted="park")
    async def desk(turn: Turn) -> None:
        await turn.call(pay)
        raise GiveUp("planned")

    def state() -> str:
        row = post.streams.get("desk/1")
        assert row is not None
        return row.state

    with post.begin() as tx:
        tx.publish("desk/1", NOTE, {"n": 1}, key="n")
    run_worker(post, clock, poll=1 * SECOND, seconds=5)
    assert state() == "parked"
    with post.begin() as tx:
        tx.delete_stream("desk/1")
    run_worker(post, clock, poll=1 * SECOND, seconds=30)
    assert state() == "idle"


def test_a_call_whose_start_was_not_answered_in_time_counts(post: Postroad, clock: FakeClock) -> None:
    """A turn whose deadline passes while a call's start is being recorded has called: its set is not split."""
    called = []

    @post.tool(effect="unsafe")
    async def pay() -> None:
        called.append(1)

    @post.turn("desk", timeout=3, attempts=1)
    async def desk(turn: Turn) -> None:
        await turn.call(pay)

    real = post.database.agroup

    async def slow(verb: Any, item: Any) -> Any:
        done = await real(verb, item)
        if verb is operations.START:
            await asyncio.sleep(60)
        return done

    with post.begin() as tx:
        tx.publish("desk/1", NOTE, {"n": 1})
        tx.publish("desk/1", NOTE, {"n": 2})
    with patch.object(post.database, "agroup", slow):
        run_worker(post, clock, poll=1 * SECOND, seconds=20)
    entries = post.database.read(log.last, "desk/1")
    assert [entry.kind for entry in entries] == ["note", "note", "postroad.interrupted"]
    assert [call["tool"] for call in entries[-1].data["operations"]] == ["pay"]
    assert called == []


def test_a_keyed_call_whose_end_was_not_recorded_keeps_its_key(post: Postroad, clock: FakeClock) -> None:
    """The answers of both attempts to record a call's end are lost: a handler that calls again does so with its key."""
    keys = []

    @post.tool(effect="keyed")
    async def book(*, key: str = "") -> None:
        keys.append(key)

    @post.turn("desk")
    async def desk(turn: Turn) -> None:
        with suppress(CommitUnknown):
            await turn.call(book)
        await turn.call(book)

    real, lost = post.database.agroup, [1, 2]

    async def loses(verb: Any, item: Any) -> Any:
        done = await real(verb, item)
        if verb is operations.FINISH and lost:
            lost.pop()
            raise CommitUnknown("simulated")
        return done

    with post.begin() as tx:
        tx.publish("desk/1", NOTE, {"n": 1})
    with patch.object(post.database, "agroup", loses):
        run_worker(post, clock, poll=1 * SECOND, seconds=5)
    assert len(keys) == 2
    assert len(set(keys)) == 1


def test_calls_that_fail_together_keep_their_keys(post: Postroad, clock: FakeClock) -> None:
    """Two equal calls at once that both fail are made again with the keys that they had."""
    keys = []

    @post.tool(effect="keyed")
    async def book(*, key: str = "") -> None:
        keys.append(key)
        if len(keys) < 3:
            raise ConnectionResetError

    @post.turn("desk")
    async def desk(turn: Turn) -> None:
        await asyncio.gather(turn.call(book), turn.call(book), return_exceptions=True)
        await asyncio.gather(turn.call(book), turn.call(book))

    with post.begin() as tx:
        tx.publish("desk/1", NOTE, {"n": 1})
    run_worker(post, clock, poll=1 * SECOND, seconds=5)
    assert len(keys) == 4
    assert set(keys[:2]) == set(keys[2:])
