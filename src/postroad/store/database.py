"""The database: runs plain functions over a connection as transactions, from sync and async code alike."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from postroad.model.clock import SECOND, Clock, SystemClock
from postroad.model.errors import (
    CommitUnknown,
    NestedTransaction,
    TransactionAborted,
)
from postroad.model.failpoints import failpoint
from postroad.model.ids import check_schema
from postroad.store import dialects, groups
from postroad.store.executor import Executor, Inline, Threads, outcome
from postroad.store.groups import Item, Member, Verb, Waiting
from postroad.store.sqlite_reads import readers
from postroad.store.statements import SCHEMA_OPTION

R = TypeVar("R")
Lock = Callable[[Connection], object]

TRIES = 5
BUSY_TRIES = 2  # each of them has waited for the write lock already: 10 s in all
SYNC_EVERY = 5 * SECOND
VAGUE = SECOND // 100  # an answer that took longer is asked for again
_inside = threading.local()


class FollowingClock:
    """A clock that runs with this host's steady clock, never ahead of what the database server's was read to be.

    One that is ahead would fire timers early and take over claims that still run. A reading says that the server's
    clock stood somewhere between question and answer; what we have is moved into these bounds, no further, so that a
    slow answer spoils nothing.
    """

    def __init__(self, base: Clock) -> None:
        self._base = base
        self._offset: int | None = None
        self._synced = 0
        self._vague = True

    def wall(self) -> int:
        return self._base.wall() if self._offset is None else self._base.monotonic() + self._offset

    def monotonic(self) -> int:
        return self._base.monotonic()

    def due(self) -> bool:
        """Whether it is time to read the server's clock again."""
        return self._vague or self._base.monotonic() - self._synced > SYNC_EVERY

    def follow(self, server: int, asked: int) -> None:
        """Take over a reading of the server's clock that was asked for at `asked` (steady time)."""
        answered = self._base.monotonic()
        least, most = server - answered, server - asked
        self._offset = least if self._offset is None else max(least, min(self._offset, most))
        self._synced = answered
        self._vague = answered - asked > VAGUE


@dataclass(frozen=True, slots=True)
class Asked(Generic[R]):
    """A transaction as it was asked for."""

    fn: Callable[..., R]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    lock: Lock | None = None
    _: KW_ONLY
    urgent: bool = False
    grouped: bool = False

    def carry_out(self, conn: Connection, clock: Clock) -> R:
        """Lock, read the clock, and run the function."""
        locked = None if self.lock is None else self.lock(conn)
        more = self.kwargs if locked is None else {**self.kwargs, "locked": locked}
        return self.fn(conn, *self.args, now=clock.wall(), **more)


