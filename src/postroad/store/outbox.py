"""Dispatches on their way in: written once for each key, and withdrawn while nobody has claimed them."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from postroad.model.errors import DuplicateKey, KeyConflict
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import Reason, Status
from postroad.model.rows import Enqueued, NewDispatch
from postroad.store import lanes, moves, tombstones
from postroad.store.statements import Statement, as_json

INSERT_TRIES = 5

# Ordered by key, so that two transactions with the same keys wait for each other in one direction only.
_INSERT = Statement("""
INSERT INTO {p}outbox
    (id, key, stream, kind, version, destination, body, headers, policy, status, attempt, max_attempts, epoch,
     due_at, expires_at, content_hash, origin, lane, host, ack_required, created_at, updated_at)
SELECT new.id, new.key, new.stream, new.kind, new.version, new.destination, new.body, new.headers, new.on_failure,
       'pending', 0, new.max_attempts, 0, CASE WHEN new.lane IS NULL THEN new.due_at END, new.expires_at,
       new.content_hash, new.origin, new.lane, new.host, new.ack_required, :now, :now
FROM {rows:new(id text, key text, stream text, kind text, version int, destination text, body text,
               headers text, on_failure text, max_attempts int, due_at int, expires_at int, content_hash text,
               origin text, lane text, host text, ack_required int)}
WHERE true
ORDER BY new.key, new.ord
ON CONFLICT (key) DO NOTHING
RETURNING id
""")

# The history of what was inserted, but not of a key that has a tombstone: its holder was purged, at the latest while
# the insert waited for it. The insert itself could not see that; this is a later statement, and no further one.
_RECORD = Statement(
    """
