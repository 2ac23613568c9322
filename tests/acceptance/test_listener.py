"""Wake-ups between processes, and what becomes of them when a connection breaks."""

import contextlib
import queue
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text

from postroad.engine import file_ear, file_watch, listener
from postroad.engine.listener import Listener, topics_of
from postroad.engine.wakeups import TOPICS, Topic, Wakeups
from postroad.model.clock import SECOND
from postroad.store import dialects
from postroad.store.database import Database

pytestmark = pytest.mark.acceptance
WAIT = 20.0
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="of Linux's own way to be told of writes")


class Station:
    """A database with its wake-ups and a listener, as a process has them; what it hears goes into queues."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.wakeups = Wakeups()
        self.listener = Listener(database, self.wakeups)
        self.woken: dict[Topic, queue.SimpleQueue[bool]] = {topic: queue.SimpleQueue() for topic in TOPICS}
        for topic, heard in self.woken.items():
            self.wakeups.subscribe([topic], lambda heard=heard: heard.put(True))

    def hear(self, *topics: Topic) -> None:
        """Wait until each of the topics was woken."""
        for topic in topics:
            self.woken[topic].get(timeout=WAIT)

    def clear(self) -> None:
        """Forget what was heard."""
        for heard in self.woken.values():
            while not heard.empty():
                heard.get()

    def silent(self, topic: Topic) -> bool:
        return self.woken[topic].empty()


@contextlib.contextmanager
def station(database: Database | str, **options: Any) -> Iterator[Station]:
    made = Station(database if isinstance(database, Database) else Database(database, **options))
    made.listener.start()
    try:
        made.hear(*TOPICS)
        yield made
    finally:
        made.listener.close()
        made.database.close()


def plain(url: str) -> str:
    return url.replace("+psycopg", "", 1)


@contextlib.contextmanager
def spy(url: str, channel: str = "postroad") -> Iterator["psycopg.Connection[Any]"]:
    with psycopg.connect(plain(url), autocommit=True) as conn:
        conn.execute(f"LISTEN {channel}")
        yield conn


def announced(conn: "psycopg.Connection[Any]", *, until: str) -> list[str]:
    """What the others said, probes left out, up to and with what says `until`."""
    said = []
    for found in conn.notifies(timeout=WAIT):
        if found.payload != listener.PROBE:
            said.append(found.payload)
        if until in found.payload:
            return said
    raise AssertionError(f"nobody said {until}: {said}")


def listeners(url: str, channel: str = "postroad") -> list[tuple[int, str]]:
    with psycopg.connect(plain(url), autocommit=True) as conn:
        return conn.execute(
            "SELECT pid, state FROM pg_stat_activity WHERE (query LIKE 'LISTEN ' || %(c)s OR query LIKE "
            "'NOTIFY ' || %(c)s || ',%%') AND pid <> pg_backend_pid()",
            {"c": channel},
        ).fetchall()


def test_an_announcement_wakes_another_process(postgres_url: str, fresh_schema: str) -> None:
    """What one process announces wakes exactly these loops of another one."""
    with station(postgres_url, schema=fresh_schema) as one, station(postgres_url, schema=fresh_schema) as other:
        other.clear()
        one.wakeups.announce(["sends"])
        other.hear("sends")
        assert other.silent("turns")
        assert other.silent("timers")


def test_the_own_announcement_does_not_come_back(postgres_url: str, fresh_schema: str) -> None:
    """The announcing process wakes its own loops once, not again when the notification returns."""
    with station(postgres_url, schema=fresh_schema) as one, station(postgres_url, schema=fresh_schema) as other:
        one.clear()
        one.wakeups.announce(["sends"])
        one.hear("sends")
        # What the other one answers arrives at `one` behind its own notification.
        other.hear("sends")
        other.wakeups.announce(["timers"])
        one.hear("timers")
        assert one.silent("sends")


def test_announcements_are_merged(postgres_url: str, fresh_schema: str) -> None:
    """A burst of announcements becomes few notifications that name all of its topics."""
    channel = dialects.channel(fresh_schema)
    with station(postgres_url, schema=fresh_schema) as one, spy(postgres_url, channel) as ear:
        for _ in range(2_000):
            one.wakeups.announce(["turns"])
        one.wakeups.announce(["timers"])
        said = announced(ear, until="timers")
    assert len(said) < 200
    assert {topic for line in said for topic in line.split(",")} == {"turns", "timers"}


def test_what_was_announced_last_is_told_before_the_end(postgres_url: str, fresh_schema: str) -> None:
    """Closing a listener passes on what was announced before."""
    channel = dialects.channel(fresh_schema)
    with spy(postgres_url, channel) as ear, station(postgres_url, schema=fresh_schema) as one:
        one.wakeups.announce(["turns"])
        one.wakeups.announce(["sends"])
        one.listener.close()
        said = announced(ear, until="sends")
    assert {topic for line in said for topic in line.split(",")} == {"turns", "sends"}


def test_a_users_commit_wakes(postgres_url: str, fresh_schema: str) -> None:
    """A user's own transaction wakes the loops when it commits, and not when it is rolled back."""
    with station(postgres_url, schema=fresh_schema) as one:
        one.clear()
        with one.database.engine.connect() as conn:
            dialects.notify_at_commit(one.database.bind(conn), frozenset({"sends"}))
            conn.rollback()
        with one.database.engine.begin() as conn:
            dialects.notify_at_commit(one.database.bind(conn), frozenset({"turns"}))
        one.hear("turns")
        assert one.silent("sends")


