"""The limit on Postgres: hand-written statements over the raw driver, prepared, default durability.

The fastest form that was found: each step is one statement, which is then a transaction by itself (autocommit)
and one round trip: data-modifying CTEs over one JSON parameter, the fence inside (a claim that was lost divides
by zero). Publishing and draining share each batch between two connections, since one would leave the server idle
while the client prepares; deciding uses one, because two would need locks on names against claiming twice.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import psycopg

from benchmarks import work
from benchmarks.places import Place
from benchmarks.work import Work

Cursor = psycopg.Cursor[Any]
Row = tuple[Any, ...]
LANES = 2
CLAIMED = (
    "position", "stream", "event_id", "kind", "data", "received_at", "run_id", "turn_id", "version",
)  # fmt: skip

PUBLISH = """
INSERT INTO postroad_inbox (stream, type, event_id, kind, version, data, received_at, ready_at)
SELECT stream, %(type)s, event_id, %(kind)s, 1, data, %(now)s, %(now)s
FROM json_to_recordset(CAST(%(events)s AS json)) AS e(stream text, event_id text, data text)
ON CONFLICT (stream, event_id) DO NOTHING
"""
PUBLISH_ONE = """
INSERT INTO postroad_inbox (stream, type, event_id, kind, version, data, received_at, ready_at)
VALUES (%s, %s, %s, %s, 1, %s, %s, %s) ON CONFLICT (stream, event_id) DO NOTHING
"""

# The ids of run and turn are made here, so that one statement claims.
CLAIM = """
WITH found AS MATERIALIZED (
    SELECT i.position, i.stream, i.event_id, i.kind, i.data, i.received_at,
        md5(%(token)s || i.stream) AS run_id, md5(i.stream || i.event_id) AS turn_id
    FROM postroad_inbox i
    WHERE i.type = %(type)s AND i.front = 1 AND i.reason IS NULL AND i.ready_at <= %(now)s
    AND (SELECT 1 FROM postroad_queues q WHERE q.stream = i.stream) IS NULL
    ORDER BY i.ready_at, i.position LIMIT %(batch)s FOR UPDATE SKIP LOCKED),
taken AS (
    INSERT INTO postroad_queues (stream, type, claim_token, until, state, attempts, picked)
    SELECT stream, %(type)s, %(token)s, %(until)s, 'claimed', 1, '[' || position || ']' FROM found
    ON CONFLICT (stream) DO NOTHING RETURNING stream),
begun AS (
    INSERT INTO postroad_runs (run_id, stream, turn_id, attempt, claim_token, started_at)
    SELECT run_id, stream, turn_id, 1, %(token)s, %(now)s FROM found JOIN taken USING (stream))
SELECT position, stream, event_id, kind, data, received_at, run_id, turn_id,
    coalesce((SELECT s.version FROM postroad_streams s WHERE s.id = stream), 0)
FROM found JOIN taken USING (stream)
"""

DECIDE = """
WITH turns AS MATERIALIZED (
    SELECT * FROM json_to_recordset(CAST(%(turns)s AS json)) AS t(
        position bigint, stream text COLLATE "C", event_id text, kind text, data text, received_at bigint,
        run_id text COLLATE "C", turn_id text, version bigint, entry text, key text, timer text)),
sends AS MATERIALIZED (
    SELECT * FROM json_to_recordset(CAST(%(sends)s AS json)) AS s(
        id text, key text, stream text, body text, hash text)),
freed AS (
    DELETE FROM postroad_queues q USING turns t
    WHERE q.stream = t.stream AND q.claim_token = %(token)s RETURNING 1),
moved AS (
    INSERT INTO postroad_streams AS s (id, type, version)
    SELECT stream, %(type)s, version + 2 FROM turns
    ON CONFLICT (id) DO UPDATE SET version = excluded.version WHERE s.version = excluded.version - 2
    RETURNING 1),
consumed AS (DELETE FROM postroad_inbox i USING turns t WHERE i.position = t.position RETURNING 1),
appended AS (
    INSERT INTO postroad_log
        (stream, seq, entry_id, kind, version, data, received_at, recorded_at, run_id, cause)
    SELECT stream, version + 1, event_id, kind, 1, data, received_at, %(now)s, run_id, NULL FROM turns
    UNION ALL
    SELECT stream, version + 2, 'postroad.' || turn_id || '.0', %(decided)s, 1, entry, %(now)s, %(now)s, run_id,
        turn_id FROM turns),
sent AS (
    INSERT INTO postroad_outbox
        (id, key, stream, kind, version, destination, body, headers, policy, status, attempt, epoch, due_at,
         content_hash, origin, created_at, updated_at)
    SELECT id, key, stream, %(mail)s, 1, 'driver', body, '{}', 'event', 'pending', 0, 0, %(now)s, hash, '{}',
        %(now)s, %(now)s FROM sends),
