"""A harness for users' tests: the app's own code over a database of the test, with a clock that the test moves."""

import asyncio
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from sqlalchemy import Connection

from postroad.engine.app import Postroad
from postroad.engine.calls import InlineCalls
from postroad.engine.declarations import Sender, is_async
from postroad.engine.loop import Loop, Parts, Stalls
from postroad.engine.running import Drained, build, drain
from postroad.model.clock import FakeClock, span
from postroad.model.dispatches import Dispatch
from postroad.model.entropy import SeededEntropy
from postroad.model.errors import InvalidInput, PostroadError, Refused, Span, shown
from postroad.model.events import Entry
from postroad.model.ids import check_name, check_stream
from postroad.model.kinds import Kind
from postroad.model.payload import whole
from postroad.store import log, migrations, moments
from postroad.store.database import Database
from postroad.store.executor import Inline
from postroad.testing.joined import JoinedDatabase

T = TypeVar("T")
ENTRIES_MAX = 100_000
TIMES_MAX = 10_000


class Harness:
    """Runs an app's handlers over a database of the test's own, in one thread, with a `FakeClock`.

    Inside the block the app's `begin`, `join` and `read` work on that database. `drain()` runs what is due now,
    `advance(1800)` steps through each due moment of the next half hour. Sends are captured unless
    `senders="run"`. An exception that a handler did not raise on purpose (RetryLater, GiveUp, OutcomeUnknown, or
    one given to `fail`) is raised again by `drain` and `advance`.

    Args:
        post: The app.
        database: A database URL for this test; None: a SQLite file that is removed afterwards.
        on: The test's own connection, in a transaction: everything happens inside it.
        start: Where the clock stands at first.
        senders: "capture" records what would be sent and calls it delivered; "run" runs the real senders.
        seed: Where ids, tokens and jitter come from; a second harness on the same database needs another one.
    """

    def __init__(
        self,
        post: Postroad,
        *,
        database: str | None = None,
        on: object | None = None,
        start: str | datetime = "2026-01-01T00:00Z",
        senders: Literal["capture", "run"] = "capture",
        schema: str | None = None,
        seed: int = 0,
    ) -> None:
        if senders not in ("capture", "run"):
            raise InvalidInput(f"senders must be 'capture' or 'run', got {senders!r}.", field="senders")
        if not isinstance(post, Postroad):
            raise InvalidInput(f"post must be a Postroad, got {shown(post)}.", field="post")
        self.post = post
        self.clock = FakeClock(start)
        self._url = database
        self._on = on
        self._schema = schema
        self._seed = whole(seed, "seed", least=0, most=2**63 - 1)
        self._capture = senders == "capture"
        self._captured: list[Dispatch[Any]] = []
        self._planned: dict[str, deque[Exception]] = {}
        self._unplanned: list[BaseException] = []
        self._expected: list[Exception] = []
        self._folder: Path | None = None
        self._saved: dict[str, Any] = {}
        self._parts: Parts | None = None
        self._loops: list[Loop] = []

    def __enter__(self) -> Self:
        if self._on is not None and not isinstance(self._on, Connection):
            raise Refused("Pass a synchronous connection as `on`, or leave it out.")
        self._install(self._database())
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self._restore()

    def drain(self) -> Drained:
        """Run what is due now, and what that makes due, until nothing is."""
        return _run(self.adrain)

    def advance(self, by: Span) -> Drained:
        """Let time pass, stopping at each moment at which something is due."""
        return _run(lambda: self.aadvance(by))

    async def adrain(self) -> Drained:
        """Run what is due now, and what that makes due, until nothing is."""
        parts = self._opened()
        parts.counts.clear()
        await self._drain()
        return self._drained()

    async def aadvance(self, by: Span) -> Drained:
        """Let time pass, stopping at each moment at which something is due."""
        parts = self._opened()
        target = self.clock.wall() + span(by, "by")
        parts.counts.clear()
        await self._drain()
        while (moment := self._next()) is not None and moment <= target:
            self.clock.advance_to(moment)
            await self._drain()
        self.clock.advance_to(target)
        await self._drain()
        return self._drained()

    def sent(self, kind: Kind[T], *, to: str | None = None) -> Sequence[Dispatch[T]]:
        """The attempts of a kind that were captured, oldest first; failed ones (`fail`) are not among them."""
        if not isinstance(kind, Kind):
            raise InvalidInput(f"kind must be a Kind, got {shown(kind)}.", field="kind")
        return [d for d in self._captured if d.kind in kind.names and to in (None, d.to)]

    def fail(self, kind: Kind[Any] | str, error: Exception, *, times: int = 1) -> None:
        """Have the next sends of a kind raise this error."""
        name = kind.name if isinstance(kind, Kind) else check_name(kind, "kind")
        if not isinstance(error, Exception):
            raise InvalidInput(f"error must be an exception, got {shown(error)}.", field="error")
        self.post.declared(name)
        self._planned.setdefault(name, deque()).extend([error] * whole(times, "times", most=TIMES_MAX))

    def entries(self, stream: str) -> Sequence[Entry]:
        """A stream's whole log."""
        return self._opened().database.read(log.read, check_stream(stream), after=0, limit=ENTRIES_MAX)

    def _database(self) -> Database:
        if self._on is not None:
            assert isinstance(self._on, Connection)
            return JoinedDatabase(self._on, clock=self.clock, schema=self._schema)
        url = self._url
        if url is None:
            self._folder = Path(tempfile.mkdtemp(prefix="postroad-test-"))
            url = f"sqlite:///{self._folder / 'test.db'}"
        return Database(url, schema=self._schema, clock=self.clock, executor=Inline())

    def _install(self, database: Database) -> None:
        post = self.post
        if self._on is None or database.read(migrations.current) == 0:
            migrations.migrate(database)
        self._saved = {name: getattr(post, name) for name in ("_opened", "entropy", "_calls")}
        post._opened, post.entropy, post._calls = database, SeededEntropy(self._seed), InlineCalls()
        self._saved["_observers"] = list(post._telemetry._observers)
        post.observe(self._observe)
        self._parts = post.parts()
        self._parts.retention = None  # a test looks at what has happened, however far it moves the clock
        self._saved["senders"] = dict(post._registry.senders)
        post._registry.senders.update(
            {name: _replaced(sender, self._sender_for(sender)) for name, sender in post._registry.senders.items()}
        )
        self._loops = build(self._parts)
        for loop in self._loops:
            loop.stalls = _NoStalls(database)

    def _restore(self) -> None:
        post = self.post
        database = self._opened().database
        post._registry.senders.clear()
        post._registry.senders.update(self._saved["senders"])
        post._telemetry._observers[:] = self._saved["_observers"]
        post._opened, post.entropy, post._calls = (self._saved[n] for n in ("_opened", "entropy", "_calls"))
        self._parts = None
        database.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _opened(self) -> Parts:
        if self._parts is None:
            raise PostroadError("Use the harness inside its `with` block.")
        return self._parts

    async def _drain(self) -> None:
        await drain(self._loops)
        if self._unplanned:
            error = self._unplanned[0]
            self._unplanned.clear()
            raise error

    def _drained(self) -> Drained:
        parts = self._opened()
        return Drained(parts.counts, parts.database.read(moments.waiting))

    def _next(self) -> int | None:
        """The next moment at which something is due, or at which a stream may have become quiet."""
        parts = self._opened()
        registry, database = parts.registry, parts.database
        found = database.read(
            moments.next_moment,
            kinds=list(registry.senders),
            types=list(registry.deciders),
            after=self.clock.wall(),
        )
        debounces = [decider.debounce for decider in registry.deciders.values() if decider.debounce]
        if debounces and database.read(moments.waiting_events) > 0:
            quiet = self.clock.wall() + min(debounces)
            return quiet if found is None else min(found, quiet)
        return found

    def _sender_for(self, sender: Sender) -> Callable[[Dispatch[Any]], Any]:
        async def send(dispatch: Dispatch[Any]) -> Any:
            planned = next((self._planned[n] for n in sender.kind.names if self._planned.get(n)), None)
            if planned:
                error = planned.popleft()
                self._expected.append(error)
                raise error
            self._captured.append(dispatch)
            if self._capture:
                return None
            value = sender.fn(dispatch)
            return await value if is_async(sender.fn) else value

        return send

    def _observe(self, name: str, values: Mapping[str, Any]) -> None:
        if name in ("turn.raised", "send.raised", "turn.error"):
            error = values["error"]
            if not any(error is one for one in self._expected) and not isinstance(error, PostroadError):
                self._unplanned.append(error)


class _NoStalls(Stalls):
    """The test moves the clock: time that passes between two steps is no stall."""

    def may_take_over(self, lease: int) -> bool:
        return True


def _replaced(sender: Sender, fn: Callable[[Dispatch[Any]], Any]) -> Sender:
    return replace(sender, fn=fn)


def _run(work: Callable[[], Coroutine[Any, Any, Drained]]) -> Drained:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        running = False
    else:
        running = True
    if running:
        raise Refused("An event loop is running: use `await adrain()` and `await aadvance()`.")
    # Not inside `except`: what a handler raises would be shown as the consequence of that error.
    return asyncio.run(work())
