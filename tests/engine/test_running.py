"""The loops with real threads, a real clock and short leases."""

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from postroad import Dispatch, InvalidInput, Kind, Postroad, Retry, Turn, sqlite
from postroad.engine.loop import Stalls
from postroad.model.clock import SECOND, FakeClock
from postroad.store import moments, runs

NOTE = Kind("note", dict[str, int])
DEADLINE = 30.0


@pytest.fixture(params=["sqlite", "postgres"])
def open_app(request: pytest.FixtureRequest) -> Iterator[Callable[[], Postroad]]:
    """A factory of apps on one database, as several processes would have them."""
    schema = None
    if request.param == "postgres":
        url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema")
    else:
        url = f"sqlite:///{request.getfixturevalue('sqlite_path')}"
    opened: list[Postroad] = []

    def factory() -> Postroad:
        opened.append(Postroad(url, schema=schema, migrate=True))
        return opened[-1]

    yield factory
    for post in opened:
        post.close()


def until(true: Callable[[], Any]) -> None:
    """Wait for a condition of the database or a counter."""
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def idle(post: Postroad) -> bool:
    return post.database.read(moments.waiting) == 0


def test_loops_run_in_a_block(open_app: Callable[[], Postroad]) -> None:
    """Inside `with post.running()` turns, sends and timers happen by themselves; sync handlers run in threads."""
    post = open_app()
    threads: set[str] = set()
    post.sender("sync")(lambda d: threads.add(threading.current_thread().name))

    @post.turn("chat")
    async def chat(t: Turn) -> None:
        if t.events[0].kind == "note":
            t.send("sync", {}, key=t.events[0].key)
            t.set_timer(t.events[0].key, after=0.05)

    with post.running():
        for n in range(10):
            with post.begin() as tx:
                tx.publish(f"chat/{n}", NOTE, {"n": n}, key=f"k{n}")
        until(lambda: all(len(post.read(f"chat/{n}")) == 3 for n in range(10)))
    assert threads == {"postroad-handler"}
    assert idle(post)


async def test_loops_run_in_the_callers_event_loop(open_app: Callable[[], Postroad]) -> None:
    """Inside `async with post.running()` async handlers share the caller's event loop."""
    post = open_app()
    loops: list[Any] = []

    @post.sender("async")
    async def send(d: Dispatch[Any]) -> None:
        loops.append(asyncio.get_running_loop())

    async with post.running():
        async with post.begin() as tx:
            tx.send("async", {}, key="k")
        while not loops:
            await asyncio.sleep(0.01)
    assert loops == [asyncio.get_running_loop()]
    row = post.dispatches.get("k")
    assert row is not None
    assert row.status == "delivered"


def test_a_blocked_event_loop_loses_no_lease(open_app: Callable[[], Postroad]) -> None:
    """A handler that blocks the event loop for longer than its lease keeps its claim; nobody else runs its turn."""
    ran: list[int] = []

    def declare(post: Postroad, number: int) -> Postroad:
        @post.turn("chat", lease=1.2)
        async def chat(t: Turn) -> None:
            ran.append(number)
            time.sleep(3)  # noqa: ASYNC251  # blocks on purpose
            t.record("done", {"by": number})

        return post

    one, two = declare(open_app(), 1), declare(open_app(), 2)
    with one.running(), two.running():
        with one.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": 1})
        until(lambda: len(one.read("chat/1")) == 2)
    assert len(ran) == 1
    assert [str(r.end) for r in one.database.read(runs.of_stream, "chat/1")] == ["committed"]


def test_a_turn_past_its_deadline_is_failed(open_app: Callable[[], Postroad]) -> None:
    """A handler that does not end in time is failed with the reason, though its thread runs on, and may not commit."""
    post = open_app()
    release = threading.Event()

    @post.turn("chat", timeout=0.3, attempts=1)
    def chat(t: Turn) -> None:
        release.wait(10)
        t.record("late", {})

    with post.running():
        with post.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": 1})
        until(lambda: post.read("chat/1"))
        release.set()
    (entry,) = post.read("chat/1")
    assert entry.kind == "postroad.failed"
    assert entry.data["error"] == "timeout after 0.3 s, still running"


