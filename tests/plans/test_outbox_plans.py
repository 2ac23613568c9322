"""Each hot statement of the outbox is answered by its index, beside 100,000 finished dispatches."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model.clock import FakeClock
from postroad.model.lifecycle import Reason, Status
from postroad.model.rows import NewTransition
from postroad.store import (
    dialects,
    dispatch_claims,
    dispatch_views,
    due,
    moves,
    operators,
    outbox,
    preparing,
    ready,
    settle,
)
from postroad.store.database import Database
from postroad.store.statements import Statement, as_json
from tests.plans.places import STATISTICS, filled

NOW = FakeClock().wall()
FINISHED = 100_000
WAITING = 5_000
NUMBERS = """WITH RECURSIVE n(n) AS (
    SELECT CAST(:first AS bigint) UNION ALL SELECT n + 1 FROM n WHERE n + 1 < :first + :rows
)"""
DISPATCHES = Statement(f"""
INSERT INTO {{p}}outbox (id, key, stream, kind, version, destination, host, body, headers, policy, status, attempt,
    epoch, due_at, expires_at, claim_token, content_hash, origin, created_at, updated_at)
{NUMBERS}
SELECT 'id/' || n, 'key/' || n, '', 'mail', 1, '', CASE WHEN n % 1000 = 0 THEN 'up' WHEN n % 2 = 0 THEN 'down' END,
    '1', '{{{{}}}}', 'event', :status, 1, 0,
    CASE WHEN :status = 'delivered' THEN NULL ELSE n END, n,
    CASE WHEN :status = 'delivering' THEN 'token' END, '', '{{{{}}}}', 0, 0
FROM n
""")
HISTORY = Statement(f"""
INSERT INTO {{p}}transitions (entity, from_status, to_status, reason_code, summary, source, actor, evidence,
    metadata, at)
{NUMBERS}
SELECT 'id/' || n, 'delivering', 'delivered', 'ok', '', '', '', '[]', '{{{{}}}}', 0 FROM n
""")
PURGED = Statement(f"""
INSERT INTO {{p}}tombstones (scope, key, id, stream, content_hash, ended_at) {NUMBERS}
SELECT '', 'purged/' || n, 'purged/' || n, '', '', 0 FROM n
""")
GROUPS = [("delivered", FINISHED), ("pending", WAITING), ("delivering", 100)]

IDS = as_json([f"id/{FINISHED + n}" for n in range(100)])
KEYS = as_json([f"key/{FINISHED + n}" for n in range(100)])
HOLDS = as_json([{"subject": f"id/{FINISHED + WAITING + n}", "token": "token"} for n in range(100)])
CLAIMED = {"ids": IDS, "token": "t", "until": NOW, "attempts_max": 3, "now": NOW}
STARTED = [
    NewTransition(
        entity=f"id/{FINISHED + n}",
        from_status=Status.PENDING,
        to_status=Status.DELIVERING,
        reason_code=Reason.ATTEMPT,
    )
    for n in range(100)
]
MOVE = {"status": "expired", "due_at": None, "attempt": 1, "first_attempt_at": 1, "max_attempts": 3, "token": None}
MOVES = [
    {**MOVE, "id": f"id/{FINISHED + n}", "was": "pending", "last_error": "late", "receipt": None} for n in range(100)
]
MIXED = [{**each, "attempt": n, "last_error": f"error {n}"} for n, each in enumerate(MOVES)]
TOLD = [{"stream": f"s/{n}", "event_id": f"out:{n}:delivered"} for n in range(100)]
DUE = {"kind": "mail", "now": NOW, "limit": 50, "takeover": 1, "version": 1}
HOSTS = {"kind": "mail", "now": NOW, "takeover": 1, "version": 1}


@pytest.fixture(
    params=STATISTICS,
    ids="-".join,
    scope="module",
)
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Much that is finished and little that is not, and a planner told that nothing is there, or the truth."""
    with filled(request, tmp_path_factory, request.param, fill) as made:
        yield made


def fill(conn: Connection) -> None:
    first = 0
    for status, rows in GROUPS:
        DISPATCHES(conn, first=first, rows=rows, status=status)
        first += rows
    HISTORY(conn, first=0, rows=FINISHED)
    PURGED(conn, first=0, rows=FINISHED)


def plan(conn: Connection, statement: Statement, parameters: dict[str, Any]) -> str:
    """The plan as the database prints it."""
    verb = "EXPLAIN (COSTS OFF) " if conn.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "
    explained = Statement(verb + statement._sql)
    rows = (explained.for_rows if "rows" in parameters else explained)(conn, **parameters).all()
    return "\n".join(str(row[-1]) for row in rows)


def kept_plan(conn: Connection, statement: Statement, parameters: dict[str, Any]) -> str:
    """The plan that Postgres makes for any parameters: those of a statement that is prepared."""
    conn.exec_driver_sql("SET LOCAL plan_cache_mode = force_generic_plan")
    for _ in range(preparing.PREPARED_AFTER + 1):
        (statement.for_rows if "rows" in parameters else statement)(conn, **parameters)
    found = conn.exec_driver_sql(
        "SELECT name, cardinality(parameter_types) FROM pg_prepared_statements ORDER BY prepare_time DESC LIMIT 1"
    ).one()
    given = f"({', '.join(['NULL'] * found[1])})" if found[1] else ""
    rows = conn.exec_driver_sql(f"EXPLAIN (COSTS OFF) EXECUTE {found[0]}{given}").all()
    return "\n".join(str(row[-1]) for row in rows)


