"""Real processes that are killed: the simulation's program in a file, what it has journaled, and its restarts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from postroad import Postroad
from postroad.model.errors import KeyConflict
from postroad.store import moments
from postroad.testing.simulation.checkers import violations
from postroad.testing.simulation.history import History, tables
from postroad.testing.simulation.ledger import Answer, Ledger
from postroad.testing.simulation.options import Options, draw
from postroad.testing.simulation.sink import Arrival
from postroad.testing.simulation.workload import ORDER, Order, Outside, Step, declare

Place = tuple[str, str | None]
DEADLINE = 40.0
# Attempts for all that die while they hold the work of those before them.
OPTIONS: Options = msgspec.structs.replace(
    draw(0), lease=2.8, send_timeout=1, turn_timeout=20, send_attempts=20, turn_attempts=20, concurrency=4
)

APP = """
import json, os, signal, time
from postroad import Postroad
from tests.acceptance.killed import OPTIONS, body_of
from postroad.testing.simulation.workload import Outside, declare

FOLDER = os.path.dirname(os.path.abspath(__file__))
post = Postroad()

def write(**what):
    # On the disk before anything else happens, in one write: other processes write here too.
    descriptor = os.open(os.path.join(FOLDER, "journal"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(what).encode() + b"\\n")
    os.fsync(descriptor)
    os.close(descriptor)

def die_if_asked(name):
    try:
        os.remove(os.path.join(FOLDER, name))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def arrive(d):
    write(what="arrive", at=time.time_ns() // 1000, process=str(os.getpid()), id=d.id, key=d.key, kind=d.kind, to=d.to,
          attempt=d.attempt, body=body_of(d), possible_duplicate=d.possible_duplicate)
    die_if_asked("die-in-send")

def tried(stream, turn, attempt):
    write(what="tried", process=os.getpid(), stream=stream, turn=turn, attempt=attempt)
    die_if_asked("die-in-handler")

def ring(alert):
    write(what="ring", severity=alert.severity, code=alert.code, subject=alert.subject)

declare(
    post, OPTIONS, Outside(reach=lambda d: None, arrive=arrive, tried=tried, ring=ring, alive=lambda: True), faxes=True
)
"""

CLIENT = """
import sys
import msgspec
from postroad.testing.failpoints import arm_from_environment
from postroad.testing.simulation.workload import ORDER, Order
from app import post

url, schema, stream, key, data = sys.argv[1:]
post.reconfigure(database=url, schema=schema or None)
post.check_schema()
arm_from_environment()
with post.begin() as tx:
    tx.publish(stream, ORDER, msgspec.json.decode(data, type=Order), key=key)
"""


MIGRATIONS = """
import itertools, os, signal, sys
import postroad.bundled_sqlite
from postroad.model import failpoints
from postroad.store import migrations
from postroad.store.database import Database
from postroad.testing.failpoints import kill, nth

def forked(work):
    # A process for each attempt, without the time that it takes to import everything again.
    child = os.fork()
    if child == 0:
        database = Database(sys.argv[1], schema=sys.argv[2] or None)
        work(database)
        database.close()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def is_empty(database):
    assert database.read(migrations.current) == 0

for died in itertools.count():
    failpoints.arm(nth("migration.statement", died + 1, kill))
    code = forked(migrations.migrate)
    if code == 0:
        break
    assert code == -signal.SIGKILL, code
    assert forked(is_empty) == 0
assert forked(lambda database: database.read(migrations.check)) == 0
print(died)
"""


def body_of(dispatch: Any) -> str:
    """The body of a message as its destination got it."""
    return msgspec.json.encode(dispatch.body).decode()


def wait_for(true: Callable[[], Any], told: Callable[[], str]) -> None:
    """Wait for a condition of a file, a process or the database."""
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end, f"waited too long: {told()}"
        time.sleep(0.02)


class Stage:
    """A database, a program that runs on it, and all that is known of what came of its deaths."""

    def __init__(self, place: Place, folder: Path, post: Postroad) -> None:
        self._url, self._schema = place
        self._folder = folder
        self.post = post
        self.ledger = Ledger()
        self._made = 0
        (folder / "app.py").write_text(APP)
        (folder / "client.py").write_text(CLIENT)

    def order(self, *steps: Step, think: float = 0, plan: Sequence[str] = ()) -> str:
        """Publish an order to a stream of its own; its key. The turn thinks for so long, and ends as planned."""
        stream, key, data = self._next(steps, think, plan)
        call = self.ledger.begin(verb="publish", stream=stream, key=key, data=data)
        with self.post.begin() as tx:
            tx.publish(stream, ORDER, msgspec.json.decode(data, type=Order), key=key)
        self.ledger.end(call, Answer.OK)
        return key

    def full_order(self) -> str:
        """An order that wants something of everything that a turn can cause."""
        n = self._made + 1
        return self.order(
            Step("send", f"p{n}.0", "sim.sms"),
            Step("send", f"p{n}.1", "sim.pay", plan=["giveup"]),
            Step("timer", f"p{n}.2", after=0.1),
            Step("cancel", f"p{n}.9"),
            Step("withdraw", f"p{n}.8"),
            Step("publish", "load/other", f"p{n}.3"),
        )

    def offer(self, failpoint: str) -> tuple[str, str]:
        """Have a client publish an order and die at a failpoint; the order's stream and key."""
        stream, key, data = self._next((Step("send", f"p{self._made + 1}.0", "sim.sms"),))
        self.ledger.begin(verb="publish", stream=stream, key=key, data=data)
        assert self._client(stream, key, data, failpoint) == -signal.SIGKILL, self._told()
        return stream, key

    def offer_again(self, key: str) -> None:
        """Have another client publish the same, and be answered."""
        first = next(call for call in self.ledger.calls if call.key == key)
        call = self.ledger.begin(verb="publish", stream=first.stream, key=key, data=first.data)
        assert self._client(call.stream, key, call.data, "") == 0
        self.ledger.end(call, Answer.OK)

    def offer_other(self, key: str) -> None:
        """Publish other content under the same key, which is refused."""
        first = next(call for call in self.ledger.calls if call.key == key)
        try:
            with self.post.begin() as tx:
                tx.publish(first.stream, ORDER, Order(think=0.001), key=key)
        except KeyConflict:
            return
        raise AssertionError("other content was accepted")

    def die_at(self, failpoint: str) -> None:
        """Run the program until it kills itself there."""
        with self._running(failpoint) as process:
            wait_for(lambda: process.poll() is not None, lambda: f"{failpoint} is not reached\n{self._told()}")
            assert process.returncode == -signal.SIGKILL, self._told()

    def die_when(self, name: str) -> None:
        """Run the program until its own code kills it: `die-in-handler` or `die-in-send`."""
        (self._folder / name).touch()
        self.die_at("")

    def die_stopping(self, failpoint: str) -> None:
        """Run the program until a handler is at work, ask it to end, and have it kill itself there."""
        known = self.count("tried")
        with self._running(failpoint, "--grace", "0.3") as process:
            wait_for(lambda: self.count("tried") > known, self._told)
            process.terminate()
            assert process.wait(DEADLINE) == -signal.SIGKILL, self._told()

    def migrate_dying(self) -> int:
        """Have one process after another kill itself before a statement of a migration, the last after all of them.

        How many died; whatever one of them had done is gone, or it asserts.
        """
        with (self._folder / "log").open("a") as log:
            done = subprocess.run(
                [sys.executable, "-c", MIGRATIONS, self._url, self._schema or ""],
                cwd=self._folder,
                env=self._environment(""),
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=3 * DEADLINE,  # a process for each statement
            )
        assert done.returncode == 0, self._told()
        return int(done.stdout)

    def recover(self) -> None:
        """Run the program until nothing is left to do, and end it as an operator would."""
        with self._running("") as process:
            wait_for(lambda: process.poll() is not None or self._is_quiet(), self._told)
            assert process.poll() is None, self._told()
            process.terminate()
            assert process.wait(DEADLINE) == 0, self._told()

    def check(self, *, end: bool = False) -> History:
        """Hold every invariant against what is committed now."""
        history = self._history(end=end)
        assert violations(history) == [], self._told()
        return history

    def count(self, what: str) -> int:
        """How many lines of this kind the journal has."""
        return sum(line["what"] == what for line in self._lines())

    def _history(self, *, end: bool) -> History:
        lines = self._lines()
        read = self.post.database.read(tables)
        return History(
            options=OPTIONS,
            now=time.time_ns() // 1000,
            ledger=self.ledger,
            arrivals=[msgspec.convert(line, Arrival) for line in lines if line["what"] == "arrive"],
            rung=[msgspec.convert(line, _Rung) for line in lines if line["what"] == "ring"],
            tried=[(line["stream"], line["turn"], line["attempt"]) for line in lines if line["what"] == "tried"],
            end=end,
            **read,
        )

    def _lines(self) -> list[dict[str, Any]]:
        journal = self._folder / "journal"
        text = journal.read_text() if journal.exists() else ""
        return [msgspec.json.decode(line) for line in text.splitlines()]

    def _is_quiet(self) -> bool:
        if self.post.database.read(moments.waiting):
            return False
        found = self.post.database.read(tables)
        return not found["queues"] and all(row.rung_at for row in found["alerts"])

    def _told(self) -> str:
        log = self._folder / "log"
        return log.read_text()[-4_000:] if log.exists() else ""

    def _next(self, steps: Sequence[Step], think: float = 0, plan: Sequence[str] = ()) -> tuple[str, str, str]:
        self._made += 1
        data = msgspec.json.encode(Order(steps=list(steps), think=think, plan=list(plan))).decode()
        return f"load/{self._made}", f"p{self._made}", data

    def _environment(self, failpoint: str) -> dict[str, str]:
        root = str(Path(__file__).parent.parent.parent)
        return {
            **os.environ,
            "POSTROAD_FAILPOINT": failpoint,
            "POSTROAD_BUNDLED_SQLITE": "1",
            "PYTHONPATH": os.pathsep.join((str(self._folder), root, os.environ.get("PYTHONPATH", ""))),
        }

    def _client(self, stream: str, key: str, data: str, failpoint: str) -> int:
        first = "import postroad.bundled_sqlite, runpy; runpy.run_path('client.py', run_name='__main__')"
        with (self._folder / "log").open("a") as log:
            return subprocess.run(
                [sys.executable, "-c", first, self._url, self._schema or "", stream, key, data],
                cwd=self._folder,
                env=self._environment(failpoint),
                stderr=log,
                timeout=DEADLINE,
            ).returncode

    @contextmanager
    def _running(self, failpoint: str, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
        command = [sys.executable, "-m", "postroad", "run", "app:post", "--database", self._url, "--poll", "0.05"]
        command += options
        with (self._folder / "log").open("a") as log:
            process = subprocess.Popen(
                [*command, *(["--schema", self._schema] if self._schema else [])],
                cwd=self._folder,
                env=self._environment(failpoint),
                stderr=log,
                stdout=log,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()


class _Rung(msgspec.Struct):
    code: str
    subject: str


def producer(place: Place, *, migrated: bool = True) -> Postroad:
    """The side of the app that only publishes; its tables are there unless `migrated` is False."""
    url, schema = place
    post = Postroad(url, schema=schema, migrate=True)
    declare(post, OPTIONS, _nowhere(), faxes=True)
    if migrated:
        post.check_schema()
    return post


def _nowhere() -> Outside:
    def nothing(*_: Any) -> None:
        return

    return Outside(reach=nothing, arrive=nothing, tried=nothing, ring=nothing, alive=lambda: True)
