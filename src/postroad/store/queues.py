"""Claims of streams: who may process a stream's next turn, and what becomes of the stream when that ends.

The claim is a row of `queues` with a token. Only its holder, or whoever finds its lease over, changes it.
An inbox row loses its front mark, moves or goes only under the stream's queues row, in a statement after
the lock; so `front = 0` implies a queues row, and an event without either cannot be stranded.
"""

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.errors import StaleClaim
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import QueueState, RunEnd
from postroad.model.rows import ClaimedTurns, EndedRun, Hold, InboxEvent, NewAlert, TurnClaim
from postroad.store import alerts, delegations, dialects, reports, runs, stopping
from postroad.store.inbox import UNDEAD
from postroad.store.log import LANDED
from postroad.store.queue_search import Ask, Candidate, search
from postroad.store.statements import Row, Statement, as_json

ADOPTED_AT_ONCE = 5_000
STREAM_DELETED = "stream_deleted"

# Without the look at `queues` an event that landed meanwhile would be claimed again: an unknown stream is
# locked by now, but was chosen by an older snapshot.
_SETS = Statement(
    "SELECT want.stream AS stream, (SELECT s.version FROM {p}streams s WHERE s.id = want.stream) AS version, "
    "(SELECT s.deleted_at FROM {p}streams s WHERE s.id = want.stream) AS deleted_at, "
    + stopping.ASKS
    % "want.stream"
    + " AS stop, "
    "CASE WHEN want.fresh = 1 THEN CAST((SELECT {json_agg}(cut.position) FROM ("
    f"SELECT front.position, min(CASE WHEN {reports.IS_ONE} THEN front.position END) OVER () AS report, "
    f"min(CASE WHEN NOT {reports.IS_ONE} THEN front.position END) OVER () AS message FROM ("
    "SELECT i.position, i.kind FROM {p}inbox i WHERE i.type = :type AND i.stream = want.stream "
    "AND i.reason IS NULL ORDER BY i.position LIMIT :batch) AS front) AS cut "
    # Reports and messages are never in one set: it ends where the other sort begins.
    "WHERE report IS NULL OR message IS NULL OR position < report OR position < message) AS text) END AS picked "
    "FROM {rows:want(stream text, known int, fresh int)} "
    "WHERE want.known = 1 OR (SELECT 1 FROM {p}queues q WHERE q.stream = want.stream) IS NULL"
)
_EVENTS = Statement(
    "SELECT e.stream, e.position, e.event_id, e.kind, e.version, e.data, e.received_at, " + LANDED + " AS seq "
    "FROM {p}inbox e WHERE e.position {in_ints:positions} AND " + UNDEAD + " "
    "ORDER BY e.position"
)
_DROP = Statement("DELETE FROM {p}inbox WHERE position {in_ints:positions}")
_BURY = Statement(
    "UPDATE {p}inbox SET reason = :reason, ready_at = :now "
    "WHERE type = :type AND reason IS NULL AND stream {in_list:streams}"
)
_TAKE = Statement(
    "INSERT INTO {p}queues (stream, type, claim_token, until, state, attempts, picked, alone, lease) "
    "SELECT sets.name, :type, :token, :until, 'claimed', sets.attempts, sets.picked, sets.alone, :lease FROM "
    "{rows:sets(name text, attempts int, picked text, alone text)} WHERE true ORDER BY sets.name "
    "ON CONFLICT (stream) DO UPDATE SET claim_token = excluded.claim_token, until = excluded.until, "
    "state = excluded.state, attempts = excluded.attempts, picked = excluded.picked, lease = excluded.lease"
)
_FRONT = Statement(
    "SELECT stream, position FROM {p}inbox WHERE type = :type AND front = 1 AND reason IS NULL "
    "AND ready_at <= :now ORDER BY ready_at, position LIMIT :limit"
)
_LOCK_SOME = Statement("SELECT stream FROM {p}queues WHERE stream {in_list:streams} ORDER BY stream {skip_locked}")
_ADOPT = Statement("UPDATE {p}inbox SET front = 0 WHERE front = 1 AND position {in_ints:positions}")
_LOCK = Statement(
    "SELECT stream, claim_token, picked, alone, " + stopping.ASKS % "q.stream" + " AS stop FROM {p}queues AS q "
    "WHERE stream {in_list:streams} ORDER BY stream {for_update}"
)
_RENEW = Statement("UPDATE {p}queues SET until = :until WHERE claim_token IS NOT NULL AND stream {in_list:streams}")
_LEAVE = Statement(
    "UPDATE {p}queues SET claim_token = NULL, state = :state, until = :until, "
    "attempts = attempts - :given_back WHERE stream = :stream AND claim_token = :token"
)
_RELEASE_ALL = Statement(
    "UPDATE {p}queues SET claim_token = NULL, state = 'ready', until = :now, attempts = attempts - 1 "
    "WHERE claim_token = :token RETURNING stream"
)
_PUT_BACK = Statement(
    "UPDATE {p}queues SET until = :now, attempts = attempts - 1 "
    "WHERE claim_token IS NOT NULL AND stream {in_list:streams}"
)
_SPLIT = Statement(
    "UPDATE {p}queues SET claim_token = NULL, state = 'ready', until = :now, attempts = 0, "
    "picked = :picked, alone = :alone WHERE stream = :stream"
)
_READY = Statement(
    "UPDATE {p}queues AS q SET claim_token = NULL, state = 'ready', until = :now, attempts = 0, "
    "picked = freed.next, alone = freed.rest FROM {rows:freed(name text, next text, rest text)} "
    "WHERE {match:q.stream=freed.name} AND (freed.next IS NOT NULL OR (SELECT 1 FROM {p}inbox i "
    "WHERE i.type = q.type AND i.stream = q.stream AND i.reason IS NULL LIMIT 1) IS NOT NULL) "
    "RETURNING stream"
)
_EMPTY = Statement("DELETE FROM {p}queues WHERE stream {in_list:streams}")


