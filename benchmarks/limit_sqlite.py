"""The limit on SQLite: hand-written statements over the raw driver, one connection, WAL, synchronous=FULL.

The fastest form that was found: `executemany` of prepared statements inside BEGIN IMMEDIATE; here, other than on
Postgres, JSON parameters are two to three times slower. One transaction per batch and step.
"""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any

from benchmarks import work
from benchmarks.places import Place
from benchmarks.work import Work

Row = tuple[Any, ...]

PUBLISH = """
INSERT INTO postroad_inbox (stream, type, event_id, kind, version, data, received_at, ready_at)
VALUES (?, ?, ?, ?, 1, ?, ?, ?) ON CONFLICT (stream, event_id) DO NOTHING
"""

CLAIM = """
SELECT i.position, i.stream, i.event_id, i.kind, i.data, i.received_at,
    coalesce((SELECT s.version FROM postroad_streams s WHERE s.id = i.stream), 0)
FROM postroad_inbox i
WHERE i.type = ? AND i.front = 1 AND i.reason IS NULL AND i.ready_at <= ?
AND (SELECT 1 FROM postroad_queues q WHERE q.stream = i.stream) IS NULL
ORDER BY i.ready_at, i.position LIMIT ?
"""
TAKE = """
INSERT INTO postroad_queues (stream, type, claim_token, until, state, attempts, picked)
VALUES (?, ?, ?, ?, 'claimed', 1, ?)
"""
BEGIN_RUN = """
INSERT INTO postroad_runs (run_id, stream, turn_id, attempt, claim_token, started_at) VALUES (?, ?, ?, 1, ?, ?)
"""

FREE = "DELETE FROM postroad_queues WHERE stream = ? AND claim_token = ?"
ADVANCE = """
INSERT INTO postroad_streams (id, type, version) VALUES (?, ?, ?)
ON CONFLICT (id) DO UPDATE SET version = excluded.version WHERE version = ?
"""
APPEND = """
INSERT INTO postroad_log
    (stream, seq, entry_id, kind, version, data, received_at, recorded_at, run_id, cause)
VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, ?)
"""
CONSUME = "DELETE FROM postroad_inbox WHERE position = ?"
SEND = """
INSERT INTO postroad_outbox
    (id, key, stream, kind, version, destination, body, headers, policy, status, attempt, epoch, due_at,
     content_hash, origin, created_at, updated_at)
VALUES (?, ?, ?, ?, 1, ?, ?, '{}', 'event', 'pending', 0, 0, ?, ?, '{}', ?, ?)
"""
RECORD = """
INSERT INTO postroad_transitions
    (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
VALUES (?, ?, ?, ?, ?, ?, ?, '[]', ?, ?)
"""
SET_TIMER = """
INSERT INTO postroad_timers (stream, key, fire_at, kind, data, spec, status, generation, updated_at)
VALUES (?, ?, ?, 'postroad.timer_fired', ?, ?, 'armed', 0, ?)
"""
END_RUN = "UPDATE postroad_runs SET ended_at = ?, end_reason = 'committed' WHERE run_id = ?"

START = """
UPDATE postroad_outbox
SET status = 'delivering', attempt = attempt + 1, claim_token = ?, due_at = ?,
    first_attempt_at = coalesce(first_attempt_at, ?), max_attempts = coalesce(max_attempts, ?), updated_at = ?
WHERE id IN (
    SELECT id FROM postroad_outbox
    WHERE kind = ? AND status IN ('pending', 'delivering') AND due_at IS NOT NULL AND due_at <= ?
    ORDER BY due_at LIMIT ?)
RETURNING id, key, stream, attempt
"""
SETTLE = """
UPDATE postroad_outbox SET status = 'delivered', due_at = NULL, claim_token = NULL, last_error = NULL, updated_at = ?
WHERE id = ? AND claim_token = ?
"""