def test_schemas_do_not_wake_each_other(postgres_url: str, fresh_schema: str) -> None:
    """Apps in different schemas of a database use different channels."""
    with station(postgres_url, schema=fresh_schema) as one, station(postgres_url, schema="other") as other:
        with station(postgres_url, schema=fresh_schema) as neighbour:
            one.clear()
            other.wakeups.announce(["turns"])
            neighbour.wakeups.announce(["timers"])
            one.hear("timers")
            assert one.silent("turns")


def test_a_killed_connection_is_replaced(postgres_url: str, fresh_schema: str) -> None:
    """After its connection was ended a listener listens again and has every loop look for what it missed."""
    channel = dialects.channel(fresh_schema)
    with station(postgres_url, schema=fresh_schema) as one:
        one.clear()
        [(pid, _)] = listeners(postgres_url, channel)
        with psycopg.connect(plain(postgres_url), autocommit=True) as conn:
            conn.execute("SELECT pg_terminate_backend(%s)", [pid])
            one.hear(*TOPICS)
            one.clear()
            conn.execute(f"NOTIFY {channel}, 'sends'")
            one.hear("sends")


def test_an_announcement_outlives_a_killed_connection(postgres_url: str, fresh_schema: str) -> None:
    """What could not be told because the connection was gone is told over the next one."""
    channel = dialects.channel(fresh_schema)
    with station(postgres_url, schema=fresh_schema) as one:
        [(pid, _)] = listeners(postgres_url, channel)
        with spy(postgres_url, channel) as ear:
            ear.execute("SELECT pg_terminate_backend(%s)", [pid])
            one.wakeups.announce(["sends"])
            assert announced(ear, until="sends")


