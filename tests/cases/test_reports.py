"""Reports into a busy conversation: callers that give up, retry, are cancelled or die lose nothing and add nothing."""

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import event

from postroad import REPORT, Entry, Kind, Postroad, Turn
from postroad.engine.watching import Hub
from postroad.store import log, stream_views
from tests.cases.apps import OpenApp, Processes, idle, until

ROOM = "room/chief"
NOTE = Kind("note", dict[str, int])
WAITERS = 1_000
THREAD = "postroad-watching"

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def busy(post: Postroad) -> AsyncIterator[asyncio.Event]:
    """The room in the middle of a turn, which ends when it is told to, or when the test is over."""
    began, free = asyncio.Event(), asyncio.Event()

    @post.turn("room")
    async def chief(turn: Turn) -> None:
        began.set()
        await free.wait()

    with post.begin() as tx:
        tx.publish(ROOM, NOTE, {}, key="m1")
    async with post.running():
        await began.wait()
        try:
            yield free
        finally:
            free.set()


def reports(post: Postroad, stream: str = ROOM) -> list[Entry]:
    """The reports that have landed."""
    return [entry for entry in post.read(stream, limit=10_000) if entry.kind == REPORT.name]


def waiting(post: Postroad, stream: str = ROOM) -> list[str]:
    """The keys of the reports that wait."""
    row = post.streams.get(stream)
    return [] if row is None else [event.key for event in row.waiting if event.kind == REPORT.name]


async def test_the_lesson_s_sketch(open_app: OpenApp, capsys: pytest.CaptureFixture[str]) -> None:
    """A report that is sent and retried during a long turn lands exactly once, after the turn."""
    post, key = open_app(), "cron:backup:1"
    async with busy(post) as free:
        first = await post.areport(ROOM, "backup failed: disk full", key=key, wait=0.1)
        retry = await post.areport(ROOM, "backup failed: disk full", key=key, wait=0.1)
        print("while the turn runs:", first, retry, "waiting in outbox:", len(waiting(post)))
        free.set()
        again = await post.areport(ROOM, "backup failed: disk full", key=key, wait=60)
        assert again is not None
        rows = {entry.key: (number, entry.data["data"]) for number, entry in enumerate(reports(post), 1)}
        print("after the turn:", rows[again.key][0], list(rows.values()))
    assert capsys.readouterr().out == (
        "while the turn runs: None None waiting in outbox: 1\n"
        "after the turn: 1 [(1, 'backup failed: disk full')]\n"
    )  # fmt: skip


async def test_a_client_that_rings_again_and_again(open_app: OpenApp) -> None:
    """Forty retries during one long turn, each given up before it is over, make one entry: what the first one said."""
    post = open_app()
    async with busy(post) as free:
        for ring in range(40):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(post.areport(ROOM, f"ring {ring}", key="coop:7", wait=None), 0.01)
        assert waiting(post) == ["coop:7"]
        assert not post.hub()._waiting
        free.set()
        entry = await post.areport(ROOM, "ring 40", key="coop:7", wait=60)
    assert entry is not None
    assert [(one.seq, one.data["data"]) for one in reports(post)] == [(entry.seq, "ring 0")]