FIRE = """
UPDATE postroad_timers SET status = 'fired', updated_at = ?
WHERE rowid IN (
    SELECT rowid FROM postroad_timers WHERE status = 'armed' AND fire_at <= ? ORDER BY fire_at LIMIT ?)
RETURNING stream, key, kind, data
"""


class SQLiteLimit:
    """Each work by hand. `run` gives seconds; the place was cleared before."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._conn = sqlite3.connect(place.path, isolation_level=None, cached_statements=64)
        self._conn.execute("PRAGMA synchronous = FULL")

    def run(self, what: Work) -> float:
        """Do the work and say how many seconds it took."""
        match what.name:
            case "publish" | "publish bulk":
                return self._timed(what, self._publish)
            case "decide":
                self._place.seed_events(what.count)
                return self._timed(what, self._decide)
            case "drain":
                self._place.seed_dispatches(what.count, what.streams)
                return self._timed(what, self._drain)
            case "timers":
                self._place.seed_timers(what.count, what.streams)
                return self._timed(what, self._fire)

    def close(self) -> None:
        """Close the connection."""
        self._conn.close()

    def _timed(self, what: Work, step: Callable[[Work, int], None]) -> float:
        began = perf_counter()
        for first in range(0, what.count, what.batch):
            step(what, first)
        return perf_counter() - began

    def _begin(self) -> None:
        self._conn.execute("BEGIN IMMEDIATE")

    def _commit(self) -> None:
        self._conn.execute("COMMIT")

    def _many(self, sql: str, rows: Iterable[Row]) -> int:
        return self._conn.executemany(sql, rows).rowcount

    def _publish(self, what: Work, first: int) -> None:
        events = [(n, work.text(work.event(n))) for n in range(first, first + what.batch)]
        self._begin()
        now = work.now()
        rows = [(work.stream(n % what.streams), work.TYPE, f"e{n}", work.EVENT, data, now, now) for n, data in events]
        self._many(PUBLISH, rows)
        self._commit()

    def _decide(self, what: Work, first: int) -> None:
        token = work.token()
        claimed = self._claim(what, token)
        decided = [(row, _Decision(row[1], row[2])) for row in claimed]
        self._begin()
        self._write(decided, token, work.now())
        self._commit()

    def _claim(self, what: Work, token: str) -> list[Row]:
        self._begin()
        now = work.now()
        found = self._conn.execute(CLAIM, (work.TYPE, now, what.batch)).fetchall()
        claimed = [(*row, work.token(), work.token()) for row in found]
        until = now + work.TURN_LEASE
        self._many(TAKE, ((row[1], work.TYPE, token, until, f"[{row[0]}]") for row in claimed))
        self._many(BEGIN_RUN, ((row[7], row[1], row[8], token, now) for row in claimed))
        self._commit()
        return claimed

    def _write(self, decided: Sequence[tuple[Row, "_Decision"]], token: str, now: int) -> None:
        freed = self._many(FREE, ((row[1], token) for row, _ in decided))
        moved = self._many(ADVANCE, ((row[1], work.TYPE, row[6] + work.ENTRIES_PER_TURN, row[6]) for row, _ in decided))
        if (freed, moved) != (len(decided), len(decided)):
            raise RuntimeError("a claim was lost")
        self._many(APPEND, (entry for row, made in decided for entry in _entries(row, made, now)))
        self._many(CONSUME, ((row[0],) for row, _ in decided))
        sends = [(row[1], send) for row, made in decided for send in made.sends]
        self._many(
            SEND,
            ((id, key, stream, work.MAIL, "driver", body, now, hash, now, now)
             for stream, (id, key, body, hash) in sends),
        )  # fmt: skip
        self._many(RECORD, (_enqueued(send[0], "turn", "turn", now) for _, send in sends))
        fire_at, spec = now + work.TIMER_SECONDS * 1_000_000, f"after {work.TIMER_SECONDS * 1_000_000}"
        self._many(SET_TIMER, ((row[1], made.number, fire_at, made.timer, spec, now) for row, made in decided))
        self._many(END_RUN, ((now, row[7]) for row, _ in decided))

    def _drain(self, what: Work, first: int) -> None:
        token, claimed = self.start_sends(what.batch)
        self.settle_sends(token, claimed)

    def start_sends(self, batch: int) -> tuple[str, list[Row]]:
        """Claim due dispatches: the claim's token and what was claimed, as rows of id, key, stream and attempt."""
        token = work.token()
        self._begin()
        now = work.now()
        claimed = self._conn.execute(
            START, (token, now + work.SEND_LEASE, now, work.ATTEMPTS, now, work.MAIL, now, batch)
        ).fetchall()
        self._many(RECORD, (_history(row, "pending", "delivering", now) for row in claimed))
        self._commit()
        return token, claimed

    def settle_sends(self, token: str, claimed: Sequence[Row]) -> None:
        """End what was claimed as delivered."""
        outcomes = [(row, work.outcome(row[0], row[1])) for row in claimed if row[2]]
        self._begin()
        now = work.now()
        if self._many(SETTLE, ((now, row[0], token) for row in claimed)) != len(claimed):
            raise RuntimeError("a claim was lost")
        self._many(
            PUBLISH,
            ((row[2], work.TYPE, f"out:{row[1]}:delivered", "postroad.outcome", data, now, now)
             for row, data in outcomes),
        )  # fmt: skip
        self._many(RECORD, (_history(row, "delivering", "delivered", now) for row in claimed))
        self._commit()

    def send(self, key: str) -> None:
        """Enqueue one dispatch of no stream."""
        body = work.text(work.mail(key))
        id, now = work.token(), work.now()
        self._begin()
        self._many(SEND, [(id, key, "", work.MAIL, "driver", body, now, work.content_hash(body), now, now)])
        self._many(RECORD, [_enqueued(id, "app", "begin", now)])
        self._commit()

    def _fire(self, what: Work, first: int) -> None:
        self._begin()
        now = work.now()
        due = self._conn.execute(FIRE, (now, now, what.batch)).fetchall()
        self._many(
            PUBLISH, ((stream, work.TYPE, f"evt:{key}", kind, data, now, now) for stream, key, kind, data in due)
        )
        self._commit()