recorded AS (
    INSERT INTO postroad_transitions
        (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
    SELECT id, NULL, 'pending', 'dispatch.pending.enqueued', 'enqueued kind=' || %(mail)s, 'turn', 'turn', '[]',
        '{}', %(now)s FROM sends),
timed AS (
    INSERT INTO postroad_timers (stream, key, fire_at, kind, data, spec, status, generation, updated_at)
    SELECT stream, key, %(now)s + %(wait)s, 'postroad.timer_fired', timer, 'after ' || %(wait)s, 'armed', 0,
        %(now)s FROM turns),
ended AS (
    UPDATE postroad_runs r SET ended_at = %(now)s, end_reason = 'committed' FROM turns t
    WHERE r.run_id = t.run_id)
SELECT 1 / CAST((SELECT count(*) FROM freed) = %(count)s AND (SELECT count(*) FROM moved) = %(count)s
    AND (SELECT count(*) FROM consumed) = %(count)s AS int)
"""

START = """
WITH claimed AS (
    UPDATE postroad_outbox
    SET status = 'delivering', attempt = attempt + 1, claim_token = %(token)s, due_at = %(until)s,
        first_attempt_at = coalesce(first_attempt_at, %(now)s), max_attempts = coalesce(max_attempts, %(most)s),
        updated_at = %(now)s
    WHERE id = ANY(ARRAY(
        SELECT id FROM postroad_outbox
        WHERE kind = %(mail)s AND status IN ('pending', 'delivering') AND due_at <= %(now)s
        ORDER BY due_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED))
    RETURNING id, key, stream, attempt, max_attempts),
recorded AS (
    INSERT INTO postroad_transitions
        (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
    SELECT id, 'pending', 'delivering', 'dispatch.delivering.attempt',
        'attempt ' || attempt || ' of ' || max_attempts, 'system', '', '[]',
        '{"attempt":' || attempt || ',"epoch":0}', %(now)s FROM claimed)
SELECT id, key, stream, attempt FROM claimed
"""

SETTLE = """
WITH ends AS MATERIALIZED (
    SELECT * FROM json_to_recordset(CAST(%(ends)s AS json)) AS e(
        id text COLLATE "C", stream text, event_id text, outcome text, attempt int)),
settled AS (
    UPDATE postroad_outbox o
    SET status = 'delivered', due_at = NULL, claim_token = NULL, last_error = NULL, updated_at = %(now)s
    FROM ends e WHERE o.id = e.id AND o.claim_token = %(token)s RETURNING 1),
told AS (
    INSERT INTO postroad_inbox (stream, type, event_id, kind, version, data, received_at, ready_at)
    SELECT stream, %(type)s, event_id, 'postroad.outcome', 1, outcome, %(now)s, %(now)s FROM ends WHERE stream <> ''
    ON CONFLICT (stream, event_id) DO NOTHING),
recorded AS (
    INSERT INTO postroad_transitions
        (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
    SELECT id, 'delivering', 'delivered', 'dispatch.delivered.transport_ok',
        'attempt ' || attempt || ' of ' || %(most)s || ' sent', 'system', '', '[]',
        '{"attempt":' || attempt || ',"epoch":0}', %(now)s FROM ends)
SELECT 1 / CAST((SELECT count(*) FROM settled) = %(count)s AS int)
"""

FIRE = """
WITH due AS MATERIALIZED (
    SELECT stream, key, kind, data FROM postroad_timers
    WHERE status = 'armed' AND fire_at <= %(now)s ORDER BY fire_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED),
told AS (
    INSERT INTO postroad_inbox (stream, type, event_id, kind, version, data, received_at, ready_at)
    SELECT stream, %(type)s, 'evt:' || key, kind, 1, data, %(now)s, %(now)s FROM due
    ON CONFLICT (stream, event_id) DO NOTHING),
marked AS (
    UPDATE postroad_timers t SET status = 'fired', updated_at = %(now)s FROM due
    WHERE t.stream = due.stream AND t.key = due.key)
SELECT count(*) FROM due
"""


class PostgresLimit:
    """Each work by hand. `run` gives seconds; the place was cleared before."""

    def __init__(self, place: Place, what: Work) -> None:
        self._place = place
        lanes = LANES if what.streams > 1 and what.name in ("publish", "drain") else 1
        self._conns = [connect(place.url, place.schema) for _ in range(lanes)]

    def run(self, what: Work) -> float:
        """Do the work and say how many seconds it took."""
        match what.name:
            case "publish" if what.streams == 1:
                return self._shared_out(what, _publish_one)
            case "publish" | "publish bulk":
                return self._shared_out(what, _publish)
            case "decide":
                self._place.seed_events(what.count)
                return self._until_done(what, _decide)
            case "drain":
                self._place.seed_dispatches(what.count, what.streams)
                return self._until_done(what, _drain)
            case "timers":
                self._place.seed_timers(what.count, what.streams)
                return self._until_done(what, _fire)

    def close(self) -> None:
        """Close the connections."""
        for conn in self._conns:
            conn.close()

    def _shared_out(self, what: Work, step: Callable[[Cursor, Work, range], None]) -> float:
        """Do all numbers, each connection its part of every batch."""
        share = what.batch // len(self._conns)
        shares = iter([range(first, first + share) for first in range(0, what.count, share)])

        def lane(cursor: Cursor) -> None:
            for numbers in shares:
                step(cursor, what, numbers)

        return self._timed(lane)

    def _until_done(self, what: Work, step: Callable[[Cursor, int], int]) -> float:
        """Claim and finish parts of a batch with every connection until nothing is left."""
        share = what.batch // len(self._conns)
        left = what.count
        counting = threading.Lock()

        def lane(cursor: Cursor) -> None:
            nonlocal left
            while left > 0:
                done = step(cursor, share)
                with counting:
                    left -= done

        return self._timed(lane)

    def _timed(self, lane: Callable[[Cursor], None]) -> float:
        cursors = [conn.cursor() for conn in self._conns]
        began = perf_counter()
        with ThreadPoolExecutor(len(cursors)) as threads:
            for ended in [threads.submit(lane, cursor) for cursor in cursors]:
                ended.result()
        return perf_counter() - began


def connect(url: str, schema: str | None) -> psycopg.Connection[Any]:
    """A connection in autocommit mode that plans as ours does."""
    conn = psycopg.connect(url.replace("+psycopg", "", 1), autocommit=True, prepare_threshold=0)
    # As ours does in each transaction: these tables never have true statistics.
    conn.execute("SET enable_seqscan = off")
    conn.execute("SET enable_bitmapscan = off")
    conn.execute(f'SET search_path = "{schema}"')
    return conn


def _publish_one(cursor: Cursor, what: Work, numbers: range) -> None:
    number, now = numbers[0], work.now()
    cursor.execute(
        PUBLISH_ONE,
        (work.stream(0), work.TYPE, f"e{number}", work.EVENT, work.text(work.event(number)), now, now),
    )


def _publish(cursor: Cursor, what: Work, numbers: range) -> None:
    events = [
        {"stream": work.stream(n % what.streams), "event_id": f"e{n}", "data": work.text(work.event(n))}
        for n in numbers
    ]
    cursor.execute(PUBLISH, {"events": work.text(events), "type": work.TYPE, "kind": work.EVENT, "now": work.now()})


def _decide(cursor: Cursor, batch: int) -> int:
    token, now = work.token(), work.now()
    cursor.execute(
        CLAIM,
        {"type": work.TYPE, "now": now, "until": now + work.TURN_LEASE, "token": token, "batch": batch},
    )
    turns, sends = [], []
    for row in cursor.fetchall():
        number = row[1].partition("/")[2]
        body = work.text(work.mail(number))
        hash = work.content_hash(work.MAIL, body, "driver")
        sends += [
            {"id": work.token(), "key": f"{number}/{n}", "stream": row[1], "body": body, "hash": hash}
            for n in range(work.SENDS_PER_TURN)
        ]
        decided = {"entry": work.text(work.decision(row[2])), "key": number, "timer": work.text({"number": number})}
        turns.append(dict(zip(CLAIMED, row, strict=True)) | decided)
    cursor.execute(
        DECIDE,
        {"turns": work.text(turns), "sends": work.text(sends), "token": token, "type": work.TYPE,
         "decided": work.DECIDED, "mail": work.MAIL, "now": work.now(), "count": len(turns),
         "wait": work.TIMER_SECONDS * 1_000_000},
    )  # fmt: skip
    return len(turns)


def _drain(cursor: Cursor, batch: int) -> int:
    token, claimed = start_sends(cursor, batch)
    settle_sends(cursor, token, claimed)
    return len(claimed)


def start_sends(cursor: Cursor, batch: int) -> tuple[str, list[Row]]:
    """Claim due dispatches: the claim's token and what was claimed, as rows of id, key, stream and attempt."""
    token, now = work.token(), work.now()
    cursor.execute(
        START,
        {"token": token, "now": now, "until": now + work.SEND_LEASE, "most": work.ATTEMPTS, "mail": work.MAIL,
         "batch": batch},
    )  # fmt: skip
    return token, cursor.fetchall()


def settle_sends(cursor: Cursor, token: str, claimed: list[Row]) -> None:
    """End what was claimed as delivered."""
    ends = [
        {"id": id, "stream": stream, "event_id": f"out:{key}:delivered", "outcome": work.outcome(id, key),
         "attempt": attempt}
        for id, key, stream, attempt in claimed
    ]  # fmt: skip
    cursor.execute(
        SETTLE,
        {"ends": work.text(ends), "token": token, "type": work.TYPE, "most": work.ATTEMPTS, "now": work.now(),
         "count": len(ends)},
    )  # fmt: skip


def _fire(cursor: Cursor, batch: int) -> int:
    cursor.execute(FIRE, {"now": work.now(), "batch": batch, "type": work.TYPE})
    (fired,) = cursor.fetchall()
    return int(fired[0])
