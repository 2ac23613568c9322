"""Runs: one row per attempt at a turn, written with its claim and with its end."""

from collections.abc import Sequence

from sqlalchemy import Connection

from postroad.model.lifecycle import RunEnd
from postroad.model.rows import EndedRun, RunRow, TurnClaim
from postroad.store.statements import Statement

_START = Statement(
    "INSERT INTO {p}runs (run_id, stream, turn_id, attempt, claim_token, started_at) "
    "SELECT new.run_id, new.stream, new.turn_id, new.attempt, new.token, :now FROM "
    "{rows:new(run_id text, stream text, turn_id text, attempt int, token text)}"
)
# A claimant that was thought lost and comes back late tells more than whoever took over: it was stale.
_END = Statement(
    "UPDATE {p}runs SET ended_at = :now, end_reason = ends.why, error = ends.said "
    "FROM {rows:ends(name text, why text, said text)} "
    "WHERE {match:run_id=ends.name} "
    "AND (end_reason IS NULL OR (end_reason = 'interrupted' AND ends.why = 'stale'))"
)
_OF_STREAM = Statement(
    "SELECT run_id, stream, turn_id, attempt, started_at, ended_at, end_reason, error FROM {p}runs "
    "WHERE stream = :stream ORDER BY started_at DESC, attempt DESC LIMIT :limit"
)

_ENDED = Statement("SELECT end_reason FROM {p}runs WHERE run_id = :run_id")


def start(conn: Connection, claims: Sequence[TurnClaim], *, now: int) -> None:
    """Write that each claim's run has started."""
    if claims:
        rows = [
            {
                "run_id": claim.run_id,
                "stream": claim.stream,
                "turn_id": claim.turn_id,
                "attempt": claim.attempt,
                "token": claim.token,
            }
            for claim in claims
        ]
        _START.for_rows(conn, rows, now=now)


def end(conn: Connection, ends: Sequence[EndedRun], *, now: int) -> None:
    """Write how runs ended; a run that has ended already keeps its end."""
    if ends:
        rows = [{"name": ended.run_id, "why": ended.end, "said": ended.error} for ended in ends]
        _END.for_rows(conn, rows, now=now)


def of_stream(conn: Connection, stream: str, *, limit: int = 50) -> list[RunRow]:
    """A stream's runs, newest first."""
    return [
        RunRow(
            run_id=row.run_id,
            stream=row.stream,
            turn_id=row.turn_id,
            attempt=row.attempt,
            started_at=row.started_at,
            ended_at=row.ended_at,
            end=None if row.end_reason is None else RunEnd(row.end_reason),
            error=row.error,
        )
        for row in _OF_STREAM(conn, stream=stream, limit=limit)
    ]


def ended(conn: Connection, run_id: str) -> RunEnd | None:
    """How a run ended; None: it has not, or there is no such run."""
    found = _ENDED(conn, run_id=run_id).scalar_one_or_none()
    return None if found is None else RunEnd(found)
