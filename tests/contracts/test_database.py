"""Transactions: what a transaction function may rely on, and how each way to fail is told apart."""

import asyncio
import re
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

import postroad.sqlite
from postroad.model import failpoints
from postroad.model.clock import SECOND, FakeClock, SystemClock
from postroad.model.errors import (
    CommitUnknown,
    DatabaseBusy,
    InvalidInput,
    NestedTransaction,
    NotInTransaction,
    Refused,
    TransactionAborted,
)
from postroad.store import alerts, borrowed, dialects, sqlite_version
from postroad.store import database as database_module
from postroad.store.database import Database
from postroad.store.executor import Inline, Threads
from postroad.store.statements import Statement

on_postgres = pytest.mark.parametrize("database", ["postgres"], indirect=True)
on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)

STREAM = Statement("INSERT INTO {p}streams (id, type, version) VALUES (:id, 't', 0)")
BUMP = Statement("UPDATE {p}streams SET version = version + 1 WHERE id = :id")
LOCK = Statement("SELECT 1 FROM {p}streams WHERE id = :id {for_update}")
STREAMS = Statement("SELECT id, version FROM {p}streams ORDER BY id")


def add(conn: Connection, name: str, *, now: int = 0) -> int:
    """Insert a stream; the time that was handed in."""
    STREAM(conn, id=name)
    return now


def streams(conn: Connection) -> dict[str, int]:
    """Every stream with its version."""
    return {row.id: row.version for row in STREAMS(conn)}


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    failpoints.arm(None)


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask until it is so; the suite's timeout ends a wait that has no end."""
    while not condition():
        time.sleep(0.002)


def is_blocked(database: Database, pid: int) -> bool:
    with database.engine.connect() as conn:
        return bool(conn.execute(text("SELECT cardinality(pg_blocking_pids(:pid)) > 0"), {"pid": pid}).scalar_one())


def backend(conn: Connection) -> int:
    pid: int = conn.execute(text("SELECT pg_backend_pid()")).scalar_one()
    return pid


# Time


@on_postgres
def test_now_is_read_after_the_lock(database: Database, clock: FakeClock) -> None:
    """A transaction that waited for a row's lock gets the time at which it had it."""
    database.transact(add, "a")
    before, pid = clock.wall(), []

    def lock(conn: Connection) -> None:
        pid.append(backend(conn))
        LOCK(conn, id="a").all()

    def now_of(conn: Connection, *, now: int) -> int:
        return now

    with ThreadPoolExecutor(1) as pool, database.engine.begin() as holder:
        LOCK(database.bind(holder), id="a").all()
        waiting = pool.submit(database.transact, now_of, lock=lock)
        wait_until(lambda: bool(pid) and is_blocked(database, pid[0]))
        clock.advance(20)
        holder.commit()
        assert waiting.result() == before + 20 * SECOND


@on_sqlite
def test_now_is_read_after_the_write_lock(database: Database, clock: FakeClock) -> None:
    """On SQLite the wait is for the database's one lock; the time is the one after it."""
    before, reached = clock.wall(), threading.Event()
    original = dialects.prepare

    def prepare(conn: Connection, **options: bool) -> None:
        original(conn, **options)
        reached.set()

    with ThreadPoolExecutor(1) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialects, "prepare", prepare)
        with database.engine.begin() as holder:
            add(holder, "a")
            waiting = pool.submit(database.transact, add, "b")
            reached.wait()
            clock.advance(20)
        assert waiting.result() == before + 20 * SECOND


