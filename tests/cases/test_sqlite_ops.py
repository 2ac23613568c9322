"""SQLite as it is operated: full disks, checkpoints of other tools, files that grow, processes that must end."""

import logging
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, Integer, create_engine, event
from sqlalchemy.exc import DBAPIError

from postroad import OUTCOME, Kind, Postroad, Turn, sqlite
from postroad.model.clock import SECOND
from postroad.store import runs, schema
from postroad.testing import Harness
from tests.cases.apps import OpenApp, idle, until

NOTE: Kind[Any] = Kind("note", Any)
WAL_BYTES_MAX = 8 * 1024 * 1024


@pytest.fixture
def place(sqlite_path: Path) -> dict[str, Any]:
    """SQLite only."""
    return {"database": f"sqlite:///{sqlite_path}"}


def chain(post: Postroad) -> list[str]:
    """An app whose every event becomes a send; what was sent."""
    sent: list[str] = []
    post.sender("sms")(lambda d: sent.append(d.key))

    @post.turn("chat")
    def chat(t: Turn) -> None:
        for e in t.events:
            if e.kind == "note":
                t.send("sms", {}, key=e.key)

    return sent


class Disk:
    """A disk that is full at a number of pages, as the connections of an engine see it."""

    def __init__(self, engine: Engine) -> None:
        self.pages = 2**31 - 2
        event.listen(engine, "checkout", self._checked_out)

    def _checked_out(self, connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {self.pages}")


def test_a_full_disk_is_told_backed_off_from_and_survived(sqlite_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without space enqueueing raises and decisions wait, without haste; with space all that was accepted is done."""
    engine = sqlite.configure(create_engine(f"sqlite:///{sqlite_path}"))
    disk = Disk(engine)
    post = Postroad(engine)
    sent: list[str] = []
    tries: list[str] = []
    post.sender("sms")(lambda d: sent.append(d.key))

    @post.turn("chat", attempts=2)
    def chat(t: Turn) -> None:
        t.record("thought", {"pad": "x" * 200_000})
        t.send("sms", {}, key=t.events[0].key)

    post.filter("chat", OUTCOME)(lambda e: "sent")
    post.observe(lambda name, values: tries.append(name) if name in ("loop.error", "turn.raised") else None)
    post.check_schema()
    for n in range(3):
        accept(post, f"k{n}", f"chat/{n}")
    disk.pages = 1  # it cannot get smaller than it is: full
    with pytest.raises(DBAPIError, match="database or disk is full"):
        accept(post, "one too many", pad="x" * 10_000)
    with caplog.at_level(logging.WARNING, "postroad"), post.running():
        until(lambda: len(waits_of(caplog)) >= 4)
        assert sent == []
        disk.pages = 2**31 - 2
        until(lambda: idle(post))
    assert sorted(sent) == ["k0", "k1", "k2"]
    ends = {str(r.end) for n in range(3) for r in post.database.read(runs.of_stream, f"chat/{n}")}
    assert ends == {"committed"}, "a disk that is full is no failure of a decision"
    assert len(tries) + len(waits_of(caplog)) < 100, "backed off"
    with engine.connect() as conn:
        assert conn.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
    post.close()
    engine.dispose()


def waits_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of a disk that is full."""
    return [record.getMessage() for record in caplog.records if "is full" in record.getMessage()]


def test_running_loops_hold_no_reader_back(open_app: OpenApp, sqlite_path: Path) -> None:
    """Beside loops and listener the write-ahead log stays small under load and an operator's checkpoint empties it."""
    post = open_app()
    sent = chain(post)
    wal = Path(f"{sqlite_path}-wal")
    largest = 0
    with post.running():
        for batch in range(15):
            with post.begin() as tx:
                for n in range(20):
                    tx.publish(f"chat/{n}", NOTE, {"pad": "x" * 4_000}, key=f"k{batch}/{n}")
            largest = max(largest, wal.stat().st_size)
        until(lambda: idle(post))
        with_checkpoint = sqlite3.connect(sqlite_path, timeout=10)
        # SQLite refuses a checkpoint at once, whatever the timeout, while another one is under way.
        until(lambda: with_checkpoint.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
        with_checkpoint.close()
    assert len(sent) == 300
    assert largest < WAL_BYTES_MAX


def test_a_blocking_checkpoint_beside_a_reader_delays_writers_and_no_more(open_app: OpenApp, sqlite_path: Path) -> None:
    """While another tool waits in a checkpoint for an old reader, writes wait at the most, and all of them are done."""
    post = open_app()
    sent = chain(post)
    accept(post, "before")
    reader = sqlite3.connect(sqlite_path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM postroad_inbox").fetchone()
    accept(post, "meanwhile")  # what the reader does not see yet
    stop = threading.Event()
    tries: list[int] = []

    def checkpoint() -> None:
        tool = sqlite3.connect(sqlite_path, timeout=0.5)
        while not stop.wait(0.3):
            tries.append(tool.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0])
        tool.close()

    tool = threading.Thread(target=checkpoint)
    tool.start()
    try:
        with post.running():
            until(lambda: len(tries) > 1)
            for n in range(10):
                accept(post, f"k{n}")
            until(lambda: len(sent) == 12)
    finally:
        stop.set()
        reader.close()
        tool.join()
    assert 1 in tries, "the reader did hold it up"
    assert sorted(sent) == sorted(["before", "meanwhile", *(f"k{n}" for n in range(10))])


def accept(post: Postroad, key: str, stream: str = "chat/1", pad: str = "") -> None:
    with post.begin() as tx:
        tx.publish(stream, NOTE, {"pad": pad}, key=key)


LEAVER = """
import asyncio, random, sys, threading
from postroad import Postroad

draw = random.Random(119)
post = Postroad(sys.argv[1], migrate=True)
post.sender("sms")(lambda d: None)

async def live():
    async with post.running():
        async with post.begin() as tx:
            tx.send("sms", {})
        await asyncio.sleep(10)

async def main():
    for _ in range(20):
        task = asyncio.ensure_future(live())
        await asyncio.sleep(draw.random() / 10)
        task.cancel()
        await asyncio.wait({task})

asyncio.run(main())
print([t.name for t in threading.enumerate() if not t.daemon and not t.name.startswith(("MainThread", "postroad-db"))])
print("left", flush=True)
"""


def test_a_runtime_that_is_cancelled_anywhere_lets_its_process_end(tmp_path: Path) -> None:
    """Opened and cancelled twenty times at random moments, never closed: the process ends after its last line."""
    path = tmp_path / "left.db"
    process = subprocess.Popen(
        [sys.executable, "-c", "import postroad.bundled_sqlite\n" + LEAVER, f"sqlite:///{path}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    threads, last = process.stdout.readline(), process.stdout.readline()
    left_at = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, threads, last, errors) == (0, "[]\n", "left\n", "")
    assert time.monotonic() - left_at < 2
    with sqlite3.connect(path) as conn:
        assert conn.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    conn.close()
    path.unlink()


@pytest.mark.parametrize("whose", ["ours", "the user's"])
def test_a_commit_is_synced_unless_somebody_says_otherwise(sqlite_path: Path, whose: str) -> None:
    """Every connection of ours and of a configured engine is in WAL mode with synchronous=FULL, time after time."""
    engine = sqlite.configure(create_engine(f"sqlite:///{sqlite_path}"))
    post = Postroad(engine if whose == "the user's" else f"sqlite:///{sqlite_path}")
    post.check_schema()
    for _ in range(3):
        with post.database.engine.connect() as one, post.database.engine.connect() as two:
            one.rollback()
            for conn in (one, two):
                assert conn.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
                assert conn.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
                conn.rollback()
    post.close()
    engine.dispose()


def test_every_time_is_one_number_whoever_wrote_it(place: dict[str, Any]) -> None:
    """API, turns, timers, failures and migration: each time is an integer of microseconds near the clock's."""
    post = Postroad()
    sent = chain(post)
    post.sender("bad")(lambda d: 1 / 0)
    with Harness(post, senders="run", **place) as h:
        with post.begin() as tx:
            tx.publish("chat/1", NOTE, {}, key="k")
            tx.send("sms", {}, after=0.000001, expires=300)
            tx.set_timer("t", after=0.000003, stream="chat/1")
            tx.set_timer("t2", at=h.clock.now, stream="chat/2")
        h.drain()
        h.clock.advance(0.0000015)
        h.drain()
        times = [
            (table, column)
            for table in schema.metadata.tables.values()
            for column in table.columns
            if column.name.endswith("_at") or column.name in ("at", "until")
        ]
        assert len(times) > 15
        assert all(isinstance(column.type, BigInteger | Integer) for _, column in times)
        with post.database.engine.connect() as conn:
            for table, column in times:
                found = conn.exec_driver_sql(
                    f"SELECT DISTINCT typeof({column.name}), abs({column.name} - {h.clock.wall()}) < {400 * SECOND} "
                    f"FROM {table.name} WHERE {column.name} IS NOT NULL"
                ).all()
                assert set(found) <= {("integer", 1)}, (table.name, column.name, found)
            stamp = "SELECT DISTINCT typeof(applied_at) FROM postroad_migrations"
            assert conn.exec_driver_sql(stamp).scalars().all() == ["integer"]
    assert len(sent) == 2