class _Set(msgspec.Struct, kw_only=True):
    """The events that a candidate's turn would have."""

    candidate: Candidate
    version: int
    deleted: bool
    stop: str | None
    positions: list[int]
    events: list[InboxEvent] = []


def claim(
    conn: Connection,
    *,
    stream_type: str,
    token: str,
    limit: int,
    batch: int,
    lease: int,
    cursor: str = "",
    debounce: int = 0,
    debounce_max: int = 0,
    takeover: bool = True,
    now: int,
) -> ClaimedTurns:
    """Claim up to `limit` streams of a type, each with its next events, `batch` of them at the most.

    The token is new for each pass: a run is named by its stream and token.
    A turn that is tried again keeps its set. A stream whose events keep coming is left until it was quiet for
    `debounce` or its oldest event has waited for `debounce_max` (microseconds, like `lease`). `takeover`
    False leaves claims alone whose lease is over.
    """
    failpoint("queues.claim")
    dialects.distrust_statistics(conn)
    ask = Ask(
        stream_type=stream_type,
        limit=limit,
        cursor=cursor,
        debounce=debounce,
        debounce_max=debounce_max,
        takeover=takeover,
    )
    found = search(conn, ask, now=now)
    sets = _read_sets(conn, stream_type, found.streams, batch=batch)
    stops = {one.candidate.stream: one.stop for one in sets if one.stop is not None and one.candidate.picked is None}
    if stops:
        stopping.withdraw(conn, stops, now=now)
        sets = _read_sets(conn, stream_type, found.streams, batch=batch)
    _bury_deleted(conn, stream_type, [one for one in sets if one.deleted], now=now)
    _read_events(conn, [one for one in sets if not one.deleted])
    free(conn, {s.candidate.stream: s.candidate.alone for s in sets if _is_over(s)}, now=now)
    claims = [_claim(one, token, until=now + lease) for one in sets if one.events]
    _take(conn, stream_type, claims, {s.candidate.stream: s.candidate for s in sets}, lease=lease)
    _end_interrupted(conn, [one.candidate for one in sets], now=now)
    runs.start(conn, claims, now=now)
    failpoint("queues.claimed")
    return ClaimedTurns(claims, found.clogged, found.cursor)


def _read_sets(conn: Connection, stream_type: str, found: Sequence[Candidate], *, batch: int) -> list[_Set]:
    if not found:
        return []
    want = [{"stream": c.stream, "known": int(c.known), "fresh": int(c.picked is None)} for c in found]
    rows = {row.stream: row for row in _SETS.for_rows(conn, want, type=stream_type, batch=batch)}
    return [
        _Set(
            candidate=candidate,
            version=row.version or 0,
            deleted=row.deleted_at is not None,
            stop=row.stop,
            positions=stopping.positions(candidate.picked or row.picked),
        )
        for candidate in found
        if (row := rows.get(candidate.stream)) is not None
    ]


