"""`postroad run` as real processes: how they end, how they share work, how they wake each other."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from postroad import DispatchRow, Kind, Postroad
from postroad.store import migrations

# The tests run on whatever SQLite there is; that it is warned of is a test of its own.
pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
WAIT_SECONDS = 60
SLOW_POLL = "30"
MAIL = Kind("mail", dict[str, str])

APP = """
import asyncio, json, os, time
from pathlib import Path
from postroad import Kind, Postroad, Retry
from postroad.engine import listener

FOLDER = Path(os.environ["APP_FOLDER"])
MAIL = Kind("mail", dict[str, str])
post = Postroad()

def note(what, key):
    line = json.dumps({"pid": os.getpid(), "what": what, "key": key}) + "\\n"
    descriptor = os.open(FOLDER / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)

if os.environ.get("APP_DEAF"):
    listener.Listener.start = lambda self: None

def held():
    return (FOLDER / "hold").exists()

if os.environ.get("APP_BLOCKS"):
    @post.sender(MAIL, timeout=60, concurrency=2)
    async def send(dispatch):
        note("begin", dispatch.key)
        while held():
            time.sleep(0.01)  # blocks the whole event loop
        note("end", dispatch.key)
elif os.environ.get("APP_ASYNC"):
    @post.sender(MAIL, timeout=60, concurrency=2)
    async def send(dispatch):
        note("begin", dispatch.key)
        while held():
            await asyncio.sleep(0.01)
        note("end", dispatch.key)
else:
    @post.sender(MAIL, timeout=60, concurrency=2)
    def send(dispatch):
        note("begin", dispatch.key)
        while held():
            time.sleep(0.01)
        note("end", dispatch.key)

@post.turn("load")
def decide(turn):
    for event in turn.events:
        if event.kind == "Go":
            note("turn", event.key)
            turn.send(MAIL, {}, to="ann", key=f"{turn.subject}/{event.key}")

note("imported", "")
while (FOLDER / "slow_import").exists():
    time.sleep(0.01)
"""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Look until the condition holds."""
    end = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < end, f"never happened: {what}"
        threading.Event().wait(0.01)
    return found


@dataclass
class Process:
    """A `postroad run` process; what it says on stderr is kept."""

    popen: "subprocess.Popen[bytes]"
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def said(self) -> str:
        return self.log.read_text()

    def started(self) -> "Process":
        until(lambda: " runs " in self.said or self.popen.poll() is not None, f"start: {self.said}")
        assert self.popen.poll() is None, self.said
        return self

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def heard(self) -> None:
        until(lambda: "ending what is under way" in self.said, f"the signal: {self.said}")

    def ended(self) -> int:
        return self.popen.wait(WAIT_SECONDS)

    def stop(self) -> None:
        self.signal()
        assert self.ended() == 0, self.said