def test_a_handler_that_swallows_cancellation_does_not_stop_the_loop(open_app: Callable[[], Postroad]) -> None:
    """A send that ignores its deadline is failed, others go on, and the block ends."""
    post = open_app()
    over = threading.Event()

    @post.sender("stubborn", timeout=0.2, retry=Retry(attempts=1))
    async def stubborn(d: Dispatch[Any]) -> None:
        while not over.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    post.sender("healthy")(lambda d: None)
    with post.running():
        with post.begin() as tx:
            tx.send("stubborn", {}, key="s")
            tx.send("healthy", {}, key="h")
        until(lambda: idle(post))
        over.set()
    rows = {row.key: row for row in post.dispatches.list()}
    assert (rows["s"].status, rows["h"].status) == ("dead_letter", "delivered")
    assert rows["s"].last_error == "timeout after 0.2 s, still running"


@pytest.mark.parametrize("how", ["running", "drain"])
def test_what_goes_on_after_its_end_is_named(
    open_app: Callable[[], Postroad], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A block and a drain that leave calls behind name their functions once, each with how often, and say no more."""
    post = open_app()
    over = threading.Event()
    post.sender("healthy")(lambda d: None)

    @post.sender("deaf", timeout=0.1, retry=Retry(attempts=1))
    async def deaf(d: Dispatch[Any]) -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    with post.begin() as tx:
        tx.send("deaf", {}, key="a")
        tx.send("deaf", {}, key="b")
        tx.send("healthy", {}, key="h")
    if how == "drain":
        post.drain()
    else:
        with post.running():
            until(lambda: idle(post))
    over.set()
    gc.collect()
    said = [(record.name, record.getMessage()) for record in caplog.records if record.levelno >= logging.WARNING]
    name = f"{__name__}.{deaf.__qualname__}"
    assert said == [("postroad", f"left behind, since it goes on although it was ended: {name} (2 times)")]


def test_nothing_is_said_of_a_healthy_end(open_app: Callable[[], Postroad], caplog: pytest.LogCaptureFixture) -> None:
    """A send that ends when it is cancelled is left behind by nobody."""
    post = open_app()

    @post.sender("long", timeout=0.1, retry=Retry(attempts=1))
    async def long(d: Dispatch[Any]) -> None:
        await asyncio.sleep(60)

    with post.begin() as tx:
        tx.send("long", {}, key="k")
    post.drain()
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_leaving_the_block_finishes_what_is_under_way(open_app: Callable[[], Postroad]) -> None:
    """A send that has begun is finished and settled before the block ends; nothing new is claimed meanwhile."""
    post = open_app()
    begun = threading.Event()
    sent: list[str] = []

    @post.sender("slow", concurrency=1)
    def slow(d: Dispatch[Any]) -> None:
        begun.set()
        time.sleep(0.5)
        sent.append(d.key)

    with post.begin() as tx:
        for n in range(3):
            tx.send("slow", {}, key=f"k{n}")
    with post.running():
        assert begun.wait(DEADLINE)
    statuses = sorted(row.status for row in post.dispatches.list())
    assert statuses == ["delivered", "pending", "pending"]
    assert len(sent) == 1


def test_what_outlives_the_grace_is_given_back_without_losing_an_attempt(open_app: Callable[[], Postroad]) -> None:
    """Six deployments that cut a send short do not kill a dispatch that may be tried five times."""
    post = open_app()
    begun = threading.Event()

    @post.sender("long", timeout=30, retry=Retry(attempts=5, first=0, cap=0))
    async def long(d: Dispatch[Any]) -> None:
        begun.set()
        await asyncio.sleep(20)

    with post.begin() as tx:
        tx.send("long", {}, key="k")
    for _ in range(6):
        begun.clear()
        stop = asyncio.Event()

        async def serve(stop: asyncio.Event = stop) -> None:
            runtime = post.runtime(only=["sends"], grace=SECOND // 20)
            running = asyncio.ensure_future(runtime.run(stop))
            while not begun.is_set():
                await asyncio.sleep(0.01)
            stop.set()
            await running

        asyncio.run(serve())
    row = post.dispatches.get("k")
    assert row is not None
    assert (row.status, row.attempt) == ("pending", 6)


def test_two_apps_share_the_work(open_app: Callable[[], Postroad]) -> None:
    """Rows are claimed by one app or the other, each once."""
    sent: list[str] = []

    def declare(post: Postroad) -> Postroad:
        post.sender("s")(lambda d: sent.append(d.key))
        return post

    one, two = declare(open_app()), declare(open_app())
    with one.begin() as tx:
        for n in range(200):
            tx.send("s", {}, key=f"k{n}")
    with one.running(), two.running():
        until(lambda: idle(one))
    assert sorted(sent) == sorted(f"k{n}" for n in range(200))


def test_a_users_long_write_transaction_costs_no_claim(sqlite_path: Path) -> None:
    """On SQLite a user's write transaction longer than the lease delays everybody and makes nobody send twice."""
    sent: list[tuple[str, int]] = []

    def declare(post: Postroad) -> Postroad:
        @post.sender("s", timeout=1.5, lease=3.2)
        def send(d: Dispatch[Any]) -> None:
            time.sleep(0.1)
            sent.append((d.key, d.attempt))

        return post

    url = f"sqlite:///{sqlite_path}"
    one, two = declare(Postroad(url)), declare(Postroad(url))
    with one.begin() as tx:
        for n in range(40):
            tx.send("s", {}, key=f"k{n}")
    from sqlalchemy import create_engine, text

    engine = sqlite.configure(create_engine(url))
    with one.running(), two.running():
        until(lambda: len(sent) >= 10)
        with engine.begin() as conn:
            conn.execute(text("create table if not exists mine (id integer)"))
            time.sleep(4.5)
        until(lambda: idle(one))
    engine.dispose()
    one.close()
    two.close()
    assert sorted(key for key, _ in sent) == sorted(f"k{n}" for n in range(40))
    assert {attempt for _, attempt in sent} == {1}


def test_a_pump_interval_over_30_seconds_is_refused(open_app: Callable[[], Postroad]) -> None:
    """Timers must fire within a minute, so a lazier pump is refused."""
    post = open_app()
    with pytest.raises(InvalidInput, match="30 s"):
        post.runtime(pump_interval=31)


def test_the_users_lifespan_surrounds_the_loops(open_app: Callable[[], Postroad]) -> None:
    """What `lifespan(post)` yields is `post.state` while loops run."""
    from contextlib import asynccontextmanager

    post = open_app()
    seen: list[Any] = []

    @asynccontextmanager
    async def resources(_: Postroad) -> Any:
        seen.append("opened")
        yield "client"
        seen.append("closed")

    post._user_lifespan = resources
    post.sender("s")(lambda d: seen.append(d.post.state))
    with post.running():
        with post.begin() as tx:
            tx.send("s", {}, key="k")
        until(lambda: idle(post))
    assert seen == ["opened", "client", "closed"]


def test_the_runtime_does_not_end_with_its_trouble(open_app: Callable[[], Postroad]) -> None:
    """A loop whose step fails reports it, backs off and goes on."""
    post = open_app()
    post.sender("s")(lambda d: None)
    troubles: list[str] = []
    post.observe(lambda name, values: troubles.append(values["loop"]) if name == "loop.error" else None)
    runtime = post.runtime(only=["sends"])
    original = runtime.loops[0].step
    calls = iter(range(100))

    async def sometimes() -> bool:
        if next(calls) < 2:
            raise RuntimeError("the database is away")
        return await original()

    runtime.loops[0].step = sometimes  # type: ignore[method-assign]
    with post.begin() as tx:
        tx.send("s", {}, key="k")

    async def serve() -> None:
        stop = asyncio.Event()
        running = asyncio.ensure_future(runtime.run(stop))
        while not idle(post):
            await asyncio.sleep(0.01)
        stop.set()
        await running

    asyncio.run(serve())
    assert troubles == ["dispatcher", "dispatcher"]


def test_a_transaction_that_had_to_wait_is_a_stall(open_app: Callable[[], Postroad]) -> None:
    """After a claim that waited for the database nothing is taken over for a third of the lease."""
    database = open_app().database
    clock = FakeClock()
    database.clock = clock
    stalls = Stalls(database)
    stalls.look()
    clock.advance(3)  # the claim's own transaction waits
    stalls.answered()
    assert not stalls.may_take_over(6 * SECOND)
    clock.advance(1.9)
    stalls.look()
    assert not stalls.may_take_over(6 * SECOND)
    clock.advance(0.2)
    stalls.look()
    stalls.answered()
    clock.advance(2.1)
    assert stalls.may_take_over(6 * SECOND)
    assert stalls.may_take_over(60 * SECOND)
