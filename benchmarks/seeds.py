"""Many rows at once, written by the database itself: a backlog, or what finished work leaves behind."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, TextClause, text

from benchmarks import work
from benchmarks.places import Place

ENTRIES = 100  # of each stream
AT_ONCE = 100_000
_NUMBERS = {
    "sqlite": "(WITH RECURSIVE ns(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM ns WHERE n < :last) "
    "SELECT n FROM ns) AS numbers",
    "postgresql": "(SELECT n FROM generate_series(CAST(:first AS bigint), CAST(:last AS bigint)) AS n) AS numbers",
}
# In the order of the indexes: written by chance, a million of them take many minutes.
_ID = {"sqlite": "printf('%032x', n)", "postgresql": "lpad(to_hex(n), 32, '0')"}
_STREAM = {
    "sqlite": f"printf('{work.TYPE}/s%09d', n / {ENTRIES})",
    "postgresql": f"'{work.TYPE}/s' || lpad(CAST(n / {ENTRIES} AS text), 9, '0')",
}

_OUTBOX = """
INSERT INTO {p}postroad_outbox
    (id, key, stream, kind, version, destination, body, headers, policy, status, attempt, max_attempts, epoch, due_at,
     first_attempt_at, content_hash, origin, created_at, updated_at)
SELECT {id}, 'old' || {id}, {stream}, :mail, 1, 'driver', :body, '{{}}', 'event', :status, :attempt,
    CAST(:most AS bigint), 0, CAST(:due AS bigint), CAST(:first_at AS bigint), :hash, '{{}}', :now, :now FROM {numbers}
"""
_TRANSITIONS = """
INSERT INTO {p}postroad_transitions
    (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
SELECT {id}, 'delivering', 'delivered', 'dispatch.delivered.transport_ok', 'attempt 1 of 8 sent', 'system', '', '[]',
    '{{"attempt"\\:1,"epoch"\\:0}}', :now FROM {numbers}
"""
_LOG = """
INSERT INTO {p}postroad_log (stream, seq, entry_id, kind, version, data, received_at, recorded_at, run_id, cause)
SELECT {stream}, n % :entries + 1, 'old' || {id}, :event, 1, :body, :now, :now, {id}, NULL FROM {numbers}
"""
_STREAMS = """
INSERT INTO {p}postroad_streams (id, type, version)
SELECT {stream}, :type, :entries FROM {numbers} WHERE n % :entries = 0
"""
_RUNS = """
INSERT INTO {p}postroad_runs
    (run_id, stream, turn_id, attempt, claim_token, started_at, ended_at, end_reason)
SELECT {id}, {stream}, {id}, 1, {id}, :now, :now, 'committed' FROM {numbers}
"""
_CONVERSATION = """
INSERT INTO {p}postroad_log (stream, seq, entry_id, kind, version, data, received_at, recorded_at, run_id, cause)
SELECT :stream, n + 1, 'old' || {id}, CASE n % 2 WHEN 0 THEN :event ELSE :decided END, 1, :body, :now, :now, {id},
    CASE n % 2 WHEN 0 THEN NULL ELSE 'turn' || {id} END FROM {numbers}
"""
_CONVERSATION_HEAD = """
INSERT INTO {p}postroad_streams (id, type, version) SELECT :stream, :type, CAST(:entries AS bigint)
FROM {numbers} WHERE n = 0
"""


def pending(place: Place, count: int) -> None:
    """Dispatches of `MAIL` that are due."""
    now = work.now()
    _fill(place, count, _OUTBOX, {"status": "pending", "attempt": 0, "most": None, "due": now, "first_at": None})


def finished(place: Place, count: int) -> None:
    """Delivered dispatches, history of theirs, entries, and runs: `count` of each, a hundred for each stream."""
    past = work.now() - 3_600_000_000
    ended = {"status": "delivered", "attempt": 1, "most": work.ATTEMPTS, "due": None, "first_at": past}
    _fill(place, count, _OUTBOX, ended)
    for sql in (_TRANSITIONS, _LOG, _RUNS):
        _fill(place, count, sql, {"entries": ENTRIES})
    _fill(place, count, _STREAMS, {"entries": ENTRIES})


def conversation(place: Place, stream: str, entries: int) -> None:
    """A stream's log with that many entries: an event and what was decided on it, by turns."""
    named = {"stream": stream, "decided": work.DECIDED, "entries": entries}
    for sql in (_CONVERSATION, _CONVERSATION_HEAD):
        _fill(place, entries, sql, named)


def _fill(place: Place, count: int, sql: str, parameters: Mapping[str, Any]) -> None:
    """Write rows numbered from 0, in transactions that leave the log of the database small."""
    dialect = place.database.engine.dialect.name
    prefix = f'"{place.schema}".' if place.schema else ""
    statement = text(sql.format(p=prefix, id=_ID[dialect], stream=_STREAM[dialect], numbers=_NUMBERS[dialect]))
    body = work.text(work.mail("000000"))
    always = {"mail": work.MAIL, "event": work.EVENT, "type": work.TYPE, "now": work.now(), "body": body,
              "hash": work.content_hash(work.MAIL, body)} | dict(parameters)  # fmt: skip
    used = {name: value for name, value in always.items() if name in statement.compile().params}
    for first in range(0, count, AT_ONCE):
        part = {"first": first, "last": min(first + AT_ONCE, count) - 1}
        place.database.transact(_run, statement, used | part)


def _run(conn: Connection, statement: TextClause, parameters: Mapping[str, Any], *, now: int) -> None:
    conn.execute(statement, parameters)
