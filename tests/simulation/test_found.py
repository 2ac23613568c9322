"""What the simulation has found, each as a script of its own."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from postroad import Dispatch, Kind, Postroad, Turn
from postroad.engine.worker import Worker
from postroad.model.clock import SECOND, FakeClock
from postroad.model.errors import CommitUnknown
from postroad.store import migrations, queues
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
