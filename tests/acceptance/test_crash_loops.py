"""Handlers that take their whole process down, under a supervisor that starts it again."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroad import Kind, Postroad
from postroad.store import moments

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]
NOTE = Kind("note", dict[str, str])
APP = """
import os
from pathlib import Path
from postroad import OUTCOME, Postroad, Retry

post = Postroad()

def note(what):
    descriptor = os.open(os.environ["APP_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, what.encode() + b"\\n")
    os.close(descriptor)

@post.sender("killer", timeout=0.2, lease=1.8, retry=Retry(attempts=3, first=0, cap=0))
async def killer(dispatch):
    note(f"send {dispatch.key} {dispatch.attempt}")
    os._exit(137)

@post.turn("chat", attempts=2, lease=1)
async def chat(turn):
    for event in turn.events:
        note(f"turn {event.key} {turn.attempt}")
        if event.key == "eats-memory":
            os._exit(137)

post.filter("chat", OUTCOME)(lambda event: "sent")

@post.turn("sieve", attempts=2, lease=1)
async def sieve(turn):
    note(f"turn {turn.stream} {turn.attempt}")

@post.filter("sieve", "note")
def look(event):
    note(f"filter {event.stream}")
    if event.key == "eats-memory":
        os._exit(137)
"""


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    """A database and the schema of its tables."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema")
    return f"sqlite:///{request.getfixturevalue('sqlite_path')}", None


@pytest.fixture
def post(place: tuple[str, str | None]) -> Iterator[Postroad]:
    """The producer's side of the app."""
    url, schema = place
    post = Postroad(url, schema=schema, migrate=True)
    post.elsewhere("killer")
    yield post
    post.close()


def supervise(place: tuple[str, str | None], folder: Path, post: Postroad) -> tuple[list[str], int]:
    """Run the app, again whenever it dies, until nothing waits; its journal, and how often it died."""
    url, schema = place
    (folder / "app.py").write_text(APP)
    journal = folder / "journal"
    command = [sys.executable, "-m", "postroad", "run", "app:post", "--database", url, "--poll", "0.05"]
    environment = {**os.environ, "APP_JOURNAL": str(journal), "POSTROAD_BUNDLED_SQLITE": "1"}
    deaths, end = 0, time.monotonic() + 60
    while True:
        process = subprocess.Popen(
            [*command, *(["--schema", schema] if schema else [])],
            cwd=folder,
            env=environment,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and post.database.read(moments.waiting):
            assert time.monotonic() < end, journal.read_text()
            time.sleep(0.02)
        if process.poll() is None:
            process.terminate()
            assert process.wait(30) == 0
            return journal.read_text().splitlines(), deaths
        deaths += 1


def test_a_send_that_kills_its_process_dies_at_its_cap(
    place: tuple[str, str | None], post: Postroad, tmp_path: Path
) -> None:
    """Attempts are counted at the claim: exactly three starts, then a dead letter whose claimant was lost."""
    with post.begin() as tx:
        tx.send("killer", {}, key="k")
    journal, deaths = supervise(place, tmp_path, post)
    row = post.dispatches.get("k")
    assert row is not None
    assert journal == ["send k 1", "send k 2", "send k 3"]
    assert deaths == 3
    assert (row.status, row.reason, row.attempt) == ("dead_letter", "dispatch.dead_letter.lease_lost", 3)


def test_a_turn_that_kills_its_process_dies_without_its_neighbours(
    place: tuple[str, str | None], post: Postroad, tmp_path: Path
) -> None:
    """What takes the process down runs alone before its cap, goes dead visibly, and its neighbours all land."""
    with post.begin() as tx:
        tx.publish("chat/bad", NOTE, {}, key="eats-memory")
        for n in range(5):
            tx.publish(f"chat/{n}", NOTE, {}, key="fine")
    journal, deaths = supervise(place, tmp_path, post)
    (entry,) = post.read("chat/bad")
    assert entry.kind == "postroad.failed"
    assert (entry.data["events"], entry.data["reason"]) == (["eats-memory"], "turn.dead.interrupted")
    for n in range(5):
        assert [e.kind for e in post.read(f"chat/{n}")] == ["note"]
    starts = Counter(line.rsplit(" ", 1)[0] for line in journal)
    assert starts["turn eats-memory"] == deaths == 2
    assert all(line.endswith((" 1", " 2")) for line in journal), "no neighbour was tried more than twice"


def test_a_filter_that_kills_its_process_dies_without_its_neighbours(
    place: tuple[str, str | None], post: Postroad, tmp_path: Path
) -> None:
    """A filter is user code: counted, run alone before its cap, and never after it; who waited beside it lands."""
    with post.begin() as tx:
        tx.publish("sieve/0", NOTE, {}, key="eats-memory")
        for n in range(1, 4):
            tx.publish(f"sieve/{n}", NOTE, {}, key="fine")
    journal, deaths = supervise(place, tmp_path, post)
    (entry,) = post.read("sieve/0")
    assert (entry.kind, entry.data["reason"]) == ("postroad.failed", "turn.dead.interrupted")
    for n in range(1, 4):
        assert [e.kind for e in post.read(f"sieve/{n}")] == ["note"]
    assert journal.count("filter sieve/0") == deaths == 2


@pytest.mark.parametrize("streams", [("chat/0", "chat/1", "chat/2"), ("chat/2", "chat/1", "chat/0")])
def test_what_never_began_at_its_cap_is_not_counted(
    place: tuple[str, str | None], post: Postroad, tmp_path: Path, streams: tuple[str, ...]
) -> None:
    """Whichever stream the killer is in: of those that must run alone, one begins and the others are put back."""
    bad, *fine = streams
    with post.begin() as tx:
        tx.publish(bad, NOTE, {}, key="eats-memory")
        for stream in fine:
            tx.publish(stream, NOTE, {}, key="fine")
    journal, deaths = supervise(place, tmp_path, post)
    assert [e.kind for e in post.read(bad)] == ["postroad.failed"]
    for stream in fine:
        assert [e.kind for e in post.read(stream)] == ["note"]
    assert journal.count("turn eats-memory 1") == journal.count("turn eats-memory 2") == 1
    assert deaths == 2
