"""Mirrors whose process is killed: at everything that it does to the disk, and while real loops run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from postroad import Kind, Postroad
from postroad.agent.mirror import Mirror
from postroad.model.rows import NewEntry
from postroad.store import log
from postroad.store.statements import Statement
from tests.cases.apps import Processes, idle, until
from tests.system.mirror_deaths import BACK, FILE_BYTES, LENGTH, STREAMS
from tests.system.mirror_soundness import lines_of, prefixes, whole

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]
NOTE = Kind("note", dict[str, Any])
_FORGET = Statement("DELETE FROM {p}log WHERE stream = :stream AND seq > :seq")
_SET_BACK = Statement("UPDATE {p}streams SET version = :seq WHERE id = :stream")
APP = """
from postroad import Turn
from postroad.agent.mirror import Mirror

post = Postroad(lifespan=Mirror("mirror", "chat", file_bytes_max=4096))

@post.turn("chat", lease=2)
def chat(turn: Turn) -> None:
    turn.record("reply", {"text": "é" * 200})
"""
ROUNDS, ENTRIES_MAX = 6, 10_000
SEED = 20_261_130
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A database with our tables, as the keyword arguments of an app."""
    if request.param == "sqlite":
        return {"database": f"sqlite:///{request.getfixturevalue('migrated_path')}"}
    return {"database": request.getfixturevalue("postgres_url"), "schema": request.getfixturevalue("migrated_schema")}


@pytest.fixture
def post(place: dict[str, Any]) -> Iterator[Postroad]:
    """An app on the test's database."""
    made = Postroad(**place)
    yield made
    made.close()


@pytest.fixture
def processes(place: dict[str, Any], tmp_path: Path) -> Iterator[Processes]:
    """Processes on the test's database."""
    made = Processes(place, tmp_path)
    yield made
    made.close()


@contextmanager
def paused(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Nothing of this process moves meanwhile."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield
    process.send_signal(signal.SIGCONT)


def reached(post: Postroad, mirror: Mirror, stream: str) -> bool:
    """Whether as many lines are there as the log has; a file may be moved while it is looked for."""
    try:
        return len(lines_of(mirror, stream)) == len(post.read(stream, limit=ENTRIES_MAX))
    except FileNotFoundError:
        return False


def grow(conn: Any, *, now: int) -> None:
    entries = [NewEntry(entry_id=f"e{n}", kind="note", data=f'"{"x" * 40}{n}"') for n in range(LENGTH)]
    for stream in STREAMS:
        log.append(conn, stream, entries, expected_version=0, now=now)


def set_back(conn: Any, *, now: int) -> None:
    """As a backup has it that was made earlier, one of the streams not going on, one with another future."""
    for stream in STREAMS[:2]:
        _FORGET(conn, stream=stream, seq=BACK)
        _SET_BACK(conn, stream=stream, seq=BACK)
    others = [NewEntry(entry_id=f"e{n}", kind="note", data=f'"other{n}"') for n in range(BACK, LENGTH)]
    log.append(conn, STREAMS[1], others, expected_version=BACK, now=now)


def test_killed_at_everything_it_does_to_the_disk(place: dict[str, Any], post: Postroad, tmp_path: Path) -> None:
    """Killed while it cuts, sets aside, closes files and writes, a catch-up leaves what the next one completes."""
    template = tmp_path / "template"
    mirror = Mirror(template, "chat", file_bytes_max=FILE_BYTES)
    post.database.transact(grow)
    mirror.catch_up(post, *STREAMS[:2])
    torn = mirror.path(STREAMS[2])
    torn.write_bytes(b"".join(mirror.path(STREAMS[0]).read_bytes().splitlines(keepends=True)[:1])[:50])
    post.database.transact(set_back)
    stride = 7 if "schema" in place else 1  # what is written is the same; to be asked Postgres takes longer
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.mirror_deaths", place["database"], place.get("schema", ""), str(template),
         str(tmp_path), str(stride)],
        capture_output=True, text=True, timeout=90, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 60 // stride, done.stdout


def test_killed_while_loops_run(post: Postroad, processes: Processes, tmp_path: Path) -> None:
    """Two processes with a mirror are killed and started again: never a line twice or ahead, in the end all of them."""
    print("seed", SEED)
    draw = random.Random(SEED)
    processes.write(APP)
    mirror = Mirror(tmp_path / "mirror", "chat")
    streams = [f"chat/{n}" for n in range(8)]
    running = [processes.run(), processes.run()]
    until(lambda: (tmp_path / "mirror" / "chat" / ".lock").exists(), "a mirror")
    sent = 0
    for number in range(ROUNDS):
        end = time.monotonic() + draw.uniform(0.2, 0.7)
        while time.monotonic() < end:
            with post.begin() as tx:
                for stream in streams:
                    tx.publish(stream, NOTE, {"n": sent}, key=f"n{sent}")
            sent += 1
        victim = running[number % 2]
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        with paused(running[1 - number % 2]):
            for stream in streams:
                prefixes(lines_of(mirror, stream), post.read(stream, limit=ENTRIES_MAX))
        running[number % 2] = processes.run()
    until(lambda: idle(post), "the turns")
    until(lambda: all(reached(post, mirror, stream) for stream in streams), "the lines")
    for process in running:
        process.send_signal(signal.SIGTERM)
    assert [process.wait() for process in running] == [0, 0]
    for stream in streams:
        whole(post.read(stream, limit=ENTRIES_MAX), mirror)
        assert len(lines_of(mirror, stream)) > sent
