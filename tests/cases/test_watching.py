"""Watching streams: entries once and in order, what running turns say, and what a watch leaves behind."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from postroad import Entry, InvalidInput, Kind, Partial, Postroad, Refused, StreamDeleted, Turn
from postroad.engine import partials, watching
from postroad.engine.watching import Hub
from postroad.store.statements import Statement
from postroad.store.watching import Asked
from tests.cases.apps import OpenApp, Processes, idle, until
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, int])
THREAD = "postroad-watching"
WATCHERS = 1_000
_PARTIALS = Statement("SELECT stream, said FROM {p}partials")
_TAKE_OVER = Statement("UPDATE {p}queues SET claim_token = 'of another' WHERE stream = :stream")

pytestmark = pytest.mark.timeout(120)


def watchers() -> list[str]:
    """The threads that look for news."""
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def publish(post: Postroad, stream: str, *numbers: int) -> None:
    with post.begin() as tx:
        for n in numbers:
            tx.publish(stream, NOTE, {"n": n}, key=f"n{n}")


def left(post: Postroad) -> list[Any]:
    """The rows of what turns have said."""
    return post.database.read(lambda conn: _PARTIALS(conn).all())


async def take(watch: AsyncIterator[Entry | Partial], count: int) -> list[int | str]:
    """The next few that a watch tells: the seq of an entry, the text of a partial."""
    told: list[int | str] = []
    async for one in watch:
        told.append(one.seq if isinstance(one, Entry) else one.text)
        if len(told) == count:
            return told
    raise AssertionError("a watch ended by itself")


async def eventually(condition: Callable[[], Any]) -> None:
    """Look until the condition holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "never happened"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def speaking(post: Postroad) -> AsyncIterator[Callable[[str | None], None]]:
    """Loops with a turn of `chat/1` that says what it is told to; None: it replies and ends."""
    orders: asyncio.Queue[str | None] = asyncio.Queue()

    @post.turn("chat", attempts=2)
    async def chat(turn: Turn) -> None:
        while (piece := await orders.get()) is not None:
            if piece == "fail":
                raise ValueError("as it was told")
            turn.partial(piece)
        turn.record("reply", {})

    async with post.running():
        publish(post, "chat/1", 1)
        yield orders.put_nowait


async def test_entries_come_once_and_in_order(open_app: OpenApp) -> None:
    """Every watch tells each entry behind its place once and in order, in a process with loops and in one without."""
    post, other = open_app(), open_app()
    post.turn("chat")(lambda turn: None)
    total, tasks = 60, []
    async with post.running():
        for watching_, after in ((post, 0), (other, 0), (other, 7)):
            tasks.append(asyncio.create_task(all_behind(watching_, after, total)))
        for n in range(total):
            publish(post, "chat/1", n)
            await asyncio.sleep(0.01)
        found = await asyncio.gather(*tasks)
    assert found == [list(range(after + 1, total + 1)) for after in (0, 0, 7)]
    assert await all_behind(other, total - 1, total) == [total]


async def all_behind(post: Postroad, after: int, total: int) -> list[int | str]:
    """What is told of a stream behind a place, until it has so many entries."""
    async with aclosing(post.watch("chat/1", after=after)) as watch:
        return await take(watch, total - after)


