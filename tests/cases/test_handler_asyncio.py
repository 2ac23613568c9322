"""User code that raises, blocks, leaks or never ends harms its own dispatch or turn and nothing else."""

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import create_engine

from postroad import Dispatch, Kind, Postroad, Retry, Turn, sqlite
from postroad.engine.calls import RealCalls
from postroad.store import moments
from tests.cases.apps import OpenApp, idle, until

MAIL = Kind("mail", dict[str, str])
NOTE = Kind("note", dict[str, int])
ONCE = Retry(attempts=1)


class Own(BaseException):
    """No Exception."""


RAISED: list[BaseException] = [
    SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), Own("mine"), StopIteration(),
]  # fmt: skip


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_whatever_a_handler_raises_is_its_own_failure(open_app: OpenApp, colour: str) -> None:
    """Each base exception fails its attempt under its class's name; the loops and all other rows go on."""
    post = open_app()
    for n, error in enumerate(RAISED):
        post.sender(f"kind{n}", retry=ONCE)(raising(error, colour))
        post.turn(f"type{n}", attempts=1)(raising(error, colour))
    post.sender("healthy")(lambda d: None)
    with post.running():
        with post.begin() as tx:
            for n in range(len(RAISED)):
                tx.send(f"kind{n}", {}, key=f"k{n}")
                tx.publish(f"type{n}/1", NOTE, {"n": n})
        until(lambda: idle(post), "all have ended")
        with post.begin() as tx:
            tx.send("healthy", {}, key="h")
        until(lambda: idle(post), "the loops are alive")
    for n, error in enumerate(RAISED):
        row = post.dispatches.get(f"k{n}")
        assert row is not None
        name = type(error).__name__
        wrapped = colour == "async" and isinstance(error, StopIteration)  # by the language
        assert (row.status, row.last_error) == (
            "dead_letter", "RuntimeError: coroutine raised StopIteration" if wrapped else str(row.last_error),
        )  # fmt: skip
        assert wrapped or str(row.last_error).startswith(name)
        assert post.read(f"type{n}/1")[0].data["error"] == row.last_error
    healthy = post.dispatches.get("h")
    assert healthy is not None
    assert healthy.status == "delivered"


def raising(error: BaseException, colour: str) -> Callable[[Any], Any]:
    """A handler that raises."""

    def sync(_: Any) -> None:
        raise error

    async def later(_: Any) -> None:
        raise error

    return sync if colour == "sync" else later


class Untellable(Exception):
    """Its text cannot be had."""

    def __init__(self, worse: BaseException) -> None:
        self.worse = worse

    def __str__(self) -> str:
        raise self.worse

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def deep_group() -> BaseException:
    group: Exception = ValueError("innermost")
    for _ in range(3_000):
        group = ExceptionGroup("level", [group])
    return group


def long_chain() -> BaseException:
    error: BaseException = ValueError("first")
    for n in range(1_000):
        following = RuntimeError(f"number {n}")
        following.__cause__ = error
        error = following
    return error


TOLD: dict[str, tuple[Callable[[], BaseException], str]] = {
    "no text": (lambda: Untellable(ValueError("worse")), "Untellable (its text could not be had"),
    "its text ends the process": (lambda: Untellable(SystemExit(3)), "Untellable (its text could not be had"),
    "megabytes": (lambda: ValueError("x" * 50_000_000), "ValueError: xxx"),
    "a group": (lambda: ExceptionGroup("several", [ValueError("a"), TypeError("b")]), "ExceptionGroup: several"),
    "a deep group": (deep_group, "ExceptionGroup: level"),
    "a long chain": (long_chain, "RuntimeError: number 999"),
}


@pytest.mark.parametrize("what", TOLD)
def test_whatever_an_error_is_like_it_is_recorded_by_class_and_short_text(open_app: OpenApp, what: str) -> None:
    """An exception that cannot be printed, pickled, or that is endless, is stored within bounds; nothing else ends."""
    make, said = TOLD[what]
    post = open_app()

    @post.sender(MAIL, retry=ONCE)
    async def mail(d: Dispatch[Any]) -> None:
        raise make()

    @post.turn("chat", attempts=1, lease=60)
    def chat(t: Turn) -> None:
        raise make()

    with post.running():
        with post.begin() as tx:
            tx.send(MAIL, {}, key="k")
            tx.publish("chat/1", NOTE, {"n": 1})
        until(lambda: idle(post), "both have ended")
    row = post.dispatches.get("k")
    assert row is not None
    (entry,) = post.read("chat/1")
    for text in (row.last_error, entry.data["error"]):
        assert text is not None
        assert text.startswith(said)
        assert len(text) <= 2_000


async def test_callers_that_give_up_leak_no_connection(place: dict[str, Any]) -> None:
    """500 sends whose callers stop waiting after a moment leave whole rows, a full pool, and an app that closes."""
    url = place["database"]
    engine = create_engine(url, pool_size=3, max_overflow=0)
    if url.startswith("sqlite"):
        sqlite.configure(engine)
    post = Postroad(engine, schema=place.get("schema"), migrate=True)
    post.elsewhere("mail")
    post.check_schema()

    async def send(n: int) -> None:
        try:
            async with asyncio.timeout(0.001 * (n % 20 + 1)):
                async with post.begin() as tx:
                    tx.send("mail", {}, key=f"a{n}")
                    tx.publish(f"chat/{n}", NOTE, {"n": n}, key="e")
        except TimeoutError:
            return

    for begin in range(0, 500, 50):
        await asyncio.gather(*(send(n) for n in range(begin, begin + 50)))
    async with post.begin() as tx:
        tx.send("mail", {}, key="last")
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    counted = await post.database.aread(moments.waiting)
    rows = {row.key for row in await asyncio.to_thread(lambda: post.dispatches.list(limit=1_000))}
    assert "last" in rows
    assert counted == 2 * len(rows) - 1, "each dispatch has its event"
    async with asyncio.timeout(5):
        await asyncio.to_thread(post.close)
    engine.dispose()