class _Decision:
    """What a turn comes to."""

    __slots__ = ("entry", "number", "sends", "timer")

    def __init__(self, stream: str, event: str) -> None:
        self.number = number = stream.partition("/")[2]
        self.entry = work.text(work.decision(event))
        body = work.text(work.mail(number))
        hash = work.content_hash(work.MAIL, body, "driver")
        self.sends = [(work.token(), f"{number}/{each}", body, hash) for each in range(work.SENDS_PER_TURN)]
        self.timer = work.text({"number": number})


def _entries(row: Row, made: _Decision, now: int) -> tuple[Row, Row]:
    _, stream, event_id, kind, data, received, version, run, turn = row
    return (
        (stream, version + 1, event_id, kind, data, received, now, run, None),
        (stream, version + 2, f"postroad.{turn}.0", work.DECIDED, made.entry, now, now, run, turn),
    )


def _enqueued(id: str, source: str, actor: str, now: int) -> Row:
    said = f"enqueued kind={work.MAIL}"
    return (id, None, "pending", "dispatch.pending.enqueued", said, source, actor, "{}", now)


def _history(row: Row, before: str, after: str, now: int) -> Row:
    attempt = f"attempt {row[3]} of {work.ATTEMPTS}"
    about = f'{{"attempt":{row[3]},"epoch":0}}'
    if after == "delivering":
        return (row[0], before, after, "dispatch.delivering.attempt", attempt, "system", "", about, now)
    return (row[0], before, after, "dispatch.delivered.transport_ok", f"{attempt} sent", "system", "", about, now)
