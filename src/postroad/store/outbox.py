"""Dispatches on their way in: written once for each key, and withdrawn while nobody has claimed them."""

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model.errors import DuplicateKey, KeyConflict
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import Reason, Status
from postroad.model.rows import Enqueued, NewDispatch, NewTransition
from postroad.store import moves, transitions
from postroad.store.statements import Statement, as_json

INSERT_TRIES = 5

# Ordered by key, so that two transactions with the same keys wait for each other in one direction only.
_INSERT = Statement("""
INSERT INTO {p}outbox
    (id, key, stream, kind, version, destination, body, headers, policy, status, attempt, max_attempts, epoch,
     due_at, expires_at, content_hash, origin, created_at, updated_at)
SELECT id, key, stream, kind, version, destination, body, headers, on_failure, 'pending', 0, max_attempts, 0,
       due_at, expires_at, content_hash, origin, :now, :now
FROM {rows:new(id text, key text, stream text, kind text, version int, destination text, body text,
               headers text, on_failure text, max_attempts int, due_at int, expires_at int, content_hash text,
               origin text)}
WHERE true
ORDER BY key, ord
ON CONFLICT (key) DO NOTHING
RETURNING id
""")

_HOLDERS = Statement("""
SELECT o.key, o.id, o.content_hash FROM {p}outbox AS o WHERE o.key {in_list:keys}
""")

# A refusal leaves nothing behind, whatever its caller does with the transaction.
_UNDO = Statement("DELETE FROM {p}outbox WHERE id {in_list:ids}")

_PENDING = Statement("SELECT id FROM {p}outbox WHERE key {in_list:keys} AND status = 'pending'")


def insert(
    conn: Connection, dispatches: Sequence[NewDispatch], *, source: str, actor: str, in_turn: bool, now: int
) -> list[Enqueued]:
    """Write dispatches, one for each key, and say for each of them, in order, who holds its key.

    A key that is taken, in whatever status its holder is, answers with the holder if the content is the same
    (or `keep` is set). Two transactions that race for a key both get the one id.

    Raises:
        DuplicateKey: In a turn: these keys exist, or the turn gives one to two contents. Nothing was written.
        KeyConflict: Elsewhere: the key is taken by other content. Nothing was written.
    """
    keyed = [d if d.key else msgspec.structs.replace(d, key=d.id) for d in dispatches]
    created: set[str] = set()
    try:
        holders = _settle_keys(conn, keyed, created, in_turn=in_turn, now=now)
    except (DuplicateKey, KeyConflict):
        _UNDO(conn, ids=as_json(list(created)))
        raise
    _record(conn, [d for d in keyed if d.id in created], source=source, actor=actor, now=now)
    return [Enqueued(holders[d.key], d.key, d.id in created) for d in keyed]


def _settle_keys(
    conn: Connection, dispatches: Sequence[NewDispatch], created: set[str], *, in_turn: bool, now: int
) -> dict[str, str]:
    """Who holds each key; the ids that were written are added to `created`."""
    holders: dict[str, str] = {}
    missing = dispatches
    for _ in range(INSERT_TRIES):
        if not missing:
            break
        failpoint("outbox.insert")
        created |= set(_INSERT(conn, new=as_json(missing), now=now).scalars())
        failpoint("outbox.inserted")
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


def _record(conn: Connection, dispatches: Sequence[NewDispatch], *, source: str, actor: str, now: int) -> None:
    history = [
        NewTransition(
            entity=d.id,
            from_status=None,
            to_status=Status.PENDING,
            reason_code=Reason.ENQUEUED,
            summary=f"enqueued kind={d.kind}",
            source=source,
            actor=actor,
        )
        for d in dispatches
    ]
    transitions.record(conn, history, now=now)


def withdraw(conn: Connection, keys: Sequence[str], *, actor: str, now: int) -> list[str]:
    """End the dispatches with these keys that are still pending; the keys that this ended.

    One that is claimed, or is finished, stays as it is. Their streams get the outcome `expired`.
    """
    if not keys:
        return []
    found = moves.lock(conn, _PENDING(conn, keys=as_json(keys)).scalars())
    pending = [row for row in found.values() if row.status is Status.PENDING]
    made = [moves.move(row, Status.EXPIRED, Reason.WITHDRAWN, "withdrawn", actor=actor) for row in pending]
    moves.apply(conn, made, now=now)
    return [move.row.key for move in made]