def test_now_follows_the_database(postgres_url: str, fresh_schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is five minutes ahead works with the server's time."""

    class Ahead(SystemClock):
        def wall(self) -> int:
            return super().wall() + 300 * SECOND

    monkeypatch.setattr(database_module, "SystemClock", Ahead)
    database = Database(postgres_url, schema=fresh_schema)

    def both(conn: Connection, *, now: int) -> tuple[int, int | None]:
        return now, dialects.database_micros(conn)

    assert database.clock.wall() > SystemClock().wall() + 200 * SECOND  # nobody has asked the server yet
    for _ in range(3):
        now, server = database.transact(both)
        assert server is not None
        assert abs(server - now) < SECOND
    assert abs(database.clock.wall() - SystemClock().wall()) < 60 * SECOND
    database.close()


def test_a_following_clock_asks_now_and_then(clock: FakeClock) -> None:
    """At first and every five seconds; in between the steady clock carries it, whatever the wall clock does."""
    following = database_module.FollowingClock(clock)
    assert following.due()
    following.follow(1_000, following.monotonic())
    assert not following.due()
    clock.jump(3600)
    clock.advance(4)
    assert following.wall() == 1_000 + 4 * SECOND
    assert not following.due()
    clock.advance(1.5)
    assert following.due()


def test_a_slow_answer_never_puts_the_clock_ahead(clock: FakeClock) -> None:
    """The server read its clock somewhere between question and answer: the latest is taken, and it is asked again."""
    following = database_module.FollowingClock(clock)
    asked = following.monotonic()
    clock.advance(2)
    following.follow(50 * SECOND, asked)
    assert following.wall() == 50 * SECOND
    assert following.due()


def test_a_slow_answer_spoils_no_quick_one(clock: FakeClock) -> None:
    """What is known is only moved into the bounds of what a reading allows."""
    following = database_module.FollowingClock(clock)
    following.follow(50 * SECOND, following.monotonic())
    asked = following.monotonic()
    clock.advance(2)
    following.follow(51 * SECOND, asked)  # it says 51 to 53 s, by the quick one it is 52
    assert following.wall() == 52 * SECOND
    following.follow(60 * SECOND, following.monotonic())  # set forward
    assert following.wall() == 60 * SECOND
    following.follow(40 * SECOND, following.monotonic())  # and back
    assert following.wall() == 40 * SECOND


# What a transaction is


def test_what_it_returns_is_committed(database: Database) -> None:
    """Others see the rows once `transact` has returned; its time is the clock's."""
    assert database.transact(add, "a") == database.clock.wall()
    assert database.read(streams) == {"a": 0}


def test_an_error_leaves_nothing(database: Database) -> None:
    """What the function raises comes out as it is, and none of its rows stays."""

    def fail(conn: Connection, *, now: int) -> None:
        add(conn, "a")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        database.transact(fail)
    assert database.read(streams) == {}


@pytest.mark.parametrize("inner", ["transact", "read", "atransact", "aread"])
def test_a_transaction_inside_a_transaction_is_refused(database: Database, inner: str) -> None:
    """Of every form, before anything is begun; afterwards the thread is free again."""

    def nested(conn: Connection, *, now: int) -> None:
        add(conn, "a")
        result = getattr(database, inner)(streams)
        if asyncio.iscoroutine(result):
            asyncio.run(result)

    with pytest.raises(NestedTransaction):
        database.transact(nested)
    assert database.read(streams) == {}
    database.transact(add, "b")


def test_inline_transactions_are_refused_too(database: Database) -> None:
    """In the caller's own thread as well, where nesting would not even wait."""
    inline = Database(database.engine, schema=database.schema, clock=database.clock, executor=Inline())

    def nested(conn: Connection, *, now: int) -> None:
        inline.transact(add, "a")

    with pytest.raises(NestedTransaction):
        inline.transact(nested)
    inline.transact(add, "b")
    inline.close()
    assert database.read(streams) == {"b": 0}


@on_postgres
def test_an_aborted_transaction_never_answers_committed(database: Database) -> None:
    """A function that swallows a database error has lost its rows: the caller is told."""
    database.transact(add, "a")

    def swallow(conn: Connection, *, now: int) -> str:
        add(conn, "b")
        try:
            add(conn, "a")
        except IntegrityError:
            return "fine"
        raise AssertionError("no conflict")

    with pytest.raises(TransactionAborted, match="nothing was written"):
        database.transact(swallow)
    assert database.read(streams) == {"a": 0}


@on_sqlite
def test_sqlite_does_not_abort(database: Database) -> None:
    """There a failed statement undoes itself alone, so that the rest is committed in truth."""

    def swallow(conn: Connection, *, now: int) -> None:
        add(conn, "a")
        with pytest.raises(IntegrityError):
            add(conn, "a")

    database.transact(swallow)
    assert database.read(streams) == {"a": 0}


@pytest.mark.parametrize("how", ["transact", "read"])
def test_a_transaction_without_statements(database: Database, how: str) -> None:
    """A function that touches nothing is no error."""
    assert getattr(database, how)(lambda conn, *, now=0: 7) == 7


# Errors before COMMIT are the database's word that nothing was written


@on_postgres
def test_a_deadlock_is_tried_again(database: Database) -> None:
    """Two that lock each other's rows both come through; the one that was chosen ran twice, and counts once."""
    database.transact(add, "a")
    database.transact(add, "b")
    both_hold, ran = threading.Barrier(2, timeout=30), []

    def bump(conn: Connection, first: str, second: str, *, now: int) -> None:
        ran.append(first)
        BUMP(conn, id=first)
        if ran.count(first) == 1:
            both_hold.wait()
        BUMP(conn, id=second)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(database.transact, bump, *names) for names in ("ab", "ba")]:
            done.result()
    assert len(ran) == 3
    assert database.read(streams) == {"a": 2, "b": 2}