def _read_events(conn: Connection, sets: Sequence[_Set]) -> None:
    """Fill in the events. Those that landed already are dropped: a publisher's snapshot was too old."""
    positions = [position for one in sets for position in one.positions]
    if not positions:
        return
    landed: list[int] = []
    events: dict[str, list[InboxEvent]] = {one.candidate.stream: one.events for one in sets}
    for row in _EVENTS(conn, positions=as_json(positions)):
        if row.seq is None:
            events[row.stream].append(_event(row))
        else:
            landed.append(row.position)
    if landed:
        drop(conn, landed)


def drop(conn: Connection, positions: Sequence[int]) -> None:
    """Remove events that are in the log already from the inbox; their stream is locked."""
    _DROP(conn, positions=as_json(positions))


def _event(row: Row) -> InboxEvent:
    return InboxEvent(
        position=row.position,
        event_id=row.event_id,
        kind=row.kind,
        version=row.version,
        data=row.data,
        received_at=row.received_at,
    )


def _bury_deleted(conn: Connection, stream_type: str, deleted: Sequence[_Set], *, now: int) -> None:
    """What waits in a deleted stream ends here, with its reason."""
    if deleted:
        streams = [one.candidate.stream for one in deleted]
        _BURY(conn, type=stream_type, streams=as_json(streams), reason=STREAM_DELETED, now=now)
        delegations.cancel(conn, streams, now=now)  # those that the deletion could not see


def _is_over(one: _Set) -> bool:
    """Whether a known stream has nothing left of what it was claimed for."""
    return one.candidate.known and not one.events


def _claim(one: _Set, token: str, *, until: int) -> TurnClaim:
    stream = one.candidate.stream
    return TurnClaim(
        stream=stream,
        token=token,
        run_id=ids.run_id(token, stream),
        turn_id=ids.turn_id(stream, (event.event_id for event in one.events)),
        attempt=one.candidate.attempts + 1,
        version=one.version,
        until=until,
        events=one.events,
        interrupted=one.candidate.claim_token is not None,
        alone=one.candidate.alone is not None,
        again=one.candidate.picked is not None,
        stopping=stopping.ends(one.candidate.picked, one.stop),
    )


def _take(
    conn: Connection, kind: str, claims: Sequence[TurnClaim], candidates: Mapping[str, Candidate], *, lease: int
) -> None:
    if claims:
        sets = [
            {
                "name": claim.stream,
                "attempts": claim.attempt,
                "picked": as_json([event.position for event in claim.events]),
                "alone": candidates[claim.stream].alone,
            }
            for claim in claims
        ]
        _TAKE.for_rows(conn, sets, type=kind, token=claims[0].token, until=claims[0].until, lease=lease)


def _end_interrupted(conn: Connection, candidates: Sequence[Candidate], *, now: int) -> None:
    lost = [
        EndedRun(run_id=ids.run_id(one.claim_token, one.stream), end=RunEnd.INTERRUPTED)
        for one in candidates
        if one.claim_token is not None
    ]
    runs.end(conn, lost, now=now)


def adopt(conn: Connection, *, stream_type: str, now: int) -> int:
    """Take the events of streams with a queues row off the front; how many. For a clogged front only."""
    dialects.distrust_statistics(conn)
    front = _FRONT(conn, type=stream_type, now=now, limit=ADOPTED_AT_ONCE).all()
    streams = sorted({row.stream for row in front})
    locked = set(_LOCK_SOME(conn, streams=as_json(streams)).scalars()) if streams else set()
    positions = [row.position for row in front if row.stream in locked]
    return _ADOPT(conn, positions=as_json(positions)).rowcount if positions else 0


def lock(conn: Connection, holds: Sequence[Hold]) -> None:
    """Lock the streams of these claims, in one order for everybody. On SQLite the transaction is the lock."""
    if conn.dialect.name != "sqlite":
        owned(conn, holds)


def owned(conn: Connection, holds: Sequence[Hold]) -> dict[str, Row]:
    """Lock the streams of these claims; the rows of those whose token is still current, by stream."""
    if not holds:
        return {}
    tokens = {hold.subject: hold.token for hold in holds}
    rows = locked(conn, sorted(tokens))
    return {stream: row for stream, row in rows.items() if row.claim_token == tokens[stream]}


def locked(conn: Connection, streams: Sequence[str]) -> dict[str, Row]:
    """The rows of those streams that have one, by stream, locked in the order given."""
    return {row.stream: row for row in _LOCK(conn, streams=as_json(streams))}


def renew(conn: Connection, holds: Sequence[Hold], *, lease: int, now: int) -> list[Hold]:
    """Let these claims run for another `lease`; the holds that are lost. A late one is no lost one."""
    kept = owned(conn, holds)
    if kept:
        _RENEW(conn, streams=as_json(sorted(kept)), until=now + lease)
    return [hold for hold in holds if hold.subject not in kept]


