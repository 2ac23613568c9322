"""Dispatches as operators see them. Reads only; a body is read for one dispatch at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.model.clock import moment
from postroad.model.dispatches import DispatchFilter, DispatchRow
from postroad.model.payload import text, whole
from postroad.store import dispatch_filters
from postroad.store.dispatch_filters import Chosen
from postroad.store.statements import Row, Statement

COLUMNS = (
    "o.id, o.key, o.stream, o.kind, o.version, o.destination, o.status, o.attempt, o.max_attempts, o.epoch, o.due_at, "
    "o.expires_at, o.last_error, o.origin, o.lane, o.host, o.ack_required, o.created_at, o.updated_at, "
    f"{dispatch_filters.REASON} AS reason"
)
# An id wins over a key of the same text.
NAMED = "o.id = coalesce((SELECT id FROM {p}outbox WHERE id = :name), (SELECT id FROM {p}outbox WHERE key = :name))"

_GET = Statement(f"SELECT {COLUMNS} FROM {{p}}outbox AS o WHERE {NAMED}")
_CONTENT = Statement(f"SELECT o.body, o.receipt FROM {{p}}outbox AS o WHERE {NAMED}")
_HISTORY = Statement("""
SELECT from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at
FROM {p}transitions WHERE entity = :id ORDER BY id
""")
_NEWEST_FIRST = "ORDER BY o.created_at DESC, o.id DESC LIMIT :limit"
_OLDEST_FIRST = "ORDER BY o.created_at, o.id LIMIT :limit"

LIMIT_MAX = 10_000
EVERY = DispatchFilter()


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """What a dispatch says: its body's exact JSON text; and what the last send said: a receipt's JSON, if any."""

    body: str
    receipt: str | None


def find(conn: Connection, id_or_key: str) -> Row | None:
    """The columns of one dispatch; None if there is none.

    Raises:
        InvalidInput: It is no text that could be an id or a key.
    """
    return _GET(conn, name=text(id_or_key, "id")).one_or_none()


def get(conn: Connection, id_or_key: str) -> DispatchRow | None:
    """One dispatch by id or key with its whole history, oldest first; None if there is none.

    Raises:
        InvalidInput: It is no text that could be an id or a key.
    """
    row = find(conn, id_or_key)
    if row is None:
        return None
    return view(row, [{**change, "at": moment(change["at"])} for change in _HISTORY(conn, id=row.id).mappings()])


def content(conn: Connection, id_or_key: str) -> Content | None:
    """What one dispatch says; None if there is no such dispatch."""
    return next(iter(_CONTENT(conn, name=text(id_or_key, "id")).into(Content)), None)


def list_(
    conn: Connection, wanted: DispatchFilter = EVERY, *, limit: int = 50, after: str | None = None
) -> list[DispatchRow]:
    """The newest dispatches first, without bodies and history; at most 10,000. `after`: the last page's last cursor.

    Whatever is sent or purged between two pages, every dispatch that stays is on one of them.

    Raises:
        InvalidInput: A filter that no dispatch can fit, a limit out of bounds, no cursor; the message names it.
    """
    where = dispatch_filters.chosen(wanted)
    if after is not None:
        where &= dispatch_filters.after(after)
    found = dispatch_filters.query(conn, COLUMNS, where, _NEWEST_FIRST, limit=whole(limit, "limit", most=LIMIT_MAX))
    return [view(row) for row in found]


def oldest(conn: Connection, where: Chosen, *, limit: int) -> tuple[int, list[DispatchRow]]:
    """How many dispatches fit, and the oldest of them."""
    number = int(dispatch_filters.query(conn, "count(*)", where).scalar_one())
    return number, [view(row) for row in dispatch_filters.query(conn, COLUMNS, where, _OLDEST_FIRST, limit=limit)]


def view(row: Row, history: Sequence[Mapping[str, Any]] = ()) -> DispatchRow:
    """A row as people and programs see it."""
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
        updated_at=moment(row.updated_at),
        version=row.version,
        epoch=row.epoch,
        ack_required=bool(row.ack_required),
        lane=row.lane,
        origin=msgspec.json.decode(row.origin),
        cursor=dispatch_filters.cursor(row.created_at, row.id),
        history=history,
    )