class Failing:
    """A transaction function that fails with a database error `times` times."""

    def __init__(self, times: int, **orig: Any) -> None:
        self.times, self.ran = times, 0
        self._orig = type("Orig", (Exception,), orig)("the database says so")

    def __call__(self, conn: Connection, *, now: int) -> str:
        self.ran += 1
        if self.ran <= self.times:
            raise OperationalError("SELECT", {}, self._orig)
        return "done"


@pytest.mark.parametrize("orig", [{"sqlstate": code} for code in ("40001", "40P01", "55P03")])
def test_transient_errors_are_retried_within_bounds(database: Database, orig: dict[str, str]) -> None:
    """Five times at the most, then the database's own error comes out."""
    soon = Failing(4, **orig)
    assert database.transact(soon) == "done"
    for_ever = Failing(99, **orig)
    with pytest.raises(OperationalError):
        database.transact(for_ever)
    assert (soon.ran, for_ever.ran) == (5, 5)


@pytest.mark.parametrize("orig", [{"sqlstate": "23505"}, {"sqlstate": "08006"}, {}], ids=["unique", "lost", "none"])
def test_other_errors_are_not_retried(database: Database, orig: dict[str, str]) -> None:
    """What would fail again, or may have happened, is run once."""
    failing = Failing(1, **orig)
    with pytest.raises(DBAPIError):
        database.transact(failing)
    assert failing.ran == 1


def test_there_is_one_place_that_retries() -> None:
    """Nothing else in the package asks whether an error is transient."""
    package = Path(database_module.__file__).parent.parent
    asking = [path.name for path in package.rglob("*.py") if "is_transient(" in path.read_text()]
    assert sorted(asking) == ["database.py", "dialects.py"]