INSERT INTO {p}transitions
    (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
SELECT d.id, NULL, 'pending', :reason, 'enqueued kind=' || d.kind, :source, :actor, '[]', '{}', :now
FROM {rows:d(id text, key text, kind text)}
WHERE """
    + tombstones.OF_DISPATCH
    + """ IS NULL
ORDER BY d.ord
RETURNING entity
"""
)

# A dispatch before a tombstone: both there are only after an insert at REPEATABLE READ, which saw no tombstone.
_HOLDERS = Statement("""
SELECT o.key, o.id, o.content_hash, 1 AS there FROM {p}outbox AS o WHERE o.key {in_list:keys}
UNION ALL
SELECT t.key, t.id, t.content_hash, 0 FROM {p}tombstones AS t WHERE t.scope = '' AND t.key {in_list:keys}
ORDER BY there
""")

# A refusal leaves nothing behind, whatever its caller does with the transaction.
_UNDO = Statement("DELETE FROM {p}outbox WHERE id {in_list:ids}")
_UNDO_HISTORY = Statement("DELETE FROM {p}transitions WHERE entity {in_list:ids}")

_PENDING = Statement("SELECT id FROM {p}outbox WHERE key {in_list:keys} AND status = 'pending'")


class _By(NamedTuple):
    """Whom the history names."""

    source: str
    actor: str


def insert(
    conn: Connection, dispatches: Sequence[NewDispatch], *, source: str, actor: str, in_turn: bool, now: int
) -> list[Enqueued]:
    """Write dispatches, one for each key, and say for each of them, in order, who holds its key.

    A key that is taken, in whatever status its holder is or if only its tombstone is left, answers with the holder
    if the content is the same (or `keep` is set). Two transactions that race for a key both get the one id.

    Raises:
        DuplicateKey: In a turn: these keys exist, or the turn gives one to two contents. Nothing was written.
        KeyConflict: Elsewhere: the key is taken by other content. Nothing was written.
    """
    keyed = [d if d.key else msgspec.structs.replace(d, key=d.id) for d in dispatches]
    created: set[str] = set()
    try:
        holders = _settle_keys(conn, keyed, created, by=_By(source, actor), in_turn=in_turn, now=now)
    except (DuplicateKey, KeyConflict):
        _undo(conn, created)
        raise
    lanes.join(conn, [_member(d, d.lane) for d in keyed if d.lane is not None and d.id in created])
    return [Enqueued(holders[d.key], d.key, d.id in created) for d in keyed]


def _member(d: NewDispatch, lane: str) -> lanes.Member:
    return lanes.Member(lane=lane, dispatch=d.id, kind=d.kind, due_at=d.due_at)


def _settle_keys(
    conn: Connection, dispatches: Sequence[NewDispatch], created: set[str], *, by: _By, in_turn: bool, now: int
) -> dict[str, str]:
    """Who holds each key; the ids that were written, with their history, are added to `created`."""
    holders: dict[str, str] = {}
    missing = dispatches
    for _ in range(INSERT_TRIES):
        if not missing:
            break
        failpoint("outbox.insert")
        inserted = set(_INSERT.for_rows(conn, missing, now=now).scalars())
        failpoint("outbox.inserted")
        recorded = _record(conn, [d for d in missing if d.id in inserted], by, now=now)
        created |= recorded
        if inserted != recorded:
            _UNDO(conn, ids=as_json(sorted(inserted - recorded)))
        holders |= _holders(conn, missing, created, in_turn=in_turn)
        # Nobody has the key, and still it was taken: its holder was purged in between.
        missing = [d for d in missing if d.key not in holders]
    if missing:
        raise KeyConflict(f"{missing[0].key!r} was taken and freed again and again.", key=missing[0].key)
    return holders


def _holders(
    conn: Connection, dispatches: Sequence[NewDispatch], created: set[str], *, in_turn: bool
) -> dict[str, str]:
    """Who holds these keys, read in a statement after the insert, which waited for whoever raced with it."""
    late = [d for d in dispatches if d.id not in created]
    ours = {d.key: d.id for d in dispatches if d.id in created}
    if in_turn:
        # What a turn says twice is said once; what another turn has said is not for this one to say.
        said = {(d.key, d.stream, d.content_hash) for d in dispatches if d.id in created}
        late = [d for d in late if (d.key, d.stream, d.content_hash) not in said]
    if in_turn and late:
        keys = tuple(dict.fromkeys(d.key for d in late))
        raise DuplicateKey(", ".join(keys), keys=keys)
    if not late:
        return ours
    rows = _HOLDERS(conn, keys=as_json([d.key for d in late])).all()
    contents = {row.key: row.content_hash for row in rows}
    for d in late:
        if not d.keep and contents.get(d.key, d.content_hash) != d.content_hash:
            raise KeyConflict(repr(d.key), key=d.key)
    return ours | {row.key: row.id for row in rows}


def _record(conn: Connection, inserted: Sequence[NewDispatch], by: _By, *, now: int) -> set[str]:
    """Write how these began; the ids of those whose keys have no tombstone."""
    if not inserted:
        return set()
    rows = [{"id": d.id, "key": d.key, "kind": d.kind} for d in inserted]
    return set(
        _RECORD.for_rows(conn, rows, reason=Reason.ENQUEUED, source=by.source, actor=by.actor, now=now).scalars()
    )


def _undo(conn: Connection, created: Collection[str]) -> None:
    if created:
        _UNDO(conn, ids=as_json(sorted(created)))
        _UNDO_HISTORY(conn, ids=as_json(sorted(created)))


def withdraw(conn: Connection, keys: Sequence[str], *, actor: str, now: int) -> list[str]:
    """End the dispatches with these keys that are still pending; the keys that this ended.

    One that is claimed, or is finished, stays as it is. Their streams get the outcome `expired`.
    """
    if not keys:
        return []
    found = moves.lock(conn, pending(conn, keys))
    left = [row for row in found.values() if row.status is Status.PENDING]
    made = [moves.move(row, Status.EXPIRED, Reason.WITHDRAWN, "withdrawn", actor=actor) for row in left]
    moves.apply(conn, made, now=now)
    return [move.row.key for move in made]


def pending(conn: Connection, keys: Sequence[str]) -> list[str]:
    """The ids of the dispatches with these keys that are pending now; they are not locked."""
    return _PENDING(conn, keys=as_json(keys)).scalars() if keys else []
