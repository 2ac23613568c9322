"""Retention beside sends: commit → send at 50 a second while the pump deletes what is old, and while it does not.

The pump's first pass begins at once here, and goes over five times as many rows as it needs for the time of the load.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from unittest.mock import patch

from sqlalchemy import Connection

from benchmarks.figures import Figure, Plan, Progress, rounded
from benchmarks.latency import Ours, await_all, lengths, percentiles, publish
from benchmarks.places import Kind, Place
from postroad.engine import sweep
from postroad.store.statements import Statement

NAME = "retention"
AT_ONCE = 20_000

_OLD = Statement("""
INSERT INTO {p}outbox (id, key, stream, kind, version, destination, body, headers, policy, status, attempt, epoch,
    content_hash, origin, created_at, updated_at)
WITH RECURSIVE n(n) AS (SELECT CAST(:first AS bigint) UNION ALL SELECT n + 1 FROM n WHERE n + 1 < :last)
SELECT 'old' || n, 'old' || n, '', 'mail', 1, 'ann', :body, '{}', 'event', 'delivered', 1, 0, '', '{}', n, n FROM n
""")
_LEFT = Statement("SELECT count(*) FROM {p}outbox WHERE created_at < 1000000000")


def measure(kind: Kind, ours: Place, limit: Place, plan: Plan, progress: Progress) -> Iterator[Figure]:
    """p50 and p95 in milliseconds, against the same without old rows; rows that went a second."""
    found: dict[bool, list[float]] = {True: [], False: []}
    gone = 0
    for _ in range(plan.rounds):
        for old in (True, False):
            ours.clear()
            rows = plan.many // 5 if old else 0
            _seed(ours, rows)
            found[old] += _run(ours, plan.latency_seconds)
            gone += rows - _left(ours)
    with_old, without = (percentiles(found[old]) for old in (True, False))
    for name, mine, theirs in zip(("p50", "p95"), with_old, without, strict=False):
        yield Figure(work=NAME, database=kind, case=f"commit to send, {name}", unit="ms", ours=mine, against=theirs)
    seconds = plan.rounds * plan.latency_seconds
    yield Figure(work=NAME, database=kind, case="rows that went", unit="1/s", ours=rounded(gone / seconds))


def _run(place: Place, seconds: float) -> list[float]:
    with patch.object(sweep, "FIRST", 0), closing(Ours(place.url, place.schema)) as both, both.receiving() as arrivals:
        time.sleep(min(seconds, 0.5))  # the pump has begun
        left = publish(both.send, seconds)
        await_all(arrivals, left.keys())
        return lengths(left, arrivals)


def _seed(place: Place, rows: int) -> None:
    def seed(conn: Connection, first: int, *, now: int) -> None:
        _OLD(conn, first=first, last=min(rows, first + AT_ONCE), body='{"text":"' + "x" * 300 + '"}')

    for first in range(0, rows, AT_ONCE):
        place.database.transact(seed, first)


def _left(place: Place) -> int:
    return int(place.database.read(_LEFT).scalar_one())