def test_a_locked_sqlite_file_is_busy(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write lock that is never given back ends in DatabaseBusy after two waits, with the likely cause and cure."""
    assert dialects.BUSY_MILLISECONDS * database_module.BUSY_TRIES == 10_000
    monkeypatch.setattr(dialects, "BUSY_MILLISECONDS", 20)
    database = Database(f"sqlite:///{sqlite_path}", clock=FakeClock())
    with database.engine.begin():
        once, tried = database._once, []
        monkeypatch.setattr(database, "_once", lambda *args, **kw: (tried.append(1), once(*args, **kw)))
        with pytest.raises(DatabaseBusy, match=r"nothing was written.*post\.join\(connection\).*locked"):
            database.transact(add, "a")
    assert len(tried) == 2
    database.close()


# COMMIT may be lost in answer only


@on_postgres
def test_a_connection_that_breaks_in_commit_is_unknown(database: Database) -> None:
    """The server ended the session as COMMIT was sent: nobody here can say what became of it."""
    pid: list[int] = []

    def kill(name: str) -> None:
        if name == "commit.before":
            with database.engine.connect() as conn:
                conn.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid[0]})

    def insert(conn: Connection, *, now: int) -> None:
        pid.append(backend(conn))
        add(conn, "a")

    failpoints.arm(kill)
    with pytest.raises(CommitUnknown):
        database.transact(insert)
    failpoints.arm(None)
    assert database.read(streams) == {}
    database.transact(add, "b")  # the next one gets a sound connection


class CommitEater:
    """A proxy that hands a COMMIT on to the server, waits for the answer, and hangs up instead of passing it."""

    def __init__(self, upstream: str, folder: Path) -> None:
        self._upstream = upstream
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(folder / ".s.PGSQL.5432"))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._server.accept()
        eating = threading.Event()
        with client, socket.socket(socket.AF_UNIX) as server, ThreadPoolExecutor(1) as pool:
            server.connect(self._upstream)
            pool.submit(self._answer, server, client, eating)
            while sent := client.recv(65_536):
                if b"COMMIT\0" in sent:  # not the COMMITTED of the isolation level
                    eating.set()
                server.sendall(sent)
            server.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _answer(server: socket.socket, client: socket.socket, eating: threading.Event) -> None:
        while answer := server.recv(65_536):
            if eating.is_set():
                client.shutdown(socket.SHUT_RDWR)
                return
            client.sendall(answer)

    def close(self) -> None:
        self._thread.join()
        self._server.close()


@on_postgres
def test_a_commit_whose_answer_is_lost_is_unknown(database: Database, tmp_path_factory: Any) -> None:
    """It has happened although no answer came: the caller hears `unknown`, never that it failed, and no rerun."""
    host = database.engine.url.query.get("host") or ""
    if not str(host).startswith("/"):
        pytest.skip("the proxy speaks over a Unix socket")
    folder = tmp_path_factory.mktemp("p")
    proxy = CommitEater(f"{host}/.s.PGSQL.5432", folder)
    through = Database(
        database.engine.url.update_query_dict({"host": str(folder)}), schema=database.schema, clock=database.clock
    )
    ran = []

    def insert(conn: Connection, *, now: int) -> None:
        ran.append(now)
        add(conn, "a")

    with pytest.raises(CommitUnknown, match="never run it again blindly"):
        through.transact(insert)
    assert len(ran) == 1
    assert database.read(streams) == {"a": 0}
    through.close()
    proxy.close()


def test_a_commit_that_is_refused_is_no_unknown(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in COMMIT over a connection that stands is the database's own answer."""
    error = IntegrityError("COMMIT", {}, Exception("a deferred constraint"))

    class Transaction:
        def commit(self) -> None:
            raise error

    with database.engine.connect() as conn, pytest.raises(IntegrityError):
        Database._commit(conn, Transaction())


# Reading


def test_what_failed_before_its_commit_is_not_committed_by_the_next(database: Database) -> None:
    """Whatever fails when a transaction is about to be committed: it leaves nothing, and hinders nobody."""

    def fails(_: Connection) -> None:
        raise LookupError("a hook of somebody's")

    database.transact(add, "first")
    event.listen(database.engine, "commit", fails)
    for name in ("lost", "lost too"):
        with pytest.raises(LookupError):
            database.transact(add, name)
    event.remove(database.engine, "commit", fails)
    for name in ("second", "third"):
        database.transact(add, name)
    assert database.read(streams).keys() == {"first", "second", "third"}


def test_a_read_sees_one_view(database: Database) -> None:
    """What others commit meanwhile is not seen until the next read."""
    database.transact(add, "a")

    def twice(conn: Connection) -> tuple[dict[str, int], dict[str, int]]:
        before = streams(conn)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(database.transact, add, "b").result()
        return before, streams(conn)

    other = Database(database.engine, schema=database.schema, clock=database.clock, executor=Inline())
    assert other.read(twice) == ({"a": 0}, {"a": 0})
    assert other.read(streams) == {"a": 0, "b": 0}
    other.close()


def test_a_read_cannot_write(database: Database) -> None:
    """Whatever its function tries, nothing of it stays."""
    try:
        database.read(add, "a")
    except DBAPIError:
        pass
    assert database.read(streams) == {}


def test_reads_and_writes_take_turns(database: Database) -> None:
    """Whoever has read may write next, whichever thread or connection it is given."""
    for number in range(20):
        database.transact(add, f"r{number}")
        assert len(database.read(streams)) == number + 1
    with pytest.raises(DBAPIError):
        database.read(add, "no")
    database.transact(add, "last")
    assert sorted(database.read(streams))[:1] == ["last"]


@pytest.mark.parametrize("way", ["plain", "urgent", "read"])
@pytest.mark.parametrize("url", ["postgresql+psycopg://nobody@127.0.0.1:1/none", "sqlite:////nowhere/none.db"])
def test_what_cannot_be_reached_is_away(url: str, way: str) -> None:
    """However we come to a connection, on our engine or on the user's, there being none is told in one way."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        postroad.sqlite.configure(engine)
    for given in (url, engine):
        database = Database(given)
        with pytest.raises(DBAPIError) as told:
            if way == "read":
                database.read(lambda conn: None)
            else:
                database.transact(lambda conn, *, now: None, urgent=way == "urgent")
        assert dialects.is_away(told.value)
        database.close()


@on_sqlite
def test_a_read_does_not_wait_for_a_writer(database: Database) -> None:
    """Beside an open transaction that has written, a read goes through at once and sees what was before."""
    with database.engine.begin() as conn:
        add(conn, "a")
        assert database.read(streams) == {}


# Async callers


async def test_a_cancelled_caller_waits_for_the_answer(database: Database) -> None:
    """The transaction ends first, then the cancellation comes out; the rows are there."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(conn: Connection, *, now: int) -> None:
        begun.set()
        go_on.wait()
        add(conn, "a")

    task = asyncio.create_task(database.atransact(slow))
    await asyncio.to_thread(begun.wait)
    for _ in range(2):
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=0.05)
        assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await database.aread(streams) == {"a": 0}