class Database:
    """Transactions over one engine.

    Args:
        engine: The user's engine, or a URL for one of our own.
        schema: The Postgres schema of our tables; None: the connection's own.
        clock: The source of every `now`; None: the server's time on Postgres, the host's on SQLite.
        executor: Where transactions run; None: threads, one for SQLite.
    """

    def __init__(
        self,
        engine: Engine | str | URL,
        *,
        schema: str | None = None,
        clock: Clock | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._owns_engine = isinstance(engine, str | URL)
        self.engine = self._check(engine)
        self.schema = None if schema is None else check_schema(schema)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self._following = None if clock or self.is_sqlite else FollowingClock(SystemClock())
        self.clock: Clock = clock or self._following or SystemClock()
        self._executor = executor or (
            Threads(plain=1) if self.is_sqlite else Threads(plain=6, urgent=2, group=2, alone=2)
        )
        self._waiting = Waiting()
        # On the user's engine: handlers may hold its every connection for longer than a lease, and what is urgent
        # must not wait for them. The pool's own way to connect, beside the pool; as many as there are urgent threads.
        self._beside = None if self._owns_engine or self.is_sqlite else self.engine.pool.recreate()
        self._readers: Executor = self._executor if self.inline else Threads(plain=2)
        self._reading = readers(self.engine) if self.is_sqlite and not self.inline else None

    @staticmethod
    def _check(engine: Engine | str | URL) -> Engine:
        return dialects.open_engine(engine) if isinstance(engine, str | URL) else dialects.check_engine(engine)

    @property
    def inline(self) -> bool:
        """Whether all runs in its caller's thread, as in tests and simulation: no thread of ours may use it."""
        return isinstance(self._executor, Inline)

    def transact(
        self,
        fn: Callable[..., R],
        *args: Any,
        lock: Lock | None = None,
        urgent: bool = False,
        **kwargs: Any,
    ) -> R:
        """Run `fn(conn, *args, now=..., **kwargs)` in one transaction and commit it.

        `lock` takes row locks first: `now` is read after it, so that a wait for a lock costs no lease. What it
        returns, if anything, is handed to `fn` as `locked`.

        Raises:
            NestedTransaction: Called from inside a transaction function.
            DatabaseBusy: SQLite's write lock could not be had within about 10 s.
            CommitUnknown: The connection broke while COMMIT was under way.
            TransactionAborted: The function swallowed an error that had aborted the transaction.
        """
        return self._submit(Asked(fn, args, kwargs, lock, urgent=urgent)).result()

    async def atransact(
        self,
        fn: Callable[..., R],
        *args: Any,
        lock: Lock | None = None,
        urgent: bool = False,
        **kwargs: Any,
    ) -> R:
        """`transact` for async code: one hop for the whole transaction, never abandoned half-way."""
        return await outcome(self._submit(Asked(fn, args, kwargs, lock, urgent=urgent)))

    def group(self, verb: Verb[Item, R], item: Item) -> R:
        """The verb's answer for this item, which is written together with whatever else waits to be written.

        The verb must be one of ours: no user code runs in such a transaction.

        Raises:
            As `transact`, and what the verb refuses: each caller hears of its own item only.
        """
        return self._join(verb, item).result()

    async def agroup(self, verb: Verb[Item, R], item: Item) -> R:
        """`group` for async code."""
        return await outcome(self._join(verb, item))

    def read(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run `fn(conn, *args, **kwargs)` over one unchanging view of the database; it must not write."""
        self._refuse_nesting()
        return self._readers.submit(lambda: self._read(fn, args, kwargs)).result()

    async def aread(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """`read` for async code."""
        self._refuse_nesting()
        return await outcome(self._readers.submit(lambda: self._read(fn, args, kwargs)))

    def bind(self, conn: Connection) -> Connection:
        """Let our statements know, on a connection of the user's, which schema our tables are in."""
        return conn.execution_options(**{SCHEMA_OPTION: self.schema})

    def close(self) -> None:
        """End our threads; close the engine if it is ours."""
        self._executor.close()
        while self._waiting:  # their own calls were not taken on any more, or had taken others
            self._run_group()
        self._readers.close()
        for pool in (self._beside, self._reading):
            if pool is not None:
                pool.dispose()
        if self._owns_engine:
            self.engine.dispose()

    def _submit(self, asked: Asked[R]) -> Future[R]:
        self._refuse_nesting()
        return self._executor.submit(lambda: self._run(asked), lane="urgent" if asked.urgent else "plain")

    def _join(self, verb: Verb[Item, R], item: Item) -> Future[R]:
        self._refuse_nesting()
        member = Member(verb, item)
        self._waiting.add(member)
        try:
            self._executor.submit(self._run_group, lane="group")
        except RuntimeError:  # closed; unless a call that came before has taken it along
            if self._waiting.remove(member):
                raise
        return member.answer

    def _run_group(self) -> None:
        """Write what waits. There is a call for whatever a group leaves, so that no member is left."""
        members = self._waiting.take()
        if self._waiting and self._executor.shares_calls:
            with suppress(RuntimeError):  # closed; `close` writes what is left
                self._executor.submit(self._run_group, lane="group")
        for member in self._write_group(members):
            try:
                self._executor.submit(partial(self._write_alone, member), lane="alone")
            except RuntimeError:  # closed; what was taken on is written all the same
                self._write_alone(member)

    def _write_group(self, members: list[Member]) -> list[Member]:
        return groups.run(members, lambda fn: self._run(Asked(fn, grouped=True))) if members else []

    def _write_alone(self, member: Member) -> None:
        try:
            (found,) = self._run(Asked(member.verb.run, ([member.item],)))
        except BaseException as error:
            member.settle(error)
        else:
            member.settle(found)

    @staticmethod
    def _refuse_nesting() -> None:
        if getattr(_inside, "transaction", False):
            raise NestedTransaction

    def _run(self, asked: Asked[R]) -> R:
        for tried in range(1, TRIES + 1):
            try:
                return self._once(asked)
            except DBAPIError as error:
                if dialects.is_busy(error) and tried >= BUSY_TRIES:
                    raise dialects.busy(error) from error
                if tried == TRIES or not dialects.is_transient(error, grouped=asked.grouped):
                    raise
        raise AssertionError("unreachable")

    def _once(self, asked: Asked[R]) -> R:
        with dialects.connect(self.engine, self._beside if asked.urgent else None) as conn:
            dialects.prepare(self.bind(conn), grouped=asked.grouped)
            with conn.begin() as transaction, _Inside():
                self._follow(conn)
                if asked.grouped and not dialects.is_ours(conn):
                    dialects.bound_lock_waits(conn, milliseconds=dialects.LOCK_WAIT_MILLISECONDS)
                result = asked.carry_out(conn, self.clock)
                if dialects.aborted(conn):
                    raise TransactionAborted
                failpoint("commit.before")
                self._commit(conn, transaction)
            failpoint("commit.after")
            return result

    @staticmethod
    def _commit(conn: Connection, transaction: Any) -> None:
        try:
            transaction.commit()
        except BaseException as error:
            lost = conn.invalidated or getattr(error, "connection_invalidated", False)
            if not conn.invalidated:
                # SQLAlchemy takes the transaction for ended now, whatever has failed. On the connection it may be open
                # still, and whoever had that next would commit it with their own.
                conn.invalidate(error)
            if lost and isinstance(error, DBAPIError):
                raise CommitUnknown(str(error.orig)) from error
            raise

    def _follow(self, conn: Connection) -> None:
        if self._following is not None and self._following.due():
            asked = self._following.monotonic()
            server = dialects.database_micros(conn)
            if server is not None:
                self._following.follow(server, asked)

    def _read(self, fn: Callable[..., R], args: Any, kwargs: Any) -> R:
        with dialects.connect(self.engine, self._reading) as conn:
            dialects.prepare(self.bind(conn), read=True)
            with conn.begin() as transaction, _Inside():
                with nullcontext() if self._reading is not None else dialects.refusing_writes(conn):
                    result = fn(conn, *args, **kwargs)
                transaction.commit()  # nothing was written; a ROLLBACK would forget what is prepared
            return result


class _Inside:
    """Marks this thread as being inside a transaction function."""

    def __enter__(self) -> None:
        _inside.transaction = True

    def __exit__(self, *error: object) -> None:
        _inside.transaction = False
