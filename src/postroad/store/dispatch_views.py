"""Dispatches as operators see them. Reads only, without bodies."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from postroad.model.clock import SECOND, moment
from postroad.model.dispatches import DispatchRow
from postroad.model.errors import InvalidInput, shown
from postroad.model.ids import check_name
from postroad.model.lifecycle import Status
from postroad.model.payload import text, whole
from postroad.store.statements import Row, Statement

# The reason is that of the last change; what came in after a claim was over (dispatch.stale) changed nothing.
_COLUMNS = """
o.id, o.key, o.stream, o.kind, o.destination, o.status, o.attempt, o.max_attempts, o.due_at, o.expires_at,
o.last_error, o.created_at, o.updated_at, (
    SELECT t.reason_code FROM {p}transitions AS t
    WHERE t.entity = o.id AND t.reason_code NOT IN
        ('dispatch.stale.transport_ok', 'dispatch.stale.transport_failed')
    ORDER BY t.id DESC LIMIT 1
) AS reason
"""

# An id wins over a key of the same text.
_GET = Statement(
    "SELECT " + _COLUMNS + " FROM {p}outbox AS o WHERE o.id = :name OR o.key = :name ORDER BY o.key = :name LIMIT 1"
)

_LIST = Statement(
    "SELECT " + _COLUMNS + " FROM {p}outbox AS o "
    "WHERE (:status = '' OR o.status = :status) AND (:kind = '' OR o.kind = :kind) "
    "AND (:destination = '' OR o.destination = :destination) "
    "ORDER BY o.created_at DESC, o.id LIMIT :limit"
)

LIMIT_MAX = 10_000
_DESTINATION_BYTES_MAX = 2048

_HISTORY = Statement("""
SELECT from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at
FROM {p}transitions WHERE entity = :id ORDER BY id
""")


def get(conn: Connection, id_or_key: str) -> DispatchRow | None:
    """One dispatch by id or key with its whole history, oldest first; None if there is none.

    Raises:
        InvalidInput: It is no text that could be an id or a key.
    """
    row = _GET(conn, name=text(id_or_key, "id")).one_or_none()
    if row is None:
        return None
    history = [{**change, "at": moment(change["at"])} for change in _HISTORY(conn, id=row.id).mappings()]
    return _view(row, history)


def list_(
    conn: Connection,
    *,
    status: str | None = None,
    kind: str | None = None,
    to: str | None = None,
    limit: int = 50,
) -> list[DispatchRow]:
    """The newest dispatches first, without history; at most 10,000.

    Raises:
        InvalidInput: A status that no dispatch has, a limit out of bounds, or no text; the message names it.
    """
    rows = _LIST(
        conn,
        status="" if status is None else _status(status),
        kind="" if kind is None else check_name(kind, "kind"),
        destination="" if to is None else text(to, "to", bytes_max=_DESTINATION_BYTES_MAX, empty=to == ""),
        limit=whole(limit, "limit", most=LIMIT_MAX),
    )
    return [_view(row) for row in rows]


def _status(status: str) -> str:
    if status not in list(Status):
        raise InvalidInput(f"status must be one of {', '.join(Status)}, got {shown(status)}.", field="status")
    return status


def _view(row: Row, history: Sequence[Mapping[str, Any]] = ()) -> DispatchRow:
    return DispatchRow(
        id=row.id,
        key=row.key,
        stream=row.stream,
        kind=row.kind,
        to=row.destination,
        status=row.status,
        reason=row.reason or "",
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        due_at=None if row.due_at is None else moment(row.due_at),
        expires_at=None if row.expires_at is None else moment(row.expires_at),
        last_error=row.last_error,
        created_at=moment(row.created_at),
        history=history,
    )


def why(conn: Connection, id: str, *, now: int) -> str:
    """One sentence on why a dispatch, named by id or key, is not moving."""
    row = _GET(conn, name=id).one_or_none()
    if row is None:
        return f"There is no dispatch {id}."
    if row.status == Status.PENDING:
        return _why_pending(row, now=now)
    if row.status == Status.DELIVERING:
        return _why_delivering(row, now=now)
    error = f": {row.last_error}" if row.last_error else ""
    if row.status == Status.DEAD_LETTER:
        return f"Dead by {row.reason} since {_at(row.updated_at)}{error}."
    if row.status == Status.EXPIRED:
        return f"Expired by {row.reason} at {_at(row.updated_at)}{error}."
    return f"Finished: {row.status} at {_at(row.updated_at)}."


def _why_pending(row: Row, *, now: int) -> str:
    if row.expires_at is not None and row.expires_at <= now:
        return f"Its deadline passed at {_at(row.expires_at)}; the next pump or dispatcher ends it."
    if row.due_at is None:
        return "It waits in its lane for the one before it."
    if row.due_at <= now:
        return f"Due for {_seconds(now - row.due_at)}, but no dispatcher has taken kind {row.kind} since."
    when = f"until {_at(row.due_at)}, due in {_seconds(row.due_at - now)}"
    if row.attempt == 0:
        return f"It waits for its time {when}."
    error = f": {row.last_error}" if row.last_error else ""
    return f"Backing off {when}, after attempt {row.attempt} of {row.max_attempts}{error}."


def _why_delivering(row: Row, *, now: int) -> str:
    attempt = f"attempt {row.attempt} of {row.max_attempts}"
    if row.due_at > now:
        return f"Delivering: {attempt} runs under a lease until {_at(row.due_at)}."
    return f"The lease of {attempt} was over at {_at(row.due_at)}; the next dispatcher of {row.kind} takes it."


def _at(stamp: int) -> str:
    return moment(stamp).isoformat(timespec="seconds")


def _seconds(length: int) -> str:
    return f"{length / SECOND:.0f} s"
