"""Purging dispatches: their rows go, their keys stay taken."""

from collections.abc import Sequence

from sqlalchemy import Connection

from postroad.model.failpoints import failpoint
from postroad.store import lanes, tombstones
from postroad.store.moves import Standing
from postroad.store.statements import Statement, as_json
from postroad.store.tombstones import Tombstone

_DELETE = Statement("DELETE FROM {p}outbox WHERE id {in_list:ids} RETURNING id, key, stream, content_hash")
_FORGET = Statement("DELETE FROM {p}transitions WHERE entity {in_list:ids}")


def purge(conn: Connection, rows: Sequence[Standing], *, history: bool, now: int) -> list[str]:
    """Delete these dispatches, leave a tombstone for each key, and say which ids were deleted.

    The rows and their lanes must have been locked by this transaction (`moves.lock`); whether they may be purged is
    the caller's to know. The stream of a dispatch that is in flight is told nothing: end it first, with
    `moves.apply`, if it should hear of it.

    Args:
        history: Delete their history too; otherwise it is kept for as long as retention keeps tombstones.
    """
    if not rows:
        return []
    ids = as_json([row.id for row in rows])
    gone = _DELETE(conn, ids=ids).all()
    failpoint("purging.deleted")
    made = [
        Tombstone(scope="", key=row.key, id=row.id, stream=row.stream, content_hash=row.content_hash) for row in gone
    ]
    tombstones.bury(conn, made, now=now)
    failpoint("purging.buried")
    if history:
        _FORGET(conn, ids=ids)
    lanes.leave(conn, [(row.lane, row.id) for row in rows if row.lane is not None], now=now)
    return [row.id for row in gone]