class Proxy:
    """A TCP proxy in front of the server's socket, that can stop passing anything on without closing."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.swallow = threading.Event()
        self.connections = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            self._open += [near, far]
            self.connections += 1
            silent = self.swallow if self.connections == 1 else threading.Event()
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink, silent), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if not silent.is_set():
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def socket_of(url: str) -> str:
    info = psycopg.conninfo.conninfo_to_dict(plain(url))
    with psycopg.connect(plain(url)) as conn:
        return f"{info['host']}/.s.PGSQL.{conn.info.port}"


@pytest.mark.skipif("POSTROAD_TEST_DATABASE_URL" in __import__("os").environ, reason="needs a Unix socket")
def test_a_half_open_connection_is_noticed(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that neither answers nor breaks is given up by the self-probe."""
    for name in ("PROBE_EVERY", "PROBE_WAIT", "ANSWER_WAIT"):
        monkeypatch.setattr(listener, name, SECOND // 5)
    proxy = Proxy(socket_of(postgres_url))
    try:
        with station(f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres") as one:
            one.clear()
            proxy.swallow.set()
            one.hear(*TOPICS)
            assert proxy.connections >= 2
    finally:
        proxy.close()


def test_a_connection_that_hears_nothing_is_given_up(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where notifications do not come back, as behind some poolers, it is logged once and tried more slowly."""
    monkeypatch.setattr(listener, "PROBE_WAIT", SECOND // 10)
    monkeypatch.setattr(listener.Line, "heard", lambda self: iter(()))
    with caplog.at_level("INFO", "postroad"), station(postgres_url) as one:
        one.hear(*TOPICS)
        one.hear(*TOPICS)
    assert [record.message for record in caplog.records] == [
        "listener: The listener's connection carries no notifications. No notification came back in time; "
        "a pooler in transaction mode? (polling goes on; trying again)"
    ]


def test_an_absent_database_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A listener that cannot connect says so once and ends at once when it is closed."""
    one = Station(Database(f"postgresql://nobody:secret@/none?host={tmp_path}"))
    with caplog.at_level("INFO", "postroad"):
        one.listener.start()
        while not caplog.records:
            threading.Event().wait(0.01)
        one.listener.close()
    one.database.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "secret" not in caplog.text


def test_it_takes_no_connection_from_the_users_pool(postgres_url: str, fresh_schema: str) -> None:
    """The listener connects as the user's engine does, beside its pool and outside of any transaction."""
    connected = []

    def connect() -> Any:
        connected.append(threading.current_thread().name)
        return psycopg.connect(plain(postgres_url))

    engine = create_engine("postgresql+psycopg://", creator=connect, pool_size=1, max_overflow=0, pool_timeout=1)
    try:
        with station(Database(engine, schema=fresh_schema)) as one:
            with engine.connect() as conn:
                conn.execute(text("SELECT 1"))
                assert [state for _, state in listeners(postgres_url, dialects.channel(fresh_schema))] == ["idle"]
            one.clear()
            one.wakeups.announce(["turns"])
            one.hear("turns")
        assert "postroad-listener" in connected
    finally:
        engine.dispose()


def test_closing_ends_the_thread(postgres_url: str) -> None:
    """A closed listener has left no thread and no connection; closing twice is allowed."""
    with station(postgres_url, schema="closing") as one:
        one.listener.start()  # a second start changes nothing
        one.listener.close()
        one.listener.close()
        assert "postroad-listener" not in [thread.name for thread in threading.enumerate()]
        assert listeners(postgres_url, dialects.channel("closing")) == []


def table_in(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    with database.engine.begin() as conn:
        conn.execute(text("CREATE TABLE things (id INTEGER)"))
    database.close()


def test_another_connections_commit_wakes_on_sqlite(sqlite_path: Path) -> None:
    """On SQLite whatever another connection commits wakes every loop; reading wakes nobody."""
    table_in(sqlite_path)
    with station(f"sqlite:///{sqlite_path}") as one:
        one.clear()
        with one.database.engine.begin() as conn:
            conn.execute(text("SELECT count(*) FROM things")).one()
        with one.database.engine.connect() as conn:
            conn.execute(text("INSERT INTO things VALUES (0)"))
            conn.rollback()
        threading.Event().wait(5 * file_ear.CHANGES_EVERY_SECONDS)  # it has looked several times
        assert one.silent("turns")
        with one.database.engine.begin() as conn:
            conn.execute(text("INSERT INTO things VALUES (1)"))
        one.hear(*TOPICS)


def test_a_replaced_file_is_opened_anew(sqlite_path: Path, tmp_path: Path) -> None:
    """When another file takes the database's place, the listener goes over to it."""
    table_in(sqlite_path)
    table_in(tmp_path / "new.db")
    with station(f"sqlite:///{sqlite_path}") as one:
        one.clear()
        (tmp_path / "new.db").rename(sqlite_path)
        one.hear(*TOPICS)
        one.clear()
        other = Database(f"sqlite:///{sqlite_path}")
        with other.engine.begin() as conn:
            conn.execute(text("INSERT INTO things VALUES (1)"))
        other.close()
        one.hear(*TOPICS)


def test_a_missing_file_is_not_created(sqlite_path: Path) -> None:
    """A listener waits for a file that isn't there, and never makes it."""
    one = Station(Database(f"sqlite:///{sqlite_path}"))
    one.listener.start()
    with contextlib.suppress(queue.Empty):
        one.woken["turns"].get(timeout=0.3)
        raise AssertionError("it has heard something")
    assert not sqlite_path.exists()
    table_in(sqlite_path)
    one.hear(*TOPICS)
    one.listener.close()
    one.database.close()


def test_a_locked_file_does_not_end_the_listener(sqlite_path: Path) -> None:
    """While another connection holds the write lock the listener goes on."""
    table_in(sqlite_path)
    with station(f"sqlite:///{sqlite_path}") as one:
        one.clear()
        with one.database.engine.begin() as conn:
            conn.execute(text("INSERT INTO things VALUES (1)"))
            assert one.silent("turns")
        one.hear(*TOPICS)


def commit(path: Path) -> None:
    """A commit of another process's, as far as the listener can tell."""
    other = Database(f"sqlite:///{path}")
    with other.engine.begin() as conn:
        conn.execute(text("INSERT INTO things VALUES (1)"))
    other.close()


def count_waits(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[float]":
    """Each wait for what the kernel tells, by its length."""
    waits: queue.SimpleQueue[float] = queue.SimpleQueue()
    wait = file_watch.FileWatch.wait

    def counted(self: file_watch.FileWatch, seconds: float) -> bool:
        waits.put(seconds)
        return wait(self, seconds)

    monkeypatch.setattr(file_watch.FileWatch, "wait", counted)
    return waits


@only_linux
def test_the_kernel_tells_a_quiet_listener(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was committed for a moment a commit is heard of although no look is due; closing does not wait."""
    monkeypatch.setattr(file_ear, "WATCHED_EVERY_SECONDS", 10 * WAIT)
    waits = count_waits(monkeypatch)
    table_in(sqlite_path)
    with station(f"sqlite:///{sqlite_path}") as one:
        for _ in range(2):
            one.clear()
            assert waits.get(timeout=WAIT) == 10 * WAIT
            assert one.silent("turns")
            commit(sqlite_path)
            one.hear(*TOPICS)
        waits.get(timeout=WAIT)
        one.listener.close()
        assert "postroad-listener" not in [thread.name for thread in threading.enumerate()]


@only_linux
def test_a_kernel_that_tells_of_nothing_is_not_trusted(
    sqlite_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit that only a look has found is heard of, and from then on the file is looked at as often as without."""
    monkeypatch.setattr(file_watch, "_MODIFY", 0x400)  # of its deletion only
    waits = count_waits(monkeypatch)
    table_in(sqlite_path)
    with caplog.at_level("INFO", "postroad"), station(f"sqlite:///{sqlite_path}") as one:
        one.clear()
        assert waits.get(timeout=WAIT) == file_ear.WATCHED_EVERY_SECONDS
        commit(sqlite_path)
        one.hear(*TOPICS)
        while waits.get(timeout=WAIT) != file_ear.TOLD_LATE_SECONDS:
            pass
        for _ in range(2):
            one.clear()
            commit(sqlite_path)
            one.hear(*TOPICS)
        assert waits.empty()
    assert [record.message for record in caplog.records] == [
        "listener: the kernel does not tell of writes to this file; looking oftener"
    ]


def test_a_file_that_cannot_be_watched_is_looked_at(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a kernel that tells of writes the listener looks, after a quiet time too."""
    monkeypatch.setattr(file_ear, "watched", lambda path, also: None)
    monkeypatch.setattr(file_ear, "QUIET_LOOKS", 3)
    table_in(sqlite_path)
    with station(f"sqlite:///{sqlite_path}") as one:
        for _ in range(2):
            one.clear()
            threading.Event().wait(20 * file_ear.QUIET_EVERY_SECONDS)  # it has become quiet
            assert one.silent("turns")
            commit(sqlite_path)
            one.hear(*TOPICS)


@contextlib.contextmanager
def late_looks(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[file_ear._Looks]:
    """Looks at a log whose time never changes, after a commit when nothing was fresh any more."""
    monkeypatch.setattr(file_ear, "_last_write", lambda path: (1, 2, 3))
    table_in(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        looks = file_ear._Looks(connection, f"{path}-wal")
        for _ in range(1 + file_ear.FRESH_LOOKS):
            looks.changed(told=False)
        commit(path)
        yield looks


def test_what_is_told_counts_more_than_the_logs_time(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit within the tick of the look before it, which leaves the log's time as it was, is found if it is told."""
    with late_looks(sqlite_path, monkeypatch) as looks:
        assert not looks.changed(told=False)
        assert looks.changed(told=True)
        assert not looks.changed(told=True)


def test_a_commit_that_takes_the_disk_long_is_found(sqlite_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that ends long after its last write to the log, when nothing is fresh, is found by a rare look."""
    with late_looks(sqlite_path, monkeypatch) as looks:
        assert looks.changed(told=False, surely=True)
        assert looks.quiet > 0, "nothing was written that the kernel could have told of"


@only_linux
def test_a_watch_tells_of_what_comes_after(tmp_path: Path) -> None:
    """A watch tells once of writes since the last time that it was asked, and not of what was to be forgotten."""
    file, (one, other) = tmp_path / "log", socket.socketpair()
    file.write_text("a")
    with one, other, contextlib.closing(file_watch.FileWatch(str(file), other.fileno())) as watch:
        assert not watch.wait(0)
        file.write_text("b")
        assert watch.wait(WAIT)
        assert not watch.wait(0)
        file.write_text("c")
        watch.forget()
        assert not watch.wait(0)
        one.close()
        began = time.monotonic()
        assert not watch.wait(WAIT)
        assert time.monotonic() - began < WAIT


@only_linux
def test_what_is_not_there_cannot_be_watched(tmp_path: Path) -> None:
    """There is no watch of a file that is missing, and nothing is left open by the attempt."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert file_watch.watched(str(tmp_path / "log"), 0) is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("said", "topics"),
    [
        ("sends", {"sends"}),
        ("timers,turns", {"timers", "turns"}),
        ("probe", set()),
        ("", {"turns", "sends", "timers"}),
        ("sends,novelties", {"turns", "sends", "timers"}),
    ],
)
def test_what_is_not_understood_wakes_everybody(said: str, topics: set[str]) -> None:
    """A notification of a newer release, or of a stranger, wakes every loop."""
    assert topics_of(said) == topics
