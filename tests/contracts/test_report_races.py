"""Reports that come while turns end, interleaved statement by statement; see `test_interleavings`."""

import random
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model.clock import FakeClock
from postroad.model.events import REPORT_NAME
from postroad.store import log
from postroad.store.database import Database
from postroad.store.reports import NewReport, accept
from postroad.testing.contracts.reports import report
from postroad.testing.contracts.streams import Uses, commit, decided, event, queue_rows, waits
from tests.contracts.test_interleavings import (
    ROUNDS,
    Actor,
    Work,
    call,
    ended,
    giving_way,
    interleave,
    over,
    quick,
)

__all__ = ["quick"]


@pytest.mark.timeout(400)
class TestReportsMeetEnds(Uses):
    """No report is stranded, lands twice or lands inside a turn, whoever came between whom."""

    def test_one_that_comes_while_a_drain_ends(self, database: Database, quick: Database, clock: FakeClock) -> None:
        """Two callers report, one twice, while the last set ends, is adopted and is looked for: all land once."""
        draw = random.Random(0)
        run = partial(over, database, clock)
        traces = set()
        for number in range(ROUNDS):
            stream = f"load/{number}"
            first = report(0, stream) if draw.random() < 0.5 else event(0, stream)
            self.publish(run, first)
            held = self.claim_one(run, f"first{number}")
            programs = [
                partial(call, ended(draw, held)),
                partial(retried, stream, ("done", "not done at all")),
                partial(call, partial(accept, batch=[NewReport(event=report(2, stream))])),
                partial(call, partial(self.queue.adopt, stream_type="load")),
                partial(self.work, f"look{number}"),
            ]
            with giving_way(quick):
                traces.add(interleave(draw, [Actor(quick, clock, program) for program in programs]))
            self.drain(run, f"drain{number}.")
            keys, chain = run(landed, stream)
            assert (keys[0], sorted(keys[1:])) == (first.event_id, ["r1", "r2"]), f"round {number}"
            assert chain == [None, *keys[:-1]], f"round {number}"
            assert run(left) == ([], []), f"round {number}"
        assert len(traces) > (20 if database.is_sqlite else ROUNDS * 0.9)

    def work(self, token: str, run: Work) -> None:
        """A worker's pass: claim, then commit; a StaleClaim would be somebody's fault."""
        won = self.claim(run, token)
        for held in won:
            assert len({one.kind == REPORT_NAME for one in held.events}) == 1
        commit(run, *(decided(held) for held in won))


def retried(stream: str, words: tuple[str, ...], run: Work) -> None:
    """A caller that hears nothing, and says it again in other words."""
    for said in words:
        run(accept, [NewReport(event=report(1, stream, said))])


def landed(conn: Connection, stream: str, *, now: int) -> tuple[list[str], list[Any]]:
    """The keys of a log, and of each entry the parent that it names, or that a message has had."""
    entries = log.read(conn, stream)
    before = [None, *(one.key for one in entries)]
    chain = [
        one.data["parent"] if one.kind == REPORT_NAME else parent
        for one, parent in zip(entries, before, strict=False)
    ]  # fmt: skip
    return [one.key for one in entries], chain


def left(conn: Connection, *, now: int) -> tuple[list[Any], list[Any]]:
    """What the inboxes and the queues hold."""
    return waits(conn), queue_rows(conn)