async def test_a_long_log_is_told_piece_by_piece(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is longer than what one look tells comes in several, whole and in order."""
    monkeypatch.setattr(watching.watching.look, "__kwdefaults__", {"limit": 7})
    post = open_app()
    post.recorded("chat")
    publish(post, "chat/1", *range(30))
    await post.adrain()
    assert await all_behind(post, 0, 30) == list(range(1, 31))


async def test_words_are_replaced_by_the_entries(open_app: OpenApp) -> None:
    """What a turn says is told as the whole text so far; then come its entries, and nothing of it is left."""
    post, other = open_app(), open_app()
    async with aclosing(other.watch("chat/1")) as far, aclosing(post.watch("chat/1")) as near, speaking(post) as say:
        say("Hel")
        assert await asyncio.gather(take(near, 1), take(far, 1)) == [["Hel"], ["Hel"]]
        say("lo")
        assert await asyncio.gather(take(near, 1), take(far, 1)) == [["Hello"], ["Hello"]]
        say(None)
        assert await asyncio.gather(take(near, 2), take(far, 2)) == [[1, 2], [1, 2]]
        assert left(post) == []


async def test_a_failing_turn_s_words_are_void(open_app: OpenApp) -> None:
    """When a turn that spoke fails, a partial without text says so; its next attempt begins anew."""
    post = open_app()
    async with aclosing(post.watch("chat/1")) as watch, speaking(post) as say:
        say("Hel")
        assert await take(watch, 1) == ["Hel"]
        say("fail")
        assert await take(watch, 1) == [""]
        await eventually(lambda: left(post) == [])
        say("Good day")
        assert await take(watch, 1) == ["Good day"]
        say(None)
        assert await take(watch, 2) == [1, 2]
        assert left(post) == []


async def test_a_turn_that_has_ended_says_nothing(open_app: OpenApp) -> None:
    """After a turn's end `partial` is refused like the other verbs; what cannot be stored is refused at once."""
    post = open_app()
    turns: list[Turn] = []
    refused: list[str] = []

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        for text in ("a\0b", "\ud800", None, b"bytes"):
            with pytest.raises(InvalidInput) as error:
                turn.partial(text)  # type: ignore[arg-type]
            refused.append(error.value.field)
        turn.partial("")
        turns.append(turn)

    async with post.running():
        publish(post, "chat/1", 1)
        await eventually(lambda: idle(post))
    assert refused == ["text"] * 4
    with pytest.raises(Refused, match="over"):
        turns[0].partial("too late")


async def test_threads_of_a_sync_handler_may_speak(open_app: OpenApp) -> None:
    """A handler in a thread, and threads of its own, say thousands of pieces without waiting; none is lost."""
    post = open_app()
    ended = threading.Event()

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        threads = [threading.Thread(target=lambda: [turn.partial("x") for _ in range(1_000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended.wait(60)

    async with post.running(), aclosing(post.watch("chat/1")) as watch:
        publish(post, "chat/1", 1)
        told = await take(watch, 1)
        while told[-1] != "x" * 4_000:
            told += await take(watch, 1)
        assert len(told) < 40, "many pieces are carried at once"
        ended.set()
        assert await take(watch, 1) == [1]


async def test_a_long_text_is_cut_visibly(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its bound the text ends with a mark, in the middle of no character, and the turn goes on."""
    monkeypatch.setattr(partials, "TEXT_BYTES_MAX", 10)
    post = open_app()
    async with aclosing(post.watch("chat/1")) as watch, speaking(post) as say:
        for piece in ("ääää", "ääää", "more"):
            say(piece)
        told = await take(watch, 1)
        if told == ["ääää"]:
            told = await take(watch, 1)
        assert told == ["äääää…"]
        say(None)
        assert await take(watch, 2) == [1, 2]


async def test_a_decision_in_place_of_another_begins_anew(open_app: OpenApp) -> None:
    """What a turn said whose decision is replaced counts no longer: the replacement speaks with a text of its own."""
    post = open_app()
    post.elsewhere("mail")
    first, second = asyncio.Event(), threading.Event()

    def replace(turn: Turn, key: str) -> None:
        turn.partial("Instead")
        second.wait(60)

    @post.turn("chat", on_duplicate=replace)
    async def chat(turn: Turn) -> None:
        turn.send("mail", {"n": turn.events[0].data["n"]}, key="the same")
        if turn.events[0].data["n"] == 2:
            turn.partial("First")
            await first.wait()

    async with post.running(), aclosing(post.watch("chat/1", after=1)) as watch:
        publish(post, "chat/1", 1)
        await eventually(lambda: idle_turns(post))
        publish(post, "chat/1", 2)
        assert await take(watch, 1) == ["First"]
        first.set()
        told = await take(watch, 1)
        if told == [""]:
            told = await take(watch, 1)
        assert told == ["Instead"]
        second.set()
        assert await take(watch, 1) == [2]
    assert left(post) == []


def idle_turns(post: Postroad) -> bool:
    return len(post.read("chat/1")) == 1


async def test_a_zombie_is_not_heard(open_app: OpenApp) -> None:
    """Once a turn's claim is somebody else's, its words are void, and what it goes on saying is not heard."""
    post, other = open_app(), open_app()
    async with aclosing(other.watch("chat/1")) as watch, speaking(post) as say:
        say("mine")
        assert await take(watch, 1) == ["mine"]
        post.database.transact(lambda conn, *, now: _TAKE_OVER(conn, stream="chat/1").rowcount)
        assert await take(watch, 1) == [""]
        say(" and more")
        more = asyncio.create_task(take(watch, 1))
        await asyncio.sleep(3 * partials.EVERY / 1e6)
        assert [row.said for row in left(post)] == ["mine"]
        assert not more.done()
        more.cancel()
        await asyncio.wait({more})
        say(None)
        await eventually(lambda: left(post) == [])
        assert post.read("chat/1") == []


SPEAKER = """
@post.turn("chat", lease=2)
async def chat(turn):
    turn.partial("from another process")
    while not os.path.exists("go on"):
        await asyncio.sleep(0.01)
    turn.record("reply", {})
"""


async def test_another_process_is_heard(open_app: OpenApp, processes: Processes, tmp_path: Any) -> None:
    """A process without loops hears what a turn in another process says, then its entries."""
    post = open_app()
    publish(post, "chat/1", 1)
    processes.write(SPEAKER)
    processes.run()
    async with aclosing(post.watch("chat/1")) as watch:
        assert await take(watch, 1) == ["from another process"]
        (tmp_path / "go on").touch()
        assert await take(watch, 2) == [1, 2]
    assert left(post) == []


async def test_the_words_of_a_killed_process_are_void(open_app: OpenApp, processes: Processes, tmp_path: Any) -> None:
    """When the lease of a process that was killed in the middle of a sentence is over, its words are void.

    They are so before anyone takes its turn over, and gone when somebody has.
    """
    post = open_app()
    publish(post, "chat/1", 1)
    processes.write(SPEAKER)
    killed = processes.run()
    async with aclosing(post.watch("chat/1")) as watch:
        assert await take(watch, 1) == ["from another process"]
        killed.kill()
        killed.wait()
        assert await take(watch, 1) == [""]
        post.turn("chat", lease=2)(lambda turn: None)
        async with post.running():
            assert await take(watch, 1) == [1]
    assert left(post) == []


async def test_a_thousand_watchers_look_together(open_app: OpenApp) -> None:
    """1,000 watchers of 1,000 streams make at most 30 queries a second of their process, and all get their entries."""
    post, watches = open_app(), open_app()
    post.recorded("chat")
    watches.database  # its own first queries are no watcher's
    queries = 0

    def count(_conn: Any, _cursor: Any, sql: str, *_: Any) -> None:
        nonlocal queries
        queries += "postroad_" in sql or "set_config" in sql

    event.listen(watches.database.engine, "before_cursor_execute", count)
    began = time.monotonic()
    told = [asyncio.create_task(first_of(watches, n)) for n in range(WATCHERS)]
    async with post.running():
        for start in range(0, WATCHERS, 100):
            with post.begin() as tx:
                for n in range(start, start + 100):
                    tx.publish(f"chat/{n}", NOTE, {"n": n}, key="k")
            for _ in range(20):  # however often it is woken
                watches._wakeups.ping()
                await asyncio.sleep(0.005)
        assert await asyncio.gather(*told) == list(range(WATCHERS))
    took = time.monotonic() - began
    assert 5 < queries <= 30 * (took + 0.2), (queries, took)
    await eventually(lambda: not watchers())


async def first_of(post: Postroad, number: int) -> int:
    async with aclosing(post.watch(f"chat/{number}")) as watch:
        async for one in watch:
            assert isinstance(one, Entry)
            return int(one.data["n"])
    raise AssertionError("a watch ended by itself")


async def test_a_watch_leaves_nothing_behind(open_app: OpenApp) -> None:
    """Cancelled, closed or broken off, a watch leaves no task, and the last one no thread and no subscription."""
    post = open_app()
    publish(post, "chat/1", 1)
    before = asyncio.all_tasks()
    waiting = [asyncio.create_task(take(post.watch("chat/1"), 1)) for _ in range(3)]
    await eventually(watchers)
    assert len(watchers()) == 1
    assert asyncio.all_tasks() == before | set(waiting)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await eventually(lambda: not watchers())
    post.recorded("chat")
    await post.adrain()
    async with aclosing(post.watch("chat/1")) as watch:
        assert await take(watch, 1) == [1]
    await eventually(lambda: not watchers())
    assert asyncio.all_tasks() == before
    assert not any(post._wakeups._sleepers.values())
    assert not post.hub()._waiting


def test_an_event_loop_after_another(open_app: OpenApp) -> None:
    """Watches work in one event loop after another, and in two at once, which look together in one thread."""
    post = open_app()
    post.recorded("chat")
    for n in (1, 2):
        publish(post, "chat/1", n)
        post.drain()
        assert asyncio.run(take(post.watch("chat/1"), n)) == list(range(1, n + 1))
    told: list[Any] = []
    threads = [
        threading.Thread(target=lambda: told.append(asyncio.run(take(post.watch("chat/1", after=2), 1))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    until(lambda: sum(map(len, post.hub()._waiting.values())) == 2, "both wait")
    assert watchers() == [THREAD]
    publish(post, "chat/1", 3)
    post.drain()
    for thread in threads:
        thread.join()
    assert told == [[3], [3]]
    until(lambda: not watchers(), "the thread has ended")


async def test_a_database_that_is_away_ends_no_watch(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the database does not answer a watch goes on, which is logged once; then it tells what came meanwhile."""
    post = open_app()
    post.recorded("chat")
    publish(post, "chat/1", 1)
    await post.adrain()
    database, failures, read = post.database, 0, post.database.read

    def away(*args: Any, **kwargs: Any) -> Any:
        nonlocal failures
        if threading.current_thread().name != THREAD or failures == 3:
            return read(*args, **kwargs)
        failures += 1
        raise OperationalError("SELECT 1", None, Exception("nobody there"), connection_invalidated=True)

    monkeypatch.setattr(database, "read", away)
    with caplog.at_level(logging.INFO, "postroad"):
        async with aclosing(post.watch("chat/1")) as watch:
            assert await take(watch, 1) == [1]
    said = [record.getMessage() for record in caplog.records if "watching" in record.getMessage()]
    assert failures == 3
    assert len(said) == 2
    assert "nobody there" in said[0]
    assert "after 3 failures" in said[1]


async def test_words_that_cannot_be_written_are_written_later(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the database does not take what turns say, the turn goes on; the whole text is told when it does."""
    post = open_app()
    failures, carry = 0, partials.partials.carry

    def away(*args: Any, **kwargs: Any) -> Any:
        nonlocal failures
        if failures == 3:
            return carry(*args, **kwargs)
        failures += 1
        raise OperationalError("INSERT", None, Exception("nobody there"))

    monkeypatch.setattr(partials.partials, "carry", away)
    with caplog.at_level(logging.INFO, "postroad"):
        async with aclosing(post.watch("chat/1")) as watch, speaking(post) as say:
            for piece in ("one ", "two"):
                say(piece)
            assert await take(watch, 1) == ["one two"]
            say(None)
            assert await take(watch, 2) == [1, 2]
    said = [record.getMessage() for record in caplog.records if "what turns say" in record.getMessage()]
    assert failures == 3
    assert len(said) == 2
    assert "after 3 failures" in said[1]


async def test_closing_the_app_ends_its_watches(open_app: OpenApp) -> None:
    """A watch of an app that is closed is refused, with its thread gone; the app can be watched anew."""
    post = open_app()
    waiting = asyncio.create_task(take(post.watch("chat/1"), 1))
    await eventually(watchers)
    held = post.hub()
    post.close()
    with pytest.raises(Refused, match="closed"):
        await waiting
    assert not watchers()
    with pytest.raises(Refused, match="closed"):
        held.ask(Asked("chat/1", 0), print)
    post.recorded("chat")
    publish(post, "chat/1", 1)
    await post.adrain()
    async with aclosing(post.watch("chat/1")) as watch:
        assert await take(watch, 1) == [1]


async def test_a_deleted_stream_ends_its_watches(open_app: OpenApp) -> None:
    """Whoever watches a stream that is deleted gets its entries, then the refusal; so does who comes later."""
    post = open_app()
    post.recorded("chat")
    publish(post, "chat/1", 1)
    await post.adrain()
    async with aclosing(post.watch("chat/1")) as watch:
        assert await take(watch, 1) == [1]
        waiting = asyncio.create_task(take(watch, 1))
        await asyncio.sleep(0)
        with post.begin() as tx:
            tx.delete_stream("chat/1")
        with pytest.raises(StreamDeleted):
            await waiting
    async with aclosing(post.watch("chat/1", after=1)) as watch:
        with pytest.raises(StreamDeleted):
            await take(watch, 1)


def test_a_wrong_watch_is_refused_at_once(open_app: OpenApp) -> None:
    """A stream's name or a place that cannot be is refused before anything is waited for."""
    post = open_app()
    for stream, after in (("", 0), ("no type", 0), ("chat/1", -1), ("chat/1", True), ("chat/1", 2**63)):
        with pytest.raises(InvalidInput):
            post.watch(stream, after=after)


def test_others_may_wait_without_an_event_loop(open_app: OpenApp) -> None:
    """The hub tells a plain function, once, from its thread, and nobody who has left before."""
    post = open_app()
    post.recorded("chat")
    hub: Hub = post.hub()
    told: list[Any] = []
    heard = threading.Event()
    hub.ask(Asked("chat/1", 0), lambda news: (told.append(news), heard.set()))
    leave = hub.ask(Asked("chat/1", 0), lambda news: told.append("of one who left"))
    leave()
    leave()
    publish(post, "chat/1", 1)
    post.drain()
    assert heard.wait(60)
    (news,) = told
    assert [entry.key for entry in news.entries] == ["n1"]
    until(lambda: not watchers(), "the thread has ended")


def test_a_harness_can_be_watched(harness: Open) -> None:
    """In a test's harness a watch hears what an async handler says, and its entries, without a thread."""
    post = Postroad("sqlite:///unused.db")
    go_on = asyncio.Event()

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        turn.partial("Hello")
        await go_on.wait()

    async def both() -> list[int | str]:
        with post.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": 1})
        drained = asyncio.create_task(h.adrain())
        async with aclosing(post.watch("chat/1")) as watch:
            told = await take(watch, 1)
            assert not watchers()
            go_on.set()
            told += await take(watch, 1)
        assert (await drained).turns == 1
        return told

    h = harness(post)
    assert asyncio.run(both()) == ["Hello", 1]
    assert left(post) == []


def test_a_drain_leaves_no_words_behind(harness: Open) -> None:
    """What a turn that failed has said is gone when a drain is over, and so is the task that carried it."""
    post = Postroad("sqlite:///unused.db")

    @post.turn("chat", attempts=2)
    async def chat(turn: Turn) -> None:
        turn.partial("Hello")
        while not left(post):
            await asyncio.sleep(0.01)
        raise RuntimeError

    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1})

    async def drained() -> None:
        with pytest.raises(RuntimeError):
            await h.adrain()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(drained())
    assert left(post) == []