def test_the_garbage_collector_ends_no_loop(open_app: OpenApp) -> None:
    """With collections in the middle of turns and sends all loops live to the end, and every row is carried out."""
    post = open_app()

    @post.sender(MAIL, concurrency=20)
    async def mail(d: Dispatch[Any]) -> None:
        await asyncio.sleep(0)
        if int(d.key) % 10 == 0:
            gc.collect()

    @post.turn("chat")
    async def chat(t: Turn) -> None:
        if t.events[0].kind == "note":
            if int(t.subject) % 10 == 5:
                gc.collect()
            t.send(MAIL, {}, key=t.subject)
            t.set_timer("t", after=0.01)

    with post.running():
        for begin in range(0, 100, 50):
            with post.begin() as tx:
                for n in range(begin, begin + 50):
                    tx.publish(f"chat/{n}", NOTE, {"n": n})
            until(lambda: idle(post))
    assert Counter(row.status for row in post.dispatches.list(limit=1_000)) == {"delivered": 100}
    assert {len(post.read(f"chat/{n}")) for n in range(100)} == {3}


def test_threads_that_never_end_take_no_slot_and_their_results_are_void(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync sender past its deadline is counted as stuck, others get its slot, and its late result changes nothing."""
    post = open_app()
    calls = RealCalls()
    monkeypatch.setattr(post, "_calls", calls)
    release = threading.Event()
    ended = threading.Semaphore(0)

    @post.sender(MAIL, timeout=0.2, concurrency=2, retry=Retry(attempts=3, first=0, cap=0))
    def mail(d: Dispatch[Any]) -> str | None:
        if not d.key.startswith("stuck"):
            return None
        release.wait(60)
        ended.release()
        return "late success"

    with post.running():
        with post.begin() as tx:
            tx.send(MAIL, {}, key="stuck1")
            tx.send(MAIL, {}, key="stuck2")
            tx.send(MAIL, {}, key="healthy")
        until(lambda: idle(post), "all have ended")
        assert calls.stuck == 6
        release.set()
        for _ in range(6):
            assert ended.acquire(timeout=30)
        until(lambda: calls.stuck == 0)
    rows = {row.key: row for row in post.dispatches.list()}
    assert rows["healthy"].status == "delivered"
    for key in ("stuck1", "stuck2"):
        assert (rows[key].status, rows[key].attempt) == ("dead_letter", 3)
        assert rows[key].last_error == "timeout after 0.2 s, still running"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr)
def test_code_beside_the_handlers_may_raise_anything_as_well(open_app: OpenApp, error: BaseException) -> None:
    """Filters, writes, replacements, sinks and observers that raise what would end a process end nothing."""
    post = open_app()
    rung: list[str] = []

    def observer(name: str, values: Any) -> None:
        if name == "turn.ended":
            raise error

    @post.alert_sink
    def sink(alert: Any) -> None:
        rung.append(alert.code)
        if len(rung) == 1:
            raise error

    post.observe(observer)
    post.sender(MAIL)(lambda d: None)
    post.filter("filtered", NOTE)(raising(error, "sync"))
    post.turn("filtered")(lambda t: None)
    post.turn("writing", attempts=1)(lambda t: t.write(raising(error, "sync")))

    @post.turn("doubled", attempts=1, on_duplicate=lambda t, key: raising(error, "sync")(t))
    def doubled(t: Turn) -> None:
        t.send(MAIL, {}, key="taken")

    with post.begin() as tx:
        tx.send(MAIL, {}, key="taken")
    with post.running():
        with post.begin() as tx:
            for stream_type in ("filtered", "writing", "doubled"):
                tx.publish(f"{stream_type}/1", NOTE, {"n": 1})
        until(lambda: len(rung) >= 3, "both dead turns are told of, one of them twice")
        until(lambda: post.read("filtered/1"), "the filtered one landed")
    name = type(error).__name__
    assert [e.kind for e in post.read("filtered/1")] == ["note"]
    for stream in ("writing/1", "doubled/1"):
        (entry,) = post.read(stream)
        assert entry.kind == "postroad.failed"
        assert name in entry.data["error"]


def test_loops_that_could_not_start_or_have_died_are_not_silent(
    open_app: OpenApp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lifespan that fails fails the block at its beginning; a loop that dies is logged, and told at the end."""
    post = open_app()

    @asynccontextmanager
    async def broken(_: Postroad) -> AsyncIterator[None]:
        raise ConnectionError("no such host")
        yield

    monkeypatch.setattr(post, "_user_lifespan", broken)
    with pytest.raises(ConnectionError):
        with post.running():
            pytest.fail("the loops do not run")
    monkeypatch.undo()
    caplog.clear()

    async def killed(*_: Any) -> None:
        raise RuntimeError("a loop's own fault")

    monkeypatch.setattr("postroad.engine.pump.Pump._pause", killed)
    with pytest.raises(RuntimeError, match="own fault"):
        with post.running():
            until(lambda: "the loops have ended" in caplog.text)
