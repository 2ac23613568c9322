"""Loops that find nothing: they look together, rarely, and never so rarely that they take themselves for stalled."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad import Postroad
from postroad.engine import looks, loop
from postroad.engine.looks import Looks
from postroad.engine.loop import Loop, Step
from postroad.engine.running import Loops
from postroad.engine.wakeups import Wakeups
from postroad.model.clock import SECOND, FakeClock
from postroad.model.entropy import SeededEntropy
from postroad.store.database import Database
from postroad.store.executor import Inline
from tests.cases.apps import OpenApp, open_app, until

__all__ = ["open_app"]
QUESTIONS = 3  # of worker, dispatcher and pump


class Read(Database):
    """A database that counts its reads, beneath the loops."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}", executor=Inline())
        self.reads = 0

    async def aread(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.reads += 1
        await asyncio.sleep(0)  # as a real one: others come meanwhile
        return await super().aread(fn, *args, **kwargs)


@contextmanager
def reading(path: Path) -> Iterator[tuple[Read, Looks]]:
    database = Read(path)
    try:
        yield database, Looks(database, SeededEntropy(1))
    finally:
        database.close()


def number(conn: Connection, wanted: int) -> int:
    return int(conn.exec_driver_sql("SELECT ?", (wanted,)).scalar_one())


def failing(conn: Connection) -> None:
    raise LookupError("no answer")


def test_what_is_asked_at_one_moment_is_read_at_once(sqlite_path: Path) -> None:
    """Questions of one moment share a transaction and each gets its own answer; later ones have another."""

    async def ask(looks: Looks) -> list[int]:
        first = await asyncio.gather(*(looks.read(number, n) for n in range(3)))
        return [*first, await looks.read(number, 7)]

    with reading(sqlite_path) as (database, together):
        assert asyncio.run(ask(together)) == [0, 1, 2, 7]
        assert database.reads == 2


def test_a_question_that_comes_while_others_are_read_is_not_lost(sqlite_path: Path) -> None:
    """Whoever asks while a transaction is under way is answered by the next one."""

    async def ask(looks: Looks) -> list[int]:
        first = asyncio.ensure_future(looks.read(number, 1))
        while database.reads == 0:
            await asyncio.sleep(0)
        return list(await asyncio.gather(first, looks.read(number, 2)))

    with reading(sqlite_path) as (database, together):
        assert asyncio.run(ask(together)) == [1, 2]
        assert database.reads == 2


def test_a_failure_is_everybodys_and_passes(sqlite_path: Path) -> None:
    """What fails in a shared transaction fails for all in it, and for nobody afterwards."""

    async def ask(looks: Looks) -> tuple[list[Any], int]:
        found = await asyncio.gather(looks.read(number, 1), looks.read(failing), return_exceptions=True)
        return found, await looks.read(number, 2)

    with reading(sqlite_path) as (_, together):
        found, after = asyncio.run(ask(together))
    assert [str(one) for one in found] == ["no answer", "no answer"]
    assert after == 2


def test_one_who_gives_up_takes_nothing_from_the_others(sqlite_path: Path) -> None:
    """Where one who has asked is cancelled, the others get their answers."""

    async def ask(looks: Looks) -> int:
        first = asyncio.ensure_future(looks.read(number, 1))
        second = asyncio.ensure_future(looks.read(number, 2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    with reading(sqlite_path) as (_, together):
        assert asyncio.run(ask(together)) == 2


def test_what_an_earlier_event_loop_has_left_is_nobodys(sqlite_path: Path) -> None:
    """Questions that were asked as their event loop ended hold up none of the next one."""

    asking: list[asyncio.Task[int]] = []  # it begins, and the transaction that it asks for doesn't any more

    async def ask_and_go(looks: Looks) -> None:
        asking.append(asyncio.ensure_future(looks.read(number, 1)))

    with reading(sqlite_path) as (database, together):
        asyncio.run(ask_and_go(together))
        assert asking[0].cancelled()
        assert database.reads == 0
        assert asyncio.run(asyncio.wait_for(together.read(number, 2), 10)) == 2


def test_those_who_look_equally_often_look_at_the_same_moments(sqlite_path: Path) -> None:
    """From wherever it is asked the next moment is the same one, and the one after it comes a whole length later."""
    clock = FakeClock()
    database = Database(f"sqlite:///{sqlite_path}", clock=clock, executor=Inline())
    together = Looks(database, SeededEntropy(3))
    moments = []
    for _ in range(10):
        wait = together.wait(SECOND)
        assert 0 < wait <= SECOND
        moments.append(clock.monotonic() + wait)
        clock.advance(0.3)
    database.close()
    assert sorted(set(moments)) == [moments[0] + n * SECOND for n in range(len(set(moments)))]


class Idler(Loop):
    """A loop that never finds anything, over a clock that the test moves."""

    name = "idler"
    topics = ()

    def __init__(self, lease: int, clock: FakeClock) -> None:
        self._lease = lease
        database: Any = SimpleNamespace(clock=clock, is_sqlite=True)
        wakeups, entropy = Wakeups(), SeededEntropy(lease)
        wakeups.hearing = True
        parts: Any = SimpleNamespace(
            poll=loop.POLL, database=database, wakeups=wakeups, entropy=entropy, looks=Looks(database, entropy)
        )
        super().__init__(parts)
        self.steps = 0

    def leases(self) -> list[int]:
        return [self._lease]

    async def due(self) -> int | None:
        return None

    async def step(self) -> Step:
        self.steps += 1
        self.stalls.look()
        self.stalls.answered()
        return Step.NOTHING


LEASES = [*range(1, 40), *(x + 0.5 for x in range(1, 20)), 300, 3_600]


@pytest.mark.parametrize("lease", LEASES, ids=str)
def test_an_idle_loop_is_not_taken_for_a_stalled_one(lease: float) -> None:
    """However long its leases are, an idle loop proves in time that the database is there, and may take claims over."""
    clock = FakeClock()
    idler = Idler(round(lease * SECOND), clock)

    async def run() -> int:
        rests = 0
        while clock.monotonic() < max(60, 3 * lease) * SECOND:
            pause = await idler._stepped()
            clock.advance(pause / SECOND + 0.002)  # as late as a timer is
            assert idler._idle or not rests, "it has to look more often, only to show that it is there"
            rests += idler._idle
            if idler._idle:
                assert idler.stalls.silent() <= idler._lease // 6
        return rests

    rests = asyncio.run(run())
    assert rests > 10
    assert idler.steps > 0


def small(post: Postroad) -> Postroad:
    """An app that has all three loops."""
    post.sender("mail")(lambda dispatch: None)

    @post.turn("load")
    def load(turn: Any) -> None:
        turn.record("Seen", {"keys": [event.key for event in turn.events]})

    return post


def test_idle_loops_share_their_looks(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they find nothing, all loops of a process look in one transaction, and what comes then is found at once."""
    shared: list[int] = []
    read = looks._all

    def counted(conn: Connection, asked: Sequence[Callable[[Connection], Any]]) -> list[Any]:
        shared.append(len(asked))
        return read(conn, asked)

    monkeypatch.setattr(looks, "_all", counted)
    post = small(open_app())
    seen = threading.Event()
    post.sender("told")(lambda dispatch: seen.set())
    with Loops(lambda: post.runtime(poll=SECOND // 20), post.resources):
        until(lambda: shared.count(QUESTIONS) >= 5, "looks of all loops together")
        with post.begin() as tx:
            tx.publish("load/1", "Go", {}, key="e1")
            tx.send("told", {})
        assert seen.wait(30)
        until(lambda: post.streams.get("load/1").version >= 2, "the event and what was seen")