async def test_a_cancelled_caller_of_a_failing_one(database: Database) -> None:
    """The cancellation comes out, and the error is not reported as never looked at."""
    begun, go_on = threading.Event(), threading.Event()

    def fail(conn: Connection, *, now: int) -> None:
        begun.set()
        go_on.wait()
        raise LookupError

    task = asyncio.create_task(database.atransact(fail))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.wait({task}, timeout=0.02)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_async_callers_get_results_and_errors(database: Database) -> None:
    """As sync ones do; many at once share the executor."""
    await asyncio.gather(*(database.atransact(add, f"s{n}") for n in range(10)))
    assert len(await database.aread(streams)) == 10
    with pytest.raises(IntegrityError):
        await database.atransact(add, "s1")


def test_urgent_transactions_have_a_lane_of_their_own() -> None:
    """Renewals and settles don't queue behind what is slow; without such a lane they take their turn."""
    go_on = threading.Event()
    threads = Threads(plain=1, urgent=1)
    slow = threads.submit(go_on.wait)
    assert threads.submit(lambda: "urgent", lane="urgent").result() == "urgent"
    go_on.set()
    assert slow.result()
    threads.close()
    one = Threads(plain=1)
    assert one.submit(lambda: 1, lane="urgent").result() == 1
    one.close()