@dataclass
class Stage:
    """A database, an app module in a folder, and the processes that run it."""

    url: str
    schema: str | None
    folder: Path
    post: Postroad
    processes: list[Process] = field(default_factory=list)

    def run(self, *options: str, migrate: bool = True, reference: str = "app:post", **environ: str) -> Process:
        if migrate:
            self.post.check_schema()
        place = {"POSTROAD_DATABASE_URL": self.url, "POSTROAD_BUNDLED_SQLITE": "1", "APP_FOLDER": str(self.folder)}
        if self.schema:
            place["POSTROAD_SCHEMA"] = self.schema
        log = self.folder / f"log{len(self.processes)}"
        with log.open("wb") as stderr:
            popen = subprocess.Popen(
                [sys.executable, "-m", "postroad", "run", reference, *options],
                cwd=self.folder, stdout=stderr, stderr=stderr, env={**os.environ, **place, **environ},
            )  # fmt: skip
        process = Process(popen, log)
        self.processes.append(process)
        return process

    def journal(self, what: str) -> list[dict[str, Any]]:
        path = self.folder / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["what"] == what]

    def hold(self) -> None:
        (self.folder / "hold").touch()

    def let_go(self) -> None:
        (self.folder / "hold").unlink()

    def send(self, *keys: str) -> None:
        with self.post.begin() as tx:
            for key in keys:
                tx.send(MAIL, {}, to="ann", key=key)

    def join(self, write: Callable[[Any], object]) -> None:
        """As a user's own transaction does it."""
        with self.post.database.engine.begin() as conn, self.post.join(conn) as tx:
            write(tx)

    def row(self, key: str) -> DispatchRow:
        found = self.post.dispatches.get(key)
        assert found is not None, key
        return found

    def statuses(self) -> Counter[str]:
        return Counter(row.status for row in self.post.dispatches.list(limit=1_000))

    def delivered(self, count: int) -> None:
        until(lambda: self.statuses()["delivered"] == count, f"{count} delivered: {self.statuses()}")

    def close(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()
        self.post.close()


@pytest.fixture(params=["sqlite", "postgres"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """An app on an empty database."""
    if request.param == "sqlite":
        url, schema = f"sqlite:///{request.getfixturevalue('sqlite_path')}", None
    else:
        url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema")
    (tmp_path / "app.py").write_text(APP)
    post = Postroad(url, schema=schema, migrate=True)
    post.kinds(MAIL)
    made = Stage(url, schema, tmp_path, post)
    yield made
    made.close()


def test_sigterm_finishes_what_is_under_way(stage: Stage) -> None:
    """After SIGTERM a send that has begun is finished and settled, nothing else is claimed, and the exit code is 0."""
    stage.hold()
    process = stage.run("--only", "sends")
    stage.send(*(f"m/{n}" for n in range(6)))
    until(lambda: len(stage.journal("begin")) == 2, "two sends under way")
    process.signal()
    process.heard()
    stage.send("late/1")
    stage.let_go()
    assert process.ended() == 0, process.said
    assert {line["key"] for line in stage.journal("end")} == {line["key"] for line in stage.journal("begin")}
    assert stage.statuses() == {"delivered": 2, "pending": 5}
    assert all(row.attempt == 0 for row in stage.post.dispatches.list(status="pending"))


@pytest.mark.parametrize("sender", ["threads", "APP_ASYNC"])
def test_what_outlives_the_grace_is_given_back(stage: Stage, sender: str) -> None:
    """When the grace is over the process ends with exit code 0 and no row stays claimed by it."""
    stage.hold()
    process = stage.run("--grace", "0.2", **({sender: "1"} if sender == "APP_ASYNC" else {}))
    stage.send("m/1")
    until(lambda: stage.journal("begin"), "a send under way")
    process.signal()
    assert process.ended() == 0, process.said
    assert "grace is over" in process.said
    assert stage.row("m/1").status == "pending"


def test_a_second_signal_ends_at_once(stage: Stage) -> None:
    """The second signal ends the process whatever is under way, and the lease stays to protect the row."""
    stage.hold()
    process = stage.run()
    stage.send("m/1")
    until(lambda: stage.journal("begin"), "a send under way")
    process.signal()
    process.heard()
    process.signal(signal.SIGINT)
    assert process.ended() == 130, process.said
    assert stage.row("m/1").status == "delivering"


def test_a_blocked_event_loop_does_not_keep_a_signal_away(stage: Stage) -> None:
    """A handler that blocks the event loop cannot keep two signals from ending the process."""
    stage.hold()
    process = stage.run(APP_BLOCKS="1")
    stage.send("m/1")
    until(lambda: stage.journal("begin"), "a send under way")
    process.signal()
    process.heard()
    process.signal()
    assert process.ended() == 130


def test_a_signal_during_the_import_is_remembered(stage: Stage) -> None:
    """A process that is told to end while its app is being imported ends without claiming anything."""
    (stage.folder / "slow_import").touch()
    stage.send("m/1")
    process = stage.run()
    until(lambda: stage.journal("imported"), "the import")
    process.signal()
    process.heard()
    (stage.folder / "slow_import").unlink()
    assert process.ended() == 0, process.said
    assert stage.row("m/1").attempt == 0


def test_an_interrupt_is_as_good_as_sigterm(stage: Stage) -> None:
    """SIGINT ends an idle process with exit code 0."""
    process = stage.run().started()
    process.signal(signal.SIGINT)
    assert process.ended() == 0, process.said
    assert "app:post has ended" in process.said


def test_two_processes_share_the_rows(stage: Stage) -> None:
    """Two processes on one database deliver 200 rows, each of them once, and both take part."""
    stage.hold()
    keys = [f"m/{n}" for n in range(200)]
    stage.send(*keys)
    processes = [stage.run(), stage.run()]
    until(lambda: len({line["pid"] for line in stage.journal("begin")}) == 2, "both are sending")
    stage.let_go()
    stage.delivered(200)
    for process in processes:
        process.stop()
    assert Counter(line["key"] for line in stage.journal("begin")) == Counter(keys)
    assert {line["pid"] for line in stage.journal("end")} == {process.pid for process in processes}


def test_a_users_commit_wakes_a_process(stage: Stage) -> None:
    """A row is sent right after the user's own commit, long before the process would look by itself."""
    stage.run("--poll", SLOW_POLL)
    stage.send("m/0")
    stage.delivered(1)  # at its start; from now on it sleeps
    began = time.monotonic()
    stage.join(lambda tx: tx.send(MAIL, {}, to="ann", key="m/1"))
    stage.delivered(2)
    assert time.monotonic() - began < float(SLOW_POLL) / 2


def test_processes_wake_each_other(stage: Stage) -> None:
    """A decision in one process is carried out by another one at once."""
    stage.run("--only", "turns", "--poll", SLOW_POLL)
    stage.run("--only", "sends", "--poll", SLOW_POLL)
    stage.join(lambda tx: tx.publish("load/1", "Go", {}, key="e0"))
    stage.delivered(1)
    began = time.monotonic()
    stage.join(lambda tx: tx.publish("load/1", "Go", {}, key="e1"))
    stage.delivered(2)
    assert time.monotonic() - began < float(SLOW_POLL) / 2
    turns = {line["pid"] for line in stage.journal("turn")}
    sends = {line["pid"] for line in stage.journal("begin")}
    assert turns.isdisjoint(sends)


def test_polling_alone_is_enough(stage: Stage) -> None:
    """Without any listener all is found by polling."""
    stage.run("--poll", "0.05", APP_DEAF="1").started()
    stage.join(lambda tx: tx.publish("load/1", "Go", {}, key="e1"))
    stage.delivered(1)


def test_an_idle_process_does_not_spin(stage: Stage) -> None:
    """With nothing to do the loops sleep: what they do wakes nobody, least of all themselves."""
    process = stage.run("--poll", SLOW_POLL)
    stage.send("m/1")
    stage.delivered(1)
    used = cpu_seconds(process.pid)
    threading.Event().wait(1.5)
    assert cpu_seconds(process.pid) - used < 0.5


def cpu_seconds(pid: int) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def test_a_process_says_what_it_runs(stage: Stage) -> None:
    """The log names the app, its loops and its database in one line, without a password."""
    process = stage.run("--only", "sends,timers").started()
    process.stop()
    line = next(line for line in process.said.splitlines() if " runs " in line)
    assert "app:post runs sends, timers on " in line
    assert ("sqlite:///" if stage.schema is None else f"schema {stage.schema}") in line


def test_a_password_is_not_logged(postgres_url: str, fresh_schema: str, tmp_path: Path) -> None:
    """A password in the URL appears in no line of the log."""
    url = postgres_url.replace("postgres@", "postgres:s3cret@", 1)
    assert "s3cret" in url
    (tmp_path / "app.py").write_text(APP)
    post = Postroad(url, schema=fresh_schema, migrate=True)
    stage = Stage(url, fresh_schema, tmp_path, post)
    try:
        process = stage.run().started()
        process.stop()
        assert "s3cret" not in process.said
        assert "postgres:***@" in process.said
    finally:
        stage.close()


def test_a_missing_schema_is_one_clear_line(stage: Stage) -> None:
    """On Postgres a process without its tables refuses to start; on SQLite it makes them."""
    process = stage.run(migrate=False)
    if stage.schema is None:
        process.started()
        process.stop()
        return
    assert process.ended() == 1
    assert "run `postroad migrate`" in process.said
    assert "Traceback" not in process.said


@pytest.mark.parametrize("stage", ["postgres"], indirect=True)
def test_a_schema_that_is_too_new_is_refused(stage: Stage) -> None:
    """Code does not run on a schema that was made for much later code."""
    stage.post.check_schema()
    with stage.post.database.engine.begin() as conn:
        conn.exec_driver_sql(
            f"INSERT INTO \"{stage.schema}\".postroad_migrations VALUES ({migrations.latest + 5}, 'x', 0, "
            f"{migrations.latest + 5})"
        )
    process = stage.run(migrate=False)
    assert process.ended() == 1
    assert "upgrade postroad" in process.said


def test_a_faulty_sqlite_is_warned_of_first(sqlite_path: Path, tmp_path: Path) -> None:
    """Where this Python's SQLite has the WAL fault the first line says so, once, and names the cure."""
    (tmp_path / "app.py").write_text(APP)
    stage = Stage(f"sqlite:///{sqlite_path}", None, tmp_path, Postroad(f"sqlite:///{sqlite_path}"))
    try:
        process = stage.run(POSTROAD_BUNDLED_SQLITE="0", migrate=False).started()
        process.stop()
    finally:
        stage.close()
    faulty = subprocess.run(
        [sys.executable, "-W", "error", "-c",
         "from postroad.store.sqlite_version import warn_of_sqlite_fault; warn_of_sqlite_fault()"],
        capture_output=True, check=False,
    ).returncode  # fmt: skip
    warned = [line for line in process.said.splitlines() if "can corrupt a WAL database" in line]
    assert len(warned) == bool(faulty)
    assert process.said.startswith(warned[0] if warned else "")
    assert "app.py:" not in process.said


def test_a_crash_at_a_failpoint_loses_nothing(stage: Stage) -> None:
    """A process that kills itself between a send and its settlement leaves the row to the next one."""
    stage.send("m/1")
    process = stage.run(POSTROAD_FAILPOINT="dispatch.after_send")
    assert process.ended() == -signal.SIGKILL, process.said
    assert stage.row("m/1").status == "delivering"
    assert [line["key"] for line in stage.journal("end")] == ["m/1"]
    assert "armed: this process kills itself at dispatch.after_send" in process.said


def test_the_lifespan_is_entered_and_left(stage: Stage) -> None:
    """The app's lifespan surrounds its loops, and is left after a signal too."""
    (stage.folder / "with_lifespan.py").write_text(
        "from contextlib import asynccontextmanager\nfrom postroad import Postroad\nimport app\n"
        "@asynccontextmanager\nasync def lifespan(post):\n"
        "    app.note('entered', '')\n    yield 1\n    app.note('left', '')\n"
        "post = Postroad(lifespan=lifespan)\npost.include(app.post)\n"
    )
    process = stage.run(reference="with_lifespan:post")
    stage.send("m/1")
    stage.delivered(1)
    process.stop()
    assert len(stage.journal("entered")) == len(stage.journal("left")) == 1


def test_a_write_lock_of_somebody_else_is_waited_out(sqlite_path: Path, tmp_path: Path) -> None:
    """On SQLite a foreign writer delays the loops and does not end them."""
    (tmp_path / "app.py").write_text(APP)
    post = Postroad(f"sqlite:///{sqlite_path}")
    post.kinds(MAIL)
    stage = Stage(f"sqlite:///{sqlite_path}", None, tmp_path, post)
    try:
        stage.run().started()
        with contextlib.closing(sqlite3.connect(sqlite_path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            threading.Event().wait(0.5)  # two polls
            other.execute("ROLLBACK")
        stage.send("m/1")
        stage.delivered(1)
    finally:
        stage.close()
