"""A pass of retention walks along its indexes, beside 100,000 rows of each table, whatever the planner was told."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model.clock import FakeClock
from postroad.store import contents, dialects, inbox, outbox, purging, retention, tombstones
from postroad.store.database import Database
from postroad.store.statements import Statement, as_json
from tests.plans.places import STATISTICS, filled

NOW = FakeClock().wall()
ROWS = 100_000
NUMBERS = "WITH RECURSIVE n(n) AS (SELECT CAST(1 AS bigint) UNION ALL SELECT n + 1 FROM n WHERE n < :rows)"
FILL = [
    Statement(f"""INSERT INTO {{p}}outbox (id, key, stream, kind, version, destination, body, headers, policy, status,
        attempt, epoch, content_hash, origin, created_at, updated_at) {NUMBERS} SELECT 'i' || n, 'k' || n, '', 'a', 1,
        '', '1', '{{{{}}}}', 'event', 'delivered', 1, 0, '', '{{{{}}}}', n / 10, n FROM n"""),
    Statement(f"""INSERT INTO {{p}}transitions (entity, from_status, to_status, reason_code, summary, source, actor,
        evidence, metadata, at) {NUMBERS} SELECT 'i' || n, 'delivering', 'delivered', 'ok', '', '', '', '[]',
        '{{{{}}}}', n FROM n"""),
    Statement(f"""INSERT INTO {{p}}inbox (stream, type, event_id, kind, version, data, received_at, ready_at, reason)
        {NUMBERS} SELECT 'load/' || n, 'load', 'e', 'k', 1, '1', 0, 0, CASE WHEN n % 100 = 0 THEN 'dead' END FROM n"""),
    Statement(f"""INSERT INTO {{p}}runs (run_id, stream, turn_id, attempt, claim_token, started_at, ended_at,
        end_reason) {NUMBERS} SELECT 'r' || n, 'load/' || n, 't', 1, 'c', n, n, 'committed' FROM n"""),
    Statement(f"""INSERT INTO {{p}}alerts (severity, code, subject, detail, raised_at, rung_at)
        {NUMBERS} SELECT 'error', 'c', 's', '', n, n FROM n"""),
    Statement(f"""INSERT INTO {{p}}tombstones (scope, key, id, stream, content_hash, ended_at)
        {NUMBERS} SELECT '', 'gone' || n, 'd' || n, CASE WHEN n % 2 = 0 THEN 'load/' || n ELSE '' END, '', n FROM n"""),
    Statement(f"""INSERT INTO {{p}}timers (stream, key, fire_at, kind, data, spec, status, generation, updated_at)
        {NUMBERS} SELECT 'load/' || n, 'key', 1, 'k', '1', '', 'fired', 0, 0 FROM n"""),
    Statement(f"""INSERT INTO {{p}}log (stream, seq, entry_id, kind, version, data, received_at, recorded_at)
        {NUMBERS} SELECT 'load/' || n, 1, 'e' || n, 'k', 1, '1', 0, 0 FROM n"""),
    Statement(f"""INSERT INTO {{p}}streams (id, type, version, deleted_at)
        {NUMBERS} SELECT 'load/' || n, 'load', 1, CASE WHEN n % 100 = 0 THEN n END FROM n"""),
    Statement(f"""INSERT INTO {{p}}operations (turn_id, ordinal, run_id, stream, tool, version, effect, status,
        started_at, ended_at, arguments)
        {NUMBERS} SELECT 't' || n, 1, 'r' || n, 'load/' || n, 'k', 1, 'read', 'finished', n, n, '1' FROM n"""),
    Statement(f"""INSERT INTO {{p}}queues (stream, type, until, state, attempts)
        {NUMBERS} SELECT 'load/' || n, 'load', n, 'ready', 0 FROM n"""),
]  # fmt: skip

TIMES = {
    "at": 500,
    "name": "i5",
    "limit": 500,
    "now": NOW,
    "rows": ROWS,
    **dict.fromkeys(("delivered", "acked", "dead_letter", "expired", "records", "tombstones", "deleted"), NOW),
    "names": as_json([f"i{n}" for n in range(500)]),
    "before": NOW,
    "most": 500,
    "size": 500,
    "stream": "load/7",
    "places": as_json(list(range(500))),
    "ids": as_json([f"i{n}" for n in range(500)]),
    "keys": as_json([{"turn_id": f"t{n}", "ordinal": 1, "stream": f"load/{n}", "key": "key"} for n in range(500)]),
    "e": as_json([{"stream": f"load/{n}", "event_id": "e"} for n in range(100)]),
    "d": as_json([{"id": f"new{n}", "key": f"gone{n}", "kind": "a"} for n in range(100)]),
    "made": as_json([{"scope": "", "key": f"k{n}", "id": "i", "stream": "", "content_hash": ""} for n in range(100)]),
    **dict.fromkeys(("reason", "source", "actor"), "x"),
}


@pytest.fixture(params=STATISTICS, ids="-".join, scope="module")
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Tables full of what is old."""
    with filled(request, tmp_path_factory, request.param, fill) as made:
        yield made


