"""Waiting for news of streams: everyone in a process asks its one hub, which looks for all of them together."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue

from sqlalchemy import Connection

from postroad.engine.telemetry import logger
from postroad.engine.wakeups import TOPICS, Wakeups
from postroad.model.clock import SECOND
from postroad.model.errors import Refused, StreamDeleted
from postroad.model.events import Entry, Partial
from postroad.store import watching
from postroad.store.database import Database
from postroad.store.watching import Asked, News

GAP = SECOND // 8  # between two looks, whatever happens
POLL = SECOND // 5  # from one look to the next where nobody wakes us
INLINE_POLL = SECOND // 50
AWAY_GAPS_MAX = 16  # how much longer the gap gets while the database is away
FOLLOW_EVERY = 30 * SECOND
CLOSE_SECONDS = 5
Tell = Callable[[News | Exception], None]


class Hub:
    """Looks for news of all streams that somebody waits for, in one transaction that reads, some times a second.

    Its thread begins with the first who waits and ends when nobody does. Where there may be no thread, in a test's
    harness, those who wait look themselves.
    """

    def __init__(self, database: Database, wakeups: Wakeups) -> None:
        self.database = database
        self._wakeups = wakeups
        self._changed = threading.Condition()
        self._waiting: dict[Asked, list[Tell]] = {}  # those who have waited longest come first
        self._thread: threading.Thread | None = None
        self._woken = False
        self._closed = False
        self._failures = 0
        self._followed: int | None = None

    def ask(self, asked: Asked, tell: Tell) -> Callable[[], None]:
        """Have `tell` called once, from any thread, when there is news; call the result to wait no longer.

        News are entries with a seq above `after`, other words of the running turn than were `heard`, or the stream's
        deletion. `tell` gets an error instead if the hub is closed. It must not wait.

        Raises:
            Refused: The app was closed.
        """
        with self._changed:
            if self._closed:
                raise _over()
            if self._thread is None and not self.database.inline:
                thread = threading.Thread(target=self._run, name="postroad-watching", daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.setdefault(asked, []).append(tell)
            self._woken = True
            self._changed.notify()
        return partial(self._leave, asked, tell)

    async def news(self, asked: Asked) -> News:
        """Wait for news of a stream. Whoever is cancelled leaves nothing behind.

        Raises:
            Refused: The app was closed.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[News] = loop.create_future()
        leave = self.ask(asked, partial(_answer, loop, answer))
        try:
            while self.database.inline and not answer.done():
                await self._look_here()
                await asyncio.wait({answer}, timeout=INLINE_POLL / SECOND)
            return await answer
        finally:
            leave()

    def wait(self, asked: Asked, *, seconds: float | None) -> News | None:
        """`news` for a thread, which waits no longer than that; where no thread looks, it looks once itself.

        Raises:
            Refused: The app was closed.
        """
        told: SimpleQueue[News | Exception] = SimpleQueue()
        leave = self.ask(asked, told.put)
        try:
            if self.database.inline:
                self._look()
            answer = told.get(timeout=0 if self.database.inline else seconds)
        except Empty:
            return None
        finally:
            leave()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Tell everyone who waits that it is over, and end the thread."""
        with self._changed:
            self._closed = True
            left = [tell for tells in self._waiting.values() for tell in tells]
            self._waiting.clear()
            thread = self._thread
            self._changed.notify()
        for tell in left:
            tell(_over())
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=CLOSE_SECONDS)

    def _leave(self, asked: Asked, tell: Tell) -> None:
        with self._changed:
            tells = self._waiting.get(asked, [])
            if tell in tells:
                tells.remove(tell)
            if not tells:
                self._waiting.pop(asked, None)
            if not self._waiting:
                self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def _run(self) -> None:
        unsubscribe = self._wakeups.subscribe((*TOPICS, "entries"), self._wake)
        try:
            self._look()
            while self._rest():
                self._look()
        finally:
            unsubscribe()

    def _rest(self) -> bool:
        """Wait for the next look. False: nobody waits for it, and this thread is over."""
        gap = GAP * min(2**self._failures, AWAY_GAPS_MAX)
        with self._changed:
            self._changed.wait_for(lambda: self._closed, gap / SECOND)
            # Whoever was told asks again at once, if at all: nobody is left only if nobody wants to know more.
            self._changed.wait_for(lambda: self._woken or not self._waiting, max(0, POLL - gap) / SECOND)
            if not self._waiting:
                self._thread = None
            return self._thread is not None

    def _look(self) -> None:
        asked = self._asked()
        try:
            self._follow()
            found = self.database.read(watching.look, asked, now=self.database.clock.wall()) if asked else {}
        except Exception as error:
            self._failed(error)
        else:
            self._found(found)

    def _follow(self) -> None:
        """Have the database's clock read, which only transactions that write do: a process that watches has none.

        By a clock that is ahead all leases would be over, and nobody would seem to say anything.
        """
        now = self.database.clock.monotonic()
        if not self.database.is_sqlite and (self._followed is None or now - self._followed > FOLLOW_EVERY):
            self.database.transact(_nothing)
            self._followed = now

    async def _look_here(self) -> None:
        asked = self._asked()
        try:
            found = await self.database.aread(watching.look, asked, now=self.database.clock.wall())
        except Exception as error:
            self._failed(error)
        else:
            self._found(found)

    def _asked(self) -> list[Asked]:
        with self._changed:
            self._woken = False
            return list(self._waiting)

    def _found(self, found: Mapping[Asked, News]) -> None:
        if self._failures:
            logger.info("watching: the database answers again after %d failures", self._failures)
            self._failures = 0
        with self._changed:
            told = [(tell, news) for asked, news in found.items() for tell in self._waiting.pop(asked, [])]
        for tell, news in told:
            tell(news)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            logger.warning("watching: the database does not answer (trying again): %s", error)


async def watched(hub: Callable[[], Hub], stream: str, *, after: int) -> AsyncGenerator[Entry | Partial, None]:
    """A stream's entries behind a place, in order, and between them what its running turn says."""
    of, heard = hub(), ""
    shown: Partial | None = None
    while True:
        news = await of.news(Asked(stream, after, heard))
        for entry in news.entries:
            shown = None
            yield entry
        after = max(after, news.upto)
        if after < news.version:
            continue  # what is said now comes behind entries that were not told yet
        if news.deleted:
            raise StreamDeleted(stream, stream=stream)
        heard = news.heard
        said = news.partial or Partial(stream, "" if shown is None else shown.turn, "")
        if said != shown and (said.text or shown is not None):
            shown = said if said.text else None
            yield said


def _answer(loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[News]", told: News | Exception) -> None:
    try:
        loop.call_soon_threadsafe(_settle, answer, told)
    except RuntimeError:  # the loop was closed over this: nobody waits
        return


def _settle(answer: "asyncio.Future[News]", told: News | Exception) -> None:
    if answer.done():
        return
    if isinstance(told, Exception):
        answer.set_exception(told)
    else:
        answer.set_result(told)


def _nothing(conn: Connection, *, now: int) -> None:
    return None


def _over() -> Refused:
    return Refused("The app was closed; its streams are not watched any more.")