# Engines


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_postgres_urls(scheme: str) -> None:
    """Every common spelling means psycopg 3; nothing is connected."""
    engine = dialects.open_engine(f"{scheme}://u:p@localhost/db")
    assert engine.url.drivername == "postgresql+psycopg"
    assert engine.url.password == "p"


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://h/d", "postgresql+psycopg2://h/d"])
def test_urls_that_are_refused(url: str) -> None:
    """In-memory SQLite, which connections can't share, and other databases or drivers."""
    with pytest.raises(InvalidInput, match="database must be"):
        Database(url)


def test_engines_that_are_refused(tmp_path: Path) -> None:
    """An async one, an unprepared SQLite one and what is no engine: each with the cure."""
    with pytest.raises(Refused, match="not an AsyncEngine"):
        dialects.check_engine(create_async_engine("sqlite+aiosqlite:///x"))
    with pytest.raises(Refused, match=r"postroad\.sqlite\.configure"):
        dialects.check_engine(create_engine(f"sqlite:///{tmp_path}/x.db"))
    with pytest.raises(InvalidInput, match="must be a URL or an Engine"):
        dialects.check_engine(7)
    with pytest.raises(InvalidInput, match="engine must be a sqlite one"):
        postroad.sqlite.configure(create_engine("postgresql+psycopg://localhost/db"))


def test_the_user_s_engine_stays_open(sqlite_path: Path) -> None:
    """Closing the database ends our threads, not an engine that isn't ours."""
    engine = create_engine(f"sqlite:///{sqlite_path}")
    assert postroad.sqlite.configure(postroad.sqlite.configure(engine)) is engine
    Database(engine).close()
    with engine.begin() as conn:
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
    engine.dispose()


