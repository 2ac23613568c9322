"""Revival with real processes: whoever is alive pings who is dead, through deaths on either side.

A consumer is a process that listens at its seat. A producer is a `postroad run` process that fires the heartbeat each
time it starts, as a scheduler would, and carries it out.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroad import DispatchRow, Postroad
from postroad.agent.revival import REVIVAL_PING
from postroad.store import alerts
from tests.cases.apps import WAIT_SECONDS, Processes, idle, until

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]

PRODUCER = """
import socket
from contextlib import asynccontextmanager
from postroad.agent.revival import REVIVAL_PING, send_revivals

@asynccontextmanager
async def fire(post):
    async with post.begin() as tx:
        sent = send_revivals(tx, os.environ["SEATS"].split(), epoch=float(os.environ["EPOCH"]))
    note(what="fired", pid=os.getpid(), created=[each.created for each in sent])
    yield

post = Postroad(lifespan=fire)
retry = Retry(attempts=int(os.environ["ATTEMPTS"]), first=0.1, cap=0.2, jitter=False)

@post.sender(REVIVAL_PING, timeout=3, lease=5, retry=retry)
def ping(d):
    with socket.socket(socket.AF_UNIX) as seat:
        seat.connect(d.to)
        seat.sendall(d.key.encode() + b"\\n")
        if seat.recv(1) != b"k":
            raise ConnectionError("the seat hung up")
"""

CONSUMER = """
import json, os, signal, socket, sys

def note(**what):
    descriptor = os.open("journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps({**what, "pid": os.getpid()}).encode() + b"\\n")
    os.close(descriptor)

seat, dies = sys.argv[1], sys.argv[2:]
if os.path.exists(seat):
    os.unlink(seat)  # whoever sat here before was killed
with socket.socket(socket.AF_UNIX) as server:
    server.bind(seat)
    server.listen()
    note(what="listening", seat=seat)
    while True:
        caller, _ = server.accept()
        with caller, caller.makefile() as lines:
            key = lines.readline().strip()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            note(what="pinged", seat=seat, key=key)
            caller.sendall(b"k")
"""


class Seats(Processes):
    """Producers, consumers, and an operator's shell around one database."""

    def __init__(self, place: dict[str, Any], folder: Path) -> None:
        super().__init__(place, folder)
        self.write(PRODUCER)
        (folder / "consumer.py").write_text(CONSUMER)
        self.post = Postroad(place["database"], schema=place.get("schema"), migrate=True)
        self.post.check_schema()
        self.post.elsewhere(REVIVAL_PING)
        self.epoch = int(time.time())

    def producer(self, *seats: str, attempts: int = 1_000, failpoint: str = "") -> "subprocess.Popen[bytes]":
        """Start one, which fires at once."""
        told = {"SEATS": " ".join(seats), "EPOCH": str(self.epoch), "ATTEMPTS": str(attempts)}
        return self.run(POSTROAD_FAILPOINT=failpoint, **told)

    def consumer(self, seat: str, *, dies: bool = False) -> "subprocess.Popen[bytes]":
        """Start one, and wait until it listens; one that `dies` kills itself when it is pinged, and tells nobody."""
        command = [sys.executable, "consumer.py", seat, *(["dies"] if dies else [])]
        process = subprocess.Popen(command, cwd=self._folder)
        self._started.append(process)
        until(lambda: process.pid in {line["pid"] for line in self.told("listening")}, f"{seat} listens")
        return process

    def told(self, what: str) -> list[dict[str, Any]]:
        """The journal's lines of one sort."""
        return [line for line in self.journal() if line["what"] == what]

    def fired(self) -> list[list[bool]]:
        """What each firing created, oldest first."""
        return [line["created"] for line in self.told("fired")]

    def pinged(self) -> Counter[tuple[str, str]]:
        """How often a seat took a key."""
        return Counter((line["seat"], line["key"]) for line in self.told("pinged"))

    def key(self, seat: str) -> str:
        return f"revival:{seat}:{self.epoch}"

    def row(self, seat: str = "s") -> DispatchRow:
        """A seat's ping."""
        found = self.post.dispatches.get(self.key(seat))
        assert found is not None, self.logs()
        return found

    def ends(self, status: str) -> None:
        """Wait until a seat's ping has come to this status."""
        until(lambda: self.post.dispatches.list(status=status, key=self.key("s")), status)

    def attempted(self, more_than: int) -> int:
        """Wait until a seat's ping was tried more often than that; how often it was."""
        return int(until(lambda: (tried := self.row().attempt) > more_than and tried, "another attempt"))

    def ask(self, *arguments: str) -> Any:
        """The answer of the command line, as an operator's program gets it."""
        where = {"POSTROAD_DATABASE_URL": self._place["database"]}
        if "schema" in self._place:
            where["POSTROAD_SCHEMA"] = self._place["schema"]
        done = subprocess.run(
            [sys.executable, "-m", "postroad", *arguments, "--json"], capture_output=True, timeout=WAIT_SECONDS,
            cwd=self._folder, check=False, env={**os.environ, "POSTROAD_BUNDLED_SQLITE": "1", **where},
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout, done.stderr)
        return json.loads(done.stdout)["data"]

    def logs(self) -> str:
        """What all of them told their operators."""
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("log*")))

    def close(self) -> None:
        super().close()
        self.post.close()