def walks(text: str) -> list[str]:
    """The lines in which a whole table of ours is read; SQLite may SCAN along a partial index of ours."""
    return [
        line
        for line in text.splitlines()
        if "Seq Scan on postroad_" in line
        or (("SCAN o" in line or "SCAN t" in line or "SCAN postroad_" in line) and " INDEX " not in line)
    ]


PLANNED = [  # by our own indexes only: their loops tell the planner so
    (dispatch_claims._HEADS, {"kinds": '["mail", "sms"]', "now": NOW, "takeover": 1}, "outbox_due"),
    (ready._OLDEST, {**DUE, "gated": "mail"}, "outbox_due"),
    (ready._HOSTS, HOSTS, "outbox_host"),
    (settle._OVERDUE, {"now": NOW, "limit": 50}, "outbox_expires"),
    (dispatch_claims._BY_TOKEN, {"token": "token"}, "outbox_due"),
    (moves._PLACES, {"rows": TOLD}, "inbox_event"),
    (due._SENDS, {"kinds": '["mail", "sms"]'}, "outbox_due"),
    (due._MOMENTS, {}, "outbox_expires"),
]
TRUSTED = [
    (dispatch_claims._CLAIM, CLAIMED, "_pkey"),
    (dispatch_claims._CLAIM_AND_RECORD, {**CLAIMED, "rows": STARTED}, "_pkey"),
    (dispatch_claims._CURRENT, {"holds": HOLDS, "now": NOW}, "_pkey"),
    (moves._LOCK, {"ids": IDS}, "_pkey"),
    (moves._UPDATE, {"rows": MOVES[:1], "now": NOW}, "_pkey"),
    (moves._UPDATE, {"rows": MOVES, "now": NOW}, "_pkey"),
    (moves._UPDATE, {"rows": MIXED, "now": NOW}, "_pkey"),
    (outbox._HOLDERS, {"keys": KEYS}, "outbox_key"),
    (outbox._PENDING, {"keys": KEYS}, "outbox_key"),
    (outbox._UNDO, {"ids": IDS}, "_pkey"),
]
HELD = [  # while a gate is closed: where the planner takes the table for nearly empty, they may pass what is held
    (ready._OF_HOST, {**DUE, "host": "up"}, "outbox_host"),
]
READ = [  # by people only: where the planner takes a table for nearly empty, they wait a moment longer
    (dispatch_views._GET, {"name": "id/7"}, "outbox_key"),
    (dispatch_views._HISTORY, {"id": "id/7"}, "transitions_entity"),
    (operators._STORIES, {"ids": IDS}, "transitions_entity"),
    (settle._LATE_WORDS, {"ids": IDS}, "transitions_entity"),
    (operators._REVIVE, {"revived": '[{"id":"id/1","due_at":1,"expires_at":null}]', "now": NOW}, "_pkey"),
]


def name(value: object) -> str | None:
    modules = (dispatch_claims, dispatch_views, due, moves, operators, outbox, ready, settle)
    for module in modules:
        for key, item in vars(module).items():
            if item is value and isinstance(value, Statement):
                return key.strip("_").lower()
    return "" if isinstance(value, dict) else None


@pytest.mark.parametrize(("statement", "given", "index"), PLANNED + HELD + TRUSTED + READ, ids=name)
def test_a_statement_uses_its_index(
    database: Database, request: pytest.FixtureRequest, statement: Statement, given: dict[str, Any], index: str
) -> None:
    """No hot statement reads what is finished, whatever the planner was told about the tables."""
    if (statement, given, index) in HELD + READ and request.node.callspec.params["database"][1] == "hollow":
        return
    if database.is_sqlite and statement is dispatch_claims._CLAIM_AND_RECORD:  # it takes these as two
        return
    with database.engine.connect() as conn:
        database.bind(conn).begin()
        # Our own transactions that write begin with distrust; those that only read do not.
        own = nullcontext() if (statement, given, index) in PLANNED + HELD else dialects.users_plans(conn)
        with own:
            text = plan(conn, statement, given)
        if database.is_sqlite:  # it names the indexes of UNIQUE and PRIMARY KEY by itself
            assert "INDEX" in text, text
            assert index in text or index in ("_pkey", "outbox_key", "inbox_event"), text
        else:
            assert index in text, text
        assert walks(text) == [], text


@pytest.mark.parametrize(("statement", "given", "index"), PLANNED + HELD + TRUSTED, ids=name)
def test_a_plan_that_is_kept_uses_its_index(
    database: Database, request: pytest.FixtureRequest, statement: Statement, given: dict[str, Any], index: str
) -> None:
    """What is planned once for a session reads no more than what is planned for its parameters."""
    if database.is_sqlite:  # it plans when it prepares, and knows no parameters then
        return
    if (statement, given, index) in HELD and request.node.callspec.params["database"][1] == "hollow":
        return
    with database.engine.connect() as conn:
        database.bind(conn).begin()
        text = kept_plan(conn, statement, given)
        assert index in text, text
        assert walks(text) == [], text


def test_a_due_scan_is_not_sorted(database: Database) -> None:
    """Due rows come in the index's order: a backlog is never sorted as a whole."""
    with database.engine.connect() as conn:
        dialects.distrust_statistics(database.bind(conn))
        text = plan(conn, ready._OLDEST, {**DUE, "gated": "mail"}) + plan(
            conn, settle._OVERDUE, {"now": NOW, "limit": 50}
        )
        assert "Sort" not in text, text
        assert "B-TREE" not in text, text


def test_a_walk_is_recognised(database: Database) -> None:
    """The plan of a statement that no index answers is told from the others."""
    with database.engine.connect() as conn:
        text = plan(database.bind(conn), Statement("SELECT o.id FROM {p}outbox AS o WHERE o.body = 'x'"), {})
        assert walks(text), text