@on_sqlite
def test_reads_before_the_first_write_are_inside(database: Database) -> None:
    """A configured engine begins at once, so that nobody writes between a read and the write it decides."""
    with database.engine.begin() as conn:
        assert streams(conn) == {}
        raw = sqlite3.connect(str(database.engine.url.database), timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            raw.execute("INSERT INTO postroad_streams (id, type, version) VALUES ('x', 't', 0)")
        raw.close()


# Joining a user's transaction


@pytest.fixture
def plain(database: Database) -> Iterator[Engine]:
    """The user's own engine on the same database, without any preparation."""
    engine = create_engine(database.engine.url)
    yield engine
    engine.dispose()


def test_autocommit_is_refused(plain: Engine) -> None:
    """A connection that commits each statement can't hold our rows and the user's together."""
    with plain.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        with pytest.raises(NotInTransaction, match="autocommit"):
            borrowed.check_joined(conn)


@pytest.mark.parametrize("wrote", [False, True])
def test_an_open_transaction_is_joined(database: Database, plain: Engine, wrote: bool) -> None:
    """Before and after the user's first statement: our rows go with the user's."""
    with plain.connect() as conn:
        if wrote:
            add(database.bind(conn), "mine")
        borrowed.check_joined(conn)
        borrowed.check_joined(conn)  # again: nothing changes
        add(database.bind(conn), "ours")
        conn.rollback()
        assert database.read(streams) == {}
        borrowed.check_joined(conn)
        add(database.bind(conn), "ours")
        conn.commit()
    assert database.read(streams) == {"ours": 0}


@on_sqlite
@pytest.mark.parametrize("joined", [True, False])
def test_a_savepoint_does_not_commit(database: Database, plain: Engine, joined: bool) -> None:
    """SQLite's driver would commit a SAVEPOINT before the first INSERT when it is released; joining cures that."""
    with plain.connect() as conn:
        if joined:
            borrowed.check_joined(conn)
        with conn.begin_nested():
            add(conn, "a")
        conn.rollback()
    assert database.read(streams) == ({} if joined else {"a": 0})


FOREIGN = """
import pysqlite3, sqlite3, sys
from sqlalchemy import create_engine
from postroad.model.errors import Refused
from postroad.store import borrowed
assert pysqlite3.Connection is not sqlite3.Connection
engine = create_engine("sqlite:///" + sys.argv[1], module=pysqlite3)
with engine.connect() as conn:
    try:
        borrowed.check_joined(conn)
    except Refused as error:
        print(error)
"""


def test_another_sqlite_library_is_refused(sqlite_path: Path) -> None:
    """Two copies of SQLite in one process drop each other's locks; the refusal names the cure."""
    said = subprocess.run(
        [sys.executable, "-c", FOREIGN, str(sqlite_path)], capture_output=True, text=True, check=True
    ).stdout
    assert "another SQLite library (pysqlite3" in said
    assert "import postroad.bundled_sqlite" in said


async def test_an_async_connection_is_joined(database: Database) -> None:
    """Through `run_sync`, on both databases' async drivers."""
    url = database.engine.url
    engine = create_async_engine(url.set(drivername="sqlite+aiosqlite") if database.is_sqlite else url)
    async with engine.connect() as conn:
        await conn.run_sync(borrowed.check_joined)
        await conn.run_sync(lambda plain: add(database.bind(plain), "a"))
        await conn.rollback()
    await engine.dispose()
    assert await database.aread(streams) == {}


# SQLite's version


@pytest.mark.parametrize("version", ["3.7.0", "3.40.1", "3.44.5", "3.50.6", "3.51.2"])
def test_a_faulty_sqlite_is_warned_of(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning names the version, the fault's page and the cure."""
    monkeypatch.setattr(sqlite3, "sqlite_version", version)
    monkeypatch.setattr(sqlite3, "sqlite_version_info", tuple(map(int, version.split("."))))
    with pytest.warns(sqlite_version.SQLiteVersionWarning, match=re.escape(version)) as caught:
        sqlite_version.warn_of_sqlite_fault()
    assert "import postroad.bundled_sqlite" in str(caught[0].message)
    assert "walresetbug" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_without_a_user_s_line_the_warning_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only our code and libraries called, no line of theirs is named."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 40, 1))
    monkeypatch.setattr(sqlite_version.sysconfig, "get_path", lambda _: "")  # as if all files were a library's
    with pytest.warns(sqlite_version.SQLiteVersionWarning) as caught:
        sqlite_version.warn_of_sqlite_fault()
    assert (caught[0].filename, caught[0].lineno) == ("postroad", 0)


@pytest.mark.parametrize("version", [(3, 6, 23), (3, 44, 6), (3, 50, 7), (3, 51, 3), (3, 52, 0)])
def test_a_sound_sqlite_is_not(version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions before the fault, with the repair, and those to which it was carried back."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sqlite_version.warn_of_sqlite_fault()


# Several processes on one SQLite file

PROCESS = """
import os, sys, time
from postroad.model.rows import NewAlert
from postroad.store import alerts, migrations
from postroad.store.database import Database
path, go, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.005)
database = Database("sqlite:///" + path)
migrations.migrate(database)
for _ in range(count):
    database.transact(alerts.raise_alerts, [NewAlert(code="c", subject=str(os.getpid()))])
database.close()
"""


@pytest.mark.parametrize("count", [1, 100], ids=["first start", "appending"])
def test_five_processes_on_one_file(sqlite_path: Path, tmp_path: Path, count: int) -> None:
    """Started at the same moment on an empty file: one makes the tables, all write, no lock error comes out."""
    go = tmp_path / "go"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(sqlite_path), str(go), str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    go.touch()
    ended = [process.communicate() for process in processes]
    assert [(process.returncode, said[1]) for process, said in zip(processes, ended, strict=True)] == [(0, "")] * 5
    database = Database(f"sqlite:///{sqlite_path}")
    found = database.read(alerts.list_, limit=1_000)
    assert len(found) == 5 * count
    assert len({row.subject for row in found}) == 5
    database.close()
