"""Real processes that stand still for longer than their leases: whoever lives on keeps what it has claimed.

Three processes share the work. What makes them stand still is a user's write transaction that stays open (SQLite), a
Postgres that crashes and is away for ten seconds, or SIGSTOP, of one of them and of all. The invariants are the
simulation's, held against the same tables; the sleeps are the stalls themselves.
"""

import signal
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from postroad.testing.simulation.history import History
from postroad.testing.simulation.workload import Step
from tests.acceptance.killed import DEADLINE, OPTIONS, Stage, producer, wait_for
from tests.postgres_server import Own

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning"),
]

Process = subprocess.Popen[bytes]
PROCESSES = 3
ORDERS = 30
STALL_SECONDS = OPTIONS.lease * 1.5
OPEN_SECONDS = OPTIONS.lease * 2.5
AWAY_SECONDS = 10
AT_WORK_SECONDS = 0.5  # what a turn and what a send takes: some of each are under way when all stands still


class Several(Stage):
    """A stage on which several processes are at work when everything stands still."""

    @contextmanager
    def running(self, count: int) -> Iterator[list[Process]]:
        """Processes of the program, which end as an operator would end them."""
        with ExitStack() as stack:
            processes = [stack.enter_context(self._running("")) for _ in range(count)]
            yield processes
            for process in processes:
                process.terminate()
            for process in processes:
                assert process.wait(DEADLINE) == 0, self._told()

    def workers(self) -> dict[tuple[str, str, int], int]:
        """Which process, by its id, has called the handler for each attempt at a turn."""
        tried = [line for line in self._lines() if line["what"] == "tried"]
        return {(line["stream"], line["turn"], line["attempt"]): line["process"] for line in tried}

    def order_much(self) -> None:
        """Publish orders, each of which has a message sent."""
        for _ in range(ORDERS):
            message = Step("send", f"p{self._made + 1}.0", "sim.sms", take=AT_WORK_SECONDS)
            self.order(message, think=AT_WORK_SECONDS)

    def wait_for_work(self) -> None:
        """Wait until every process decides, and something has been sent."""
        wait_for(
            lambda: len(set(self.workers().values())) == PROCESSES and self.count("arrive") > 0,
            self._told,
        )

    def finish(self) -> History:
        """Wait until all is done; what came of it. All of it was sent, and nothing without its attempt."""
        wait_for(self._is_quiet, self._told)
        history = self.check(end=True)
        assert {arrival.key for arrival in history.arrivals} == {f"p{n + 1}.0" for n in range(self._made)}
        return history


@pytest.fixture
def sqlite_stage(sqlite_path: Path, tmp_path: Path) -> Iterator[Several]:
    """A program on an empty SQLite file."""
    yield from staged((f"sqlite:///{sqlite_path}", None), tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Several]:
    """A program on an empty database."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sqlite_stage")
    else:
        yield from staged(tuple(map(request.getfixturevalue, ("postgres_url", "fresh_schema"))), tmp_path)


def staged(place: Any, folder: Path) -> Iterator[Several]:
    """A program on a database."""
    post = producer(place)
    yield Several(place, folder, post)
    post.close()


def assert_nothing_was_lost(history: History) -> None:
    """Every decision and every send took one attempt, and nobody's claim was taken from under them."""
    assert Counter(run.end_reason for run in history.runs) == {"committed": len(history.runs)}
    assert Counter(row.attempt for row in history.outbox) == {1: len(history.outbox)}
    assert len(history.arrivals) == len(history.outbox)


def test_a_users_transaction_that_stays_open(sqlite_stage: Several) -> None:
    """A write transaction of a user's, open for longer than every lease, holds all up and takes nothing from anyone."""
    sqlite_stage.order_much()
    with sqlite_stage.running(PROCESSES):
        sqlite_stage.wait_for_work()
        user = sqlite3.connect(sqlite_stage.post.database.engine.url.database or "", isolation_level=None, timeout=30)
        user.execute("BEGIN IMMEDIATE")
        user.execute("CREATE TABLE theirs (n)")
        time.sleep(OPEN_SECONDS)
        before = sqlite_stage.count("arrive")
        user.execute("COMMIT")
        user.close()
        sqlite_stage.order_much()
        history = sqlite_stage.finish()
    assert before < len(history.arrivals), "there was nothing left to be done"
    assert_nothing_was_lost(history)


def test_all_are_stopped(stage: Several) -> None:
    """Processes that all sleep past their leases go on with what they hold when they wake."""
    stage.order_much()
    with stage.running(PROCESSES) as processes:
        stage.wait_for_work()
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(STALL_SECONDS)
        for process in processes:
            process.send_signal(signal.SIGCONT)
        stage.order_much()
        history = stage.finish()
    assert_nothing_was_lost(history)


def test_one_is_stopped(stage: Several) -> None:
    """Of one process that sleeps past its lease the others take over; they lose nothing of their own."""
    stage.order_much()
    stage.order_much()  # not while it sleeps: it may hold SQLite's one write lock
    with stage.running(PROCESSES) as processes:
        stage.wait_for_work()
        asleep = processes[0]
        asleep.send_signal(signal.SIGSTOP)
        time.sleep(STALL_SECONDS)
        asleep.send_signal(signal.SIGCONT)
        history = stage.finish()
    lost = {(run.stream, run.turn_id, run.attempt) for run in history.runs if run.end_reason != "committed"}
    for place in lost:
        assert stage.workers().get(place, asleep.pid) == asleep.pid
    twice = Counter(arrival.key for arrival in history.arrivals)
    for arrival in history.arrivals:
        if twice[arrival.key] > 1 and arrival.attempt == 1:
            assert arrival.process == str(asleep.pid)


def test_a_database_that_is_away(own_postgres: Own, tmp_path: Path) -> None:
    """A Postgres that crashes and is away for longer than every lease: the living keep claims, nothing goes twice."""
    for stage in staged((own_postgres.url, None), tmp_path):
        stage.order_much()
        with stage.running(PROCESSES):
            stage.wait_for_work()
            own_postgres.crash()
            time.sleep(AWAY_SECONDS)
            own_postgres.start()
            stage.order_much()
            history = stage.finish()
        assert Counter(row.attempt for row in history.outbox) == {1: len(history.outbox)}
        assert len(history.arrivals) == len(history.outbox)
        # A claim whose COMMIT was answered when it was too late to begin is given back, and has called nobody.
        assert {run.end_reason for run in history.runs} <= {"committed", "released"}
        assert max(Counter((stream, turn) for stream, turn, _ in history.tried).values()) == 1