async def test_a_caller_that_is_cancelled_at_any_moment(open_app: OpenApp) -> None:
    """Wherever a cancellation meets it, a report is accepted whole or not at all; a retry then makes it one."""
    post = open_app()
    async with busy(post) as free:
        for moment in range(60):
            task = asyncio.create_task(post.areport(ROOM, moment, key=f"r{moment}", wait=None))
            for _ in range(moment):
                await asyncio.sleep(0 if moment < 30 else 0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        accepted = waiting(post)
        assert accepted == [f"r{n}" for n in range(60) if f"r{n}" in accepted]
        assert accepted[-1] == "r59"
        assert len(accepted) < 60
        assert not post.hub()._waiting
        for moment in range(60):
            assert await post.areport(ROOM, "again", key=f"r{moment}") is None
        free.set()
        assert await post.areport(ROOM, "last", key="r59", wait=60) is not None
        await asyncio.to_thread(until, lambda: idle(post))
    said = {one.key: one.data["data"] for one in reports(post)}
    assert said == {f"r{n}": n if f"r{n}" in accepted else "again" for n in range(60)}
    assert [one.key for one in reports(post)][: len(accepted)] == accepted


def test_a_thread_that_waits(open_app: OpenApp) -> None:
    """It gets the entry as soon as it lands, from another app's loops too, and None when its time is over."""
    post, other = open_app(), open_app()
    assert post.report(ROOM, "x", key="r1", wait=0.05) is None
    other.turn("room")(lambda turn: None)
    with other.running():
        entry = post.report(ROOM, "x", key="r1", wait=60)
        assert entry is not None
        assert (entry.key, entry.data["data"]) == ("r1", "x")
        begun = time.monotonic()
        assert other.report(ROOM, "y", key="r2", wait=60) is not None
        assert time.monotonic() - begun < 30
    until(lambda: THREAD not in [thread.name for thread in threading.enumerate()])


async def test_a_wait_ends_with_the_stream(open_app: OpenApp) -> None:
    """Deleted, a stream tells all who wait in it that nothing will land, whatever turn of it is under way."""
    post = open_app()
    async with busy(post):
        tasks = [asyncio.create_task(post.areport(ROOM, "x", key=f"r{n}", wait=None)) for n in range(3)]
        thread = asyncio.create_task(asyncio.to_thread(post.report, ROOM, "x", key="r3", wait=None))
        while len(post.hub()._waiting) < 4:
            await asyncio.sleep(0.01)
        with post.begin() as tx:
            tx.delete_stream(ROOM)
        assert await asyncio.wait_for(asyncio.gather(*tasks, thread), 60) == [None] * 4


async def test_a_wait_ends_with_the_app(open_app: OpenApp) -> None:
    """Closed in the middle, it lets those who wait go on; what they have reported lands elsewhere."""
    post, other = open_app(), open_app()
    task = asyncio.create_task(post.areport(ROOM, "x", key="r1", wait=None))
    thread = asyncio.create_task(asyncio.to_thread(post.report, ROOM, "x", key="r2", wait=None))
    while len(post.hub()._waiting) < 2:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(post.close)
    assert await asyncio.wait_for(asyncio.gather(task, thread), 60) == [None, None]
    other.recorded("room")
    await other.adrain()
    assert [one.key for one in reports(other)] == ["r1", "r2"]


async def test_a_thousand_wait_together(open_app: OpenApp) -> None:
    """1,000 waiters make at most 30 queries a second of their process, however often it is woken, and all are told."""
    post, waits = open_app(), open_app()
    post.recorded("chat", "room")
    waits.database  # its own first queries are no waiter's
    queries: list[str] = []

    def count(_conn: Any, _cursor: Any, sql: str, *_: Any) -> None:
        if "postroad_" in sql or "set_config" in sql:
            queries.append(sql)

    async def wait_for(number: int) -> int:
        stream = ROOM if number % 2 else f"chat/{number}"
        entry = await waits.areport(stream, number, key=f"r{number}", wait=100)
        assert entry is not None
        return int(entry.data["data"])

    told = [asyncio.create_task(wait_for(n)) for n in range(WAITERS)]
    while len(waits.hub()._waiting) < WAITERS:
        await asyncio.sleep(0.01)
    event.listen(waits.database.engine, "before_cursor_execute", count)
    began = time.monotonic()
    for _ in range(300):
        waits._wakeups.ping()
        await asyncio.sleep(0.01)
    idle_queries, took = len(queries), time.monotonic() - began
    assert 5 < idle_queries <= 30 * (took + 0.2), (idle_queries, took)
    async with post.running():
        assert await asyncio.gather(*told) == list(range(WAITERS))
    took = time.monotonic() - began
    assert len(queries) <= 30 * (took + 0.2), (len(queries), took)
    assert not waits.hub()._waiting


async def test_many_report_while_turns_come_and_go(open_app: OpenApp) -> None:
    """Reports that meet a conversation which falls idle all the time are never left behind until the next message."""
    post = open_app()
    turns = 0

    @post.turn("room")
    async def chief(turn: Turn) -> None:
        nonlocal turns
        turns += 1
        assert all(one.kind == NOTE.name for one in turn.events)

    async def talk(number: int) -> None:
        for n in range(20):
            async with post.begin() as tx:
                tx.publish(ROOM, NOTE, {"n": n}, key=f"m{number}.{n}")
            assert await post.areport(ROOM, n, key=f"r{number}.{n}", wait=60) is not None

    async with post.running():
        await asyncio.gather(*(talk(number) for number in range(8)))
        await asyncio.to_thread(until, lambda: idle(post))
    entries = post.read(ROOM, limit=10_000)
    keys = [one.key for one in entries]
    assert len(keys) == len(set(keys)) == 320
    for number in range(8):  # each caller's own, in the order in which it was accepted
        own = [key for key in keys if key[1:].startswith(f"{number}.")]
        assert own == [f"{kind}{number}.{n}" for n in range(20) for kind in "mr"]
    assert [one.data["parent"] for one in entries[1:] if one.kind == REPORT.name] == [
        before.key for before, one in pairwise(entries) if one.kind == REPORT.name
    ]
    assert turns > 0


async def test_a_handler_that_reports_to_itself_and_to_a_busy_one(open_app: OpenApp) -> None:
    """It does not wait, whatever it asks for: both reports queue behind the running turns, and nothing is locked up."""
    post = open_app()
    took: list[float] = []

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        begun = time.monotonic()
        assert await post.areport(turn.stream, "to myself", key="r1", wait=5) is None
        assert await post.areport(ROOM, "to the busy one", key="r1", wait=5) is None
        assert await asyncio.to_thread(post.report, ROOM, "from a thread", key="r2", wait=5) is None
        took.append(time.monotonic() - begun)

    async with busy(post) as free:
        with post.begin() as tx:
            tx.publish("chat/1", NOTE, {}, key="m1")
        assert await post.areport("chat/1", "x", key="r1", wait=None) is not None
        assert (took[0] < 5, waiting(post)) == (True, ["r1", "r2"])
        free.set()
        assert await post.areport(ROOM, "x", key="r2", wait=60) is not None
    assert [one.key for one in post.read("chat/1")] == ["m1", "r1"]


async def test_what_knows_of_a_turn_and_what_does_not(open_app: OpenApp) -> None:
    """Tasks and `to_thread` take the context along and don't wait; a thread of the handler's own waits for its turn."""
    post = open_app()
    took: dict[str, float] = {}

    def tell(how: str, wait: float = 30) -> None:
        begun = time.monotonic()
        assert post.report("chat/1", how, key=how, wait=wait) is None
        took[how] = time.monotonic() - begun

    async def atell(how: str) -> None:
        begun = time.monotonic()
        assert await post.areport("chat/1", how, key=how, wait=30) is None
        took[how] = time.monotonic() - begun

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.create_task(atell("task"))
        await asyncio.to_thread(tell, "to_thread")
        await loop.run_in_executor(None, contextvars.copy_context().run, tell, "copied")
        await loop.run_in_executor(None, tell, "wait=0", 0)
        await loop.run_in_executor(None, tell, "executor", 1)
        thread = threading.Thread(target=tell, args=("thread", 1))
        thread.start()
        await asyncio.to_thread(thread.join)

    async with post.running():
        with post.begin() as tx:
            tx.publish("chat/1", NOTE, {}, key="m1")
        await asyncio.to_thread(until, lambda: len(post.read("chat/1")) == 7)
    assert all(took[how] >= 1 for how in ("executor", "thread"))
    assert all(took[how] < 30 for how in ("task", "to_thread", "copied", "wait=0"))
    assert [one.key for one in post.read("chat/1")] == ["m1", *took]


REPORTER = """
import threading

@post.turn("room", lease=2)
async def chief(turn):
    if os.path.exists("long"):
        threading.Thread(target=wait, daemon=True).start()  # in no turn
        await asyncio.sleep(600)
    turn.record("reply", {})

def wait():
    note(landed=str(post.report("room/chief", "from the dead", key="r1", wait=600)))
"""


def test_a_process_that_dies_while_it_waits(open_app: OpenApp, processes: Processes, tmp_path: Any) -> None:
    """Killed in the middle of a turn and of a wait, it has lost nothing: the next one lands the report, unasked."""
    post = open_app()
    with post.begin() as tx:
        tx.publish(ROOM, NOTE, {}, key="m1")
    (tmp_path / "long").touch()
    processes.write(REPORTER)
    killed = processes.run()
    until(lambda: waiting(post) == ["r1"], "the report waits")
    killed.kill()
    killed.wait()
    assert processes.journal() == []
    (tmp_path / "long").unlink()
    processes.run()
    until(lambda: idle(post), "all that waits is decided")
    assert [one.key if one.cause is None else one.kind for one in post.read(ROOM)] == ["m1", "reply", "r1"]
    assert post.report(ROOM, "again", key="r1") is not None


def test_what_was_accepted_with_no_loop_anywhere(open_app: OpenApp) -> None:
    """Reports are accepted with every loop down, and land when one comes up."""
    post = open_app()
    for n in range(5):
        assert post.report(ROOM, n, key=f"r{n}", wait=0.01) is None
    post.close()
    other = open_app()
    other.turn("room")(lambda turn: None)
    with other.running():
        until(lambda: idle(other))
    assert [one.data["data"] for one in reports(other)] == [0, 1, 2, 3, 4]
    assert other.database.read(log.version, ROOM) == 5
    assert other.database.read(stream_views.queue, ROOM) is None


def test_a_hub_that_looks_too_late_loses_none(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that lands between its acceptance and the first look is found by that look: register, then read."""
    post = open_app()
    post.recorded("room")
    ask = Hub.ask

    def landed_before(self: Hub, *args: Any) -> Any:
        post.drain()
        return ask(self, *args)

    monkeypatch.setattr(Hub, "ask", landed_before)
    entry = post.report(ROOM, "x", key="r1", wait=60)
    assert entry is not None
    assert entry.seq == 1
