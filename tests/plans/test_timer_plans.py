"""The timers' and the status page's statements are answered by their indexes, however much is finished."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model.clock import FakeClock
from postroad.store import alerts, dialects, status, timers
from postroad.store.database import Database
from postroad.store.statements import Statement, as_json
from tests.plans.places import STATISTICS, filled

NOW = FakeClock().wall()
FINISHED = 100_000
NUMBERS = "WITH RECURSIVE n(n) AS (SELECT CAST(1 AS bigint) UNION ALL SELECT n + 1 FROM n WHERE n < :rows)"
FILL = [
    Statement(f"""INSERT INTO {{p}}timers (stream, key, fire_at, kind, data, spec, status, generation, updated_at)
        {NUMBERS} SELECT 'load/' || n, 'key', :now - n, 'k', '{{{{}}}}', '', 'fired', 0, 0 FROM n"""),
    Statement(f"""INSERT INTO {{p}}runs (run_id, stream, turn_id, attempt, claim_token, started_at, ended_at,
        end_reason) {NUMBERS} SELECT 'r' || n, 'load/' || n, 't', 1, 'c', :now - n * 1000000, :now - n * 1000000,
        'committed' FROM n"""),
    Statement(f"""INSERT INTO {{p}}transitions (entity, from_status, to_status, reason_code, summary, source, actor,
        evidence, metadata, at) {NUMBERS} SELECT 'd' || n, 'delivering', 'delivered', 'ok', '', '', '', '[]', '{{}}',
        :now - n FROM n"""),
    Statement(f"""INSERT INTO {{p}}alerts (severity, code, subject, detail, raised_at, rung_at)
        {NUMBERS} SELECT 'error', 'c', 's', '', 0, 0 FROM n"""),
    Statement(f"""INSERT INTO {{p}}inbox (stream, type, event_id, kind, version, data, received_at, ready_at, reason)
        {NUMBERS} SELECT 'load/' || n, 'load', 'e', 'k', 1, '1', 0, 0, 'dead' FROM n"""),
    Statement(f"""INSERT INTO {{p}}outbox (id, key, stream, kind, version, destination, body, headers, policy, status,
        attempt, epoch, content_hash, origin, created_at, updated_at) {NUMBERS} SELECT 'i' || n, 'k' || n, '', 'a', 1,
        '', '1', '{{}}', 'event', 'delivered', 1, 0, '', '{{}}', 0, 0 FROM n"""),
]  # fmt: skip


# True statistics would only say that all of it is finished: SQLite then reads a table as soon as its index.
@pytest.fixture(params=[each for each in STATISTICS if each[1] != "true"], ids="-".join, scope="module")
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A database whose tables are full of what is finished, whatever its statistics say."""
    with filled(request, tmp_path_factory, request.param, fill) as made:
        yield made


def fill(conn: Connection) -> None:
    for statement in FILL:
        statement(conn, rows=FINISHED, now=NOW)


def plan(conn: Connection, statement: Statement, **parameters: Any) -> str:
    """The plan as the database prints it."""
    verb = "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) " if conn.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "
    rows = Statement(verb + statement._sql)(conn, **parameters).all()
    return "\n".join(str(row[-1]) for row in rows)


def assert_indexed(text: str, *indexes: str) -> None:
    """Each index is used, and no table of ours is walked."""
    for index in indexes:
        assert index in text, text
    for line in text.splitlines():
        # SQLite says SCAN with an index's name when it walks that index in order, up to a LIMIT.
        walked = "Seq Scan on postroad_" in line or ("SCAN postroad_" in line and "USING" not in line)
        assert not walked, text


KEYS = as_json([{"stream": f"load/{n}", "key": "key"} for n in range(5)])
ROWS = as_json([timers.TimerRow(stream=f"load/{n}", key="key", status="fired", fire_at=1) for n in range(1, 5)])


@pytest.mark.parametrize(
    ("statement", "given", "index"),
    [
        (timers._DUE, {"now": NOW, "limit": 100}, "postroad_timers_due"),
        (timers._NEXT, {}, "postroad_timers_due"),
        (timers._ARMED, {"limit": 50}, "postroad_timers_due"),
        (timers._OF_STREAM, {"stream": "load/7", "limit": 50}, "postroad_timers"),
        (timers._LOCK, {"keys": KEYS, "size": 5}, "postroad_timers"),
        (timers._FIND, {"keys": KEYS, "size": 5}, "postroad_timers"),
        (timers._UPDATE, {"timers": ROWS, "size": 5}, "postroad_timers"),
        (alerts._UNRUNG, {"after": 0, "limit": 100}, "postroad_alerts_unrung"),
        (alerts._MARK, {"ids": "[1,2,3]", "now": NOW}, "postroad_alerts"),
    ],
    ids=["due", "next", "armed", "of stream", "lock", "find", "update", "unrung", "mark"],
)
def test_timers_and_alerts(database: Database, statement: Statement, given: Any, index: str) -> None:
    """In a user's own transaction, whose planner knows no better: each row is found through an index."""
    with database.engine.connect() as conn:
        assert_indexed(plan(database.bind(conn), statement, **given), index)


@pytest.mark.parametrize(
    ("statement", "given", "index"),
    [
        (status._WAITING, {"max": 10}, ""),
        (status._DEAD, {"max": 10}, "postroad_inbox_dead"),
        (status._UNRUNG, {"max": 10}, "postroad_alerts_unrung"),
        (status._OLDEST_EVENT, {}, "postroad_inbox_front"),
        (status._KINDS, {"max": 10}, "postroad_outbox_due"),
        (status._TROUBLE, {"since": 0, "max": 10}, "postroad_transitions_trouble"),
        (status._RUNS, {"since": 0, "max": 10}, "postroad_runs_started"),
        (status._ENDED, {"since": 0, "max": 10}, "postroad_runs_trouble"),
        (status._CONFLICTED, {"since": 0, "max": 10, "listed": 10}, "postroad_runs_trouble"),
    ],
    ids=["waiting", "dead", "unrung", "oldest event", "kinds", "trouble", "runs", "ended", "conflicted"],
)
def test_status(database: Database, statement: Statement, given: Any, index: str) -> None:
    """What is finished costs the status page nothing."""
    with database.engine.connect() as conn:
        dialects.distrust_statistics(database.bind(conn))
        assert_indexed(plan(conn, statement, **given), index)