def fill(conn: Connection) -> None:
    for statement in FILL:
        statement(conn, rows=ROWS)


def plan(conn: Connection, statement: Statement) -> str:
    """The plan as the database prints it."""
    verb = "EXPLAIN (COSTS OFF) " if conn.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "
    explained = Statement(verb + statement._sql)
    return "\n".join(str(row[-1]) for row in explained(conn, **TIMES).all())


def assert_walked(text: str, index: str) -> None:
    """The index is used, and no table of ours is read as a whole. SQLite has no names of ours for primary keys."""
    of_key = "PRIMARY KEY (rowid" in text or "sqlite_autoindex" in text
    assert index in text or (of_key and (index.endswith("pkey") or index == "postroad_transitions_")), text
    for line in text.splitlines():
        assert "Seq Scan on postroad_" not in line, text
        walked = "SCAN" in line and "USING" not in line and not any(own in line for own in ("json_each", "CONSTANT"))
        assert not walked, text


LOOKS = [
    (retention._DISPATCHES, "postroad_outbox_created"),
    (retention._EVENTS, "postroad_inbox_dead"),
    (retention._RUNS, "postroad_runs_started"),
    (retention._OPERATIONS, "postroad_operations_started"),
    (retention._ALERTS, "pkey"),
    (retention._HISTORY, "pkey"),
    (retention._TOMBSTONES, "postroad_tombstones_ended"),
    (retention._CONTENTS, "postroad_streams_deleted"),
    (retention._STREAMS, "postroad_streams_deleted"),
]
ENDS = [
    (retention._LOCK_DISPATCHES, "pkey"),
    (retention._LOCK_EVENTS, "postroad_inbox_"),
    (retention._DELETE_EVENTS, "pkey"),
    (retention._DELETE_RUNS, "pkey"),
    (retention._DELETE_ALERTS, "pkey"),
    (retention._DELETE_HISTORY, "postroad_transitions_"),
    (retention._DELETE_TOMBSTONES, "pkey"),
    (retention._DELETE_TOMBSTONES_OF, "postroad_tombstones_stream"),
    (retention._DELETE_OPERATIONS, "pkey"),
    (contents._STILL, "pkey"),
    (contents._QUEUES, "pkey"),
    (contents._HELD, "pkey"),
    (contents._EMPTY, "pkey"),
    (contents._PARTIALS, "pkey"),
    (contents._EVENTS, "postroad_inbox_"),
    (contents._ENTRIES, "pkey"),
    (contents._OPERATIONS, "postroad_operations_stream"),
    (contents._RUNS, "postroad_runs_stream"),
    (contents._LOCK_TIMERS, "pkey"),
    (contents._TIMERS, "pkey"),
    (purging._DELETE, "pkey"),
    (purging._FORGET, "postroad_transitions_entity"),
    (tombstones._BURY, ""),
]


def name(value: object) -> str:
    modules = (retention, contents, purging, tombstones)
    found = (n for module in modules for n, item in vars(module).items() if item is value)
    return next(found, "").strip("_").lower()


@pytest.mark.parametrize(("statement", "index"), LOOKS + ENDS, ids=name)
def test_retention(database: Database, statement: Statement, index: str) -> None:
    """Each look begins behind its place and is not sorted as a whole; each row that goes is found by its key."""
    with database.engine.connect() as conn:
        dialects.distrust_statistics(database.bind(conn))
        text = plan(conn, statement)
        assert_walked(text, index)
        if (statement, index) in LOOKS:
            # By its last column the rows of one instant are sorted; that is told as "Incremental" and "LAST TERM".
            sorts = [line.strip("-> ") for line in text.splitlines()]
            assert not {"Sort", "USE TEMP B-TREE FOR ORDER BY"} & set(sorts), text


@pytest.mark.parametrize(
    ("statement", "index"),
    [(outbox._RECORD, "pkey"), (outbox._HOLDERS, "tombstones_pkey"), (inbox._OVER, "tombstones_pkey")],
    ids=["record", "holders", "over"],
)
def test_the_looks_at_tombstones(database: Database, statement: Statement, index: str) -> None:
    """In a user's own transaction too a key's tombstone is looked up by its key."""
    with database.engine.connect() as conn:
        database.bind(conn).begin()
        with dialects.users_plans(conn):
            text: Any = plan(conn, statement)
        assert_walked(text, index)
        if database.is_sqlite:
            assert "SEARCH t USING" in text, text