def back_off(conn: Connection, hold: Hold, *, delay: int, error: str, end: RunEnd = RunEnd.FAILED, now: int) -> None:
    """Leave the stream for `delay`; its set stays as it is. A conflict is no failed attempt. Raises StaleClaim."""
    _leave(conn, hold, QueueState.BACKOFF, until=now + delay, given_back=int(end is RunEnd.CONFLICT))
    end_run(conn, hold, end, error, now=now)


def release(conn: Connection, hold: Hold, *, end: RunEnd = RunEnd.RELEASED, error: str | None = None, now: int) -> None:
    """Give back what did not come to its end: ready at once, the attempt not counted. Raises StaleClaim."""
    _leave(conn, hold, QueueState.READY, until=now, given_back=1)
    end_run(conn, hold, end, error, now=now)


def put_back(conn: Connection, holds: Sequence[Hold], *, now: int) -> None:
    """Undo takeovers of which nothing began: due again at once as claims whose claimants were lost, uncounted."""
    kept = owned(conn, holds)
    if kept:
        _PUT_BACK(conn, streams=as_json(sorted(kept)), now=now)


def release_all(conn: Connection, token: str, *, now: int) -> list[str]:
    """Give back whatever a claim took whose answer of COMMIT was lost, so that nothing of it began; the streams.

    Looks through all streams that have a queues row: for that rare case only.
    """
    streams = sorted(_RELEASE_ALL(conn, token=token, now=now).scalars())
    ends = [EndedRun(run_id=ids.run_id(token, stream), end=RunEnd.RELEASED) for stream in streams]
    runs.end(conn, ends, now=now)
    return streams


def park(conn: Connection, hold: Hold, *, error: str, alert: NewAlert, now: int) -> None:
    """Leave the stream until a person resolves it; its set stays as it is. Raises StaleClaim."""
    _leave(conn, hold, QueueState.PARKED, until=None)
    end_run(conn, hold, RunEnd.STOPPED, error, now=now)
    alerts.raise_alerts(conn, [alert], now=now)


def split(conn: Connection, hold: Hold, *, error: str, now: int) -> None:
    """Have each event of the set tried alone from now on, the first one first. Raises StaleClaim."""
    row = require(conn, [hold])[hold.subject]
    first, *rest = stopping.positions(row.picked)
    _SPLIT(
        conn,
        stream=hold.subject,
        picked=as_json([first]),
        alone=as_json(rest + stopping.positions(row.alone)),
        now=now,
    )
    end_run(conn, hold, RunEnd.FAILED, error, now=now)


def end_stale(conn: Connection, hold: Hold, *, now: int) -> None:
    """Write that a run came back after its claim was over. Nothing else changes."""
    end_run(conn, hold, RunEnd.STALE, None, now=now)


def require(conn: Connection, holds: Sequence[Hold]) -> dict[str, Row]:
    """Lock the streams of these claims; their rows by stream. Raises StaleClaim if one is not ours."""
    rows = owned(conn, holds)
    for hold in holds:
        if hold.subject not in rows:
            raise StaleClaim(hold.subject, stream=hold.subject)
    return rows


def free(conn: Connection, freed: Mapping[str, str | None], *, now: int) -> set[str]:
    """End the claims of streams that are locked, given with their `alone`; those that have events left.

    A stream with an event that we can see stays, ready at once. One that comes later is at the front, where
    it is found without a queues row.
    """
    if not freed:
        return set()
    rows = []
    for stream, alone in sorted(freed.items()):
        left = stopping.positions(alone)
        following, rest = (as_json(left[:1]), as_json(left[1:])) if left else (None, None)
        rows.append({"name": stream, "next": following, "rest": rest})
    ready = set(_READY.for_rows(conn, rows, now=now).scalars())
    empty = sorted(freed.keys() - ready)
    if empty:
        _EMPTY(conn, streams=as_json(empty))
    return ready


def _leave(conn: Connection, hold: Hold, state: QueueState, *, until: int | None, given_back: int = 0) -> None:
    left = _LEAVE(conn, stream=hold.subject, token=hold.token, state=state, until=until, given_back=given_back).rowcount
    if not left:
        raise StaleClaim(hold.subject, stream=hold.subject)


def end_run(conn: Connection, hold: Hold, end: RunEnd, error: str | None, *, now: int) -> None:
    """End the run that a claim has started."""
    failpoint("queues.left")
    ended = EndedRun(run_id=ids.run_id(hold.token, hold.subject), end=end, error=error)
    runs.end(conn, [ended], now=now)
