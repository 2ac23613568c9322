"""The deletion of streams: a row that says so and stays for ever, so that nothing begins the stream again.

Whoever deletes locks rows of `streams` only, in the place and in the order in which a turn's commit locks them (before
dispatches, timers and inbox), and never a queues row: a worker's renewals lock all of its own, and would wait for a
transaction of the user's that stays open. A running turn finds out at its commit, what waits at its claim.
"""

from collections.abc import Collection, Iterable

from sqlalchemy import Connection

from postroad.model import ids
from postroad.model.errors import StreamDeleted
from postroad.store import audit, delegations, dialects, inbox, stream_views, timers
from postroad.store.audit import Operator
from postroad.store.statements import Statement, as_json

_LOCK = Statement("SELECT id FROM {p}streams WHERE id {in_list:streams} ORDER BY id {for_update}")
_MAKE = Statement(
    "INSERT INTO {p}streams (id, type, version) SELECT name, type, 0 "
    "FROM {rows:made(name text, type text)} WHERE true ORDER BY name ON CONFLICT (id) DO NOTHING"
)
_DELETE = Statement(
    "UPDATE {p}streams SET deleted_at = :now WHERE id {in_list:streams} AND deleted_at IS NULL RETURNING id"
)
_DELETED = Statement("SELECT id FROM {p}streams WHERE id {in_list:streams} AND deleted_at IS NOT NULL ORDER BY id")


def hold(conn: Connection, streams: Iterable[str]) -> None:
    """Lock these streams' rows. They are made where there are none, without an entry.

    Those that there are come first, by name, then the new ones, as when turns are committed: two that want the same
    rows wait for each other in one direction only.
    """
    names = sorted(set(streams))
    there = set(_LOCK(conn, streams=as_json(names)).scalars())
    made = [{"name": name, "type": ids.stream_type(name)} for name in names if name not in there]
    if made:
        _MAKE(conn, made=as_json(made))


def delete(conn: Connection, streams: Collection[str], *, now: int) -> list[str]:
    """Mark these streams as deleted, also one that has never been; those among them that were not before.

    Their armed timers are the caller's to cancel, together with what else it changes in timers (`timers.disarmed`).
    """
    if not streams:
        return []
    hold(conn, streams)
    return sorted(_DELETE(conn, streams=as_json(sorted(streams)), now=now).scalars())


def refuse_deleted(conn: Connection, streams: Collection[str]) -> None:
    """Raise StreamDeleted if one of these was deleted, as far as this transaction can see."""
    if streams and (found := _DELETED(conn, streams=as_json(sorted(streams))).scalars()):
        raise StreamDeleted(found[0], stream=found[0])


def delete_by(conn: Connection, stream: str, *, by: Operator, now: int) -> bool:
    """Delete a stream for an operator, audited; False: it was deleted before, and nothing was written."""
    found = stream_views.row(conn, stream, now=now)
    if not delete(conn, [stream], now=now):
        return False
    timers.apply(conn, timers.disarmed(conn, [stream]), now=now)
    delegations.cancel(conn, [stream], now=now)
    before = {} if found is None else {"version": found.version, "state": found.state, "dead": found.dead}
    waiting = inbox.waiting(conn, stream)
    audit.record(conn, "stream.delete", stream, by=by, before={**before, "waiting": waiting}, after={}, now=now)
    dialects.notify_at_commit(conn, frozenset({"turns"}))
    return True