@pytest.fixture(params=["sqlite", "postgres"])
def seats(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Seats]:
    """Seats of which none is taken."""
    if request.param == "postgres":
        url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema")
        place = {"database": url, "schema": schema}
    else:
        place = {"database": f"sqlite:///{request.getfixturevalue('sqlite_path')}"}
    made = Seats(place, tmp_path)
    yield made
    made.close()


def killed(process: "subprocess.Popen[bytes]") -> bool:
    """Wait for the end of a process that kills itself, or was killed."""
    return process.wait(WAIT_SECONDS) == -signal.SIGKILL


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process as an operator would."""
    process.terminate()
    assert process.wait(WAIT_SECONDS) == 0


def test_a_dead_consumer_is_pinged_once_when_it_comes_back(seats: Seats) -> None:
    """The consumer is killed while it is pinged, the producer during an attempt and then replaced: one ping arrives."""
    consumer = seats.consumer("s", dies=True)
    first = seats.producer("s", failpoint="dispatch.after_send:2")
    assert killed(consumer)
    assert killed(first), seats.logs()
    assert (seats.row().status, seats.row().attempt) == ("delivering", 2)
    second = seats.producer("s")
    tried = seats.attempted(3)
    assert "ConnectionRefusedError" in (seats.row().last_error or "")
    stop(second)
    third = seats.producer("s")
    seats.attempted(tried)
    assert seats.pinged() == {}
    seats.consumer("s")
    seats.ends("delivered")
    stop(third)
    # Fired once more with the consumer there, and by a process that finds nothing to do.
    fourth = seats.producer("s")
    until(lambda: len(seats.fired()) == 4, "the fourth firing")
    until(lambda: idle(seats.post), "nothing waits")
    stop(fourth)
    assert seats.fired() == [[True], [False], [False], [False]]
    assert seats.pinged() == {("s", seats.key("s")): 1}
    assert [row.key for row in seats.post.dispatches.list()] == [seats.key("s")]
    assert seats.post.database.read(alerts.list_) == []


@pytest.mark.parametrize("place", ["accept.before_insert", "accept.after_commit"])
def test_a_firing_that_nobody_heard_of_is_fired_again(seats: Seats, place: str) -> None:
    """A producer dies before its firing, or before it learns of it: the next one fires, and one ping arrives."""
    seats.consumer("s")
    assert killed(seats.producer("s", failpoint=place)), seats.logs()
    assert seats.fired() == []
    stays = place == "accept.after_commit"
    assert [row.status for row in seats.post.dispatches.list()] == ["pending"] * stays
    second = seats.producer("s")
    until(lambda: seats.pinged(), "the ping")
    until(lambda: idle(seats.post), "its end")
    stop(second)
    assert seats.fired() == [[not stays]]
    assert seats.pinged() == {("s", seats.key("s")): 1}


def test_producers_that_fire_at_once_ping_once(seats: Seats) -> None:
    """Three producers fire the same heartbeat side by side: each seat has one ping, of which one of them hears."""
    names = ["s1", "s2", "s3"]
    for name in names:
        seats.consumer(name)
    producers = [seats.producer(*names) for _ in range(3)]
    until(lambda: len(seats.fired()) == 3, "three firings")
    until(lambda: idle(seats.post), "all pings")
    for producer in producers:
        stop(producer)
    assert seats.pinged() == {(name, seats.key(name)): 1 for name in names}
    assert [sum(created) for created in zip(*seats.fired(), strict=True)] == [1, 1, 1]


def test_a_seat_that_stays_dead_is_an_operators_case(seats: Seats) -> None:
    """After the last attempt one alert rings, every command shows it, and a retry pings who is there by then."""
    consumer = seats.consumer("s")
    consumer.kill()
    assert killed(consumer)
    first = seats.producer("s", attempts=3)
    seats.ends("dead_letter")
    until(lambda: [alert.rung_at for alert in seats.post.database.read(alerts.list_) if alert.rung_at], "the alert")
    stop(first)
    # The next producer fires in vain, and rings nobody again.
    second = seats.producer("s", attempts=3)
    until(lambda: len(seats.fired()) == 2, "the second firing")
    stop(second)
    assert seats.fired() == [[True], [False]]
    assert seats.logs().count(f"dispatch.dead_letter {seats.key('s')}") == 1
    (listed,) = seats.ask("dispatch", "ls", "--status", "dead_letter")
    assert (listed["key"], listed["attempt"]) == (seats.key("s"), 3)
    assert listed["reason"] == "dispatch.dead_letter.max_attempts"
    assert "ConnectionRefusedError" in listed["last_error"]
    assert "ConnectionRefusedError" in seats.ask("dispatch", "why", seats.key("s"))["why"]
    assert seats.ask("status")["dead_lately"] == 1
    seats.consumer("s")
    assert seats.ask("dispatch", "retry", seats.key("s"), "--reason", "it is back")["done"] == 1
    third = seats.producer("s", attempts=3)
    seats.ends("delivered")
    stop(third)
    assert seats.pinged() == {("s", seats.key("s")): 1}
