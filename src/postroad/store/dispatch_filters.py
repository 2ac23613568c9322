"""Which dispatches an operator means, as conditions of a statement. What was given are parameters, never SQL."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.model.clock import micros
from postroad.model.dispatches import DispatchFilter
from postroad.model.errors import InvalidInput, shown
from postroad.model.ids import check_name
from postroad.model.lifecycle import Reason, Status
from postroad.model.payload import text
from postroad.store import transitions
from postroad.store.statements import Found, Statement, as_json

DESTINATION_BYTES_MAX = 2048
_LATE = ", ".join(f"'{reason}'" for reason in sorted(transitions.STALE))

# That of the last change, or of a person's word; what came in after a claim was over changed nothing.
REASON = f"""(
    SELECT t.reason_code FROM {{p}}transitions AS t
    WHERE t.entity = o.id AND t.reason_code NOT IN ({_LATE}) ORDER BY t.id DESC LIMIT 1
)"""

_CONDITIONS: Mapping[str, str] = {
    "statuses": "o.status IN (SELECT value FROM {list:statuses})",
    "kind": "o.kind = :kind",
    "destination": "o.destination = :destination",
    "key_from": "o.key >= :key_from",
    "key_to": "o.key < :key_to",
    "since": "o.created_at >= :since",
    "before": "o.created_at < :before",
    "ids": "o.id {in_list:ids}",
    "newer": "(o.created_at, o.id) > (:newer_at, :newer)",
    "upto": "(o.created_at, o.id) <= (:upto_at, :upto)",
    "older": "(o.created_at, o.id) < (:older_at, :older)",
    "pairs": "(SELECT count(*) FROM {pairs:o.origin} AS pair, {rows:pairs(name text, text text)} "
    "WHERE pair.key {bytewise} = pairs.name AND pair.value {bytewise} = pairs.text) = :pairs_count",
    "reasons": f"{REASON} IN (SELECT value FROM {{list:reasons}})",
}
_CURSOR = re.compile(r"(\d{1,18})\.(.+)", re.DOTALL)


class Chosen(msgspec.Struct, frozen=True):
    """Conditions by name, and their parameters."""

    conditions: tuple[str, ...]
    parameters: dict[str, Any]

    def __and__(self, other: "Chosen") -> "Chosen":
        return Chosen(self.conditions + other.conditions, self.parameters | other.parameters)


def chosen(wanted: DispatchFilter, *, statuses: Sequence[Status] = ()) -> Chosen:
    """The conditions of a filter; of these statuses only, if there are any.

    Raises:
        InvalidInput: A field holds what no dispatch can have; the message names it.
    """
    if not isinstance(wanted, DispatchFilter):
        raise InvalidInput(f"This must be a DispatchFilter, got {shown(wanted)}.", field="filter")
    given: dict[str, Any] = {}
    allowed = [_status(wanted.status)] if wanted.status is not None else list(statuses)
    if allowed:
        given["statuses"] = as_json(allowed)
    if wanted.kind is not None:
        given["kind"] = check_name(wanted.kind, "kind")
    if wanted.to is not None:
        given["destination"] = text(wanted.to, "to", bytes_max=DESTINATION_BYTES_MAX, empty=True)
    if wanted.since is not None:
        given["since"] = micros(wanted.since, "since")
    if wanted.before is not None:
        given["before"] = micros(wanted.before, "before")
    if wanted.reason is not None:
        given["reasons"] = as_json(_reasons(wanted.reason))
    found = Chosen(tuple(given), given)
    return found & _beginning(wanted.key) & _pairs(wanted.origin)


def among(ids: Sequence[str]) -> Chosen:
    """One of these."""
    return Chosen(("ids",), {"ids": as_json(ids)})


def newer(created_at: int, id: str) -> Chosen:
    """Later in the order of (created_at, id)."""
    return Chosen(("newer",), {"newer_at": created_at, "newer": id})


def upto(created_at: int, id: str) -> Chosen:
    """This one or earlier in the order of (created_at, id)."""
    return Chosen(("upto",), {"upto_at": created_at, "upto": id})


def after(cursor: str) -> Chosen:
    """Behind a row's cursor in a list, in which the newest come first; InvalidInput if it is none."""
    found = _CURSOR.fullmatch(text(cursor, "after"))
    if found is None:
        raise InvalidInput(f"after must be a row's cursor, got {shown(cursor)}.", field="after")
    return Chosen(("older",), {"older_at": int(found[1]), "older": found[2]})


def cursor(created_at: int, id: str) -> str:
    """A row's place in the order of (created_at, id)."""
    return f"{created_at}.{id}"


def query(conn: Connection, selected: str, where: Chosen, order: str = "", **parameters: Any) -> Found:
    """SELECT these columns of the rows `o` that fit, in this order. Both are texts of ours."""
    return _statement(selected, where.conditions, order)(conn, **where.parameters, **parameters)


@cache
def _statement(selected: str, conditions: tuple[str, ...], order: str) -> Statement:
    where = " AND ".join(_CONDITIONS[name] for name in conditions) or "true"
    return Statement(f"SELECT {selected} FROM {{p}}outbox AS o WHERE {where} {order}")


def _status(status: str) -> Status:
    if status not in list(Status):
        raise InvalidInput(f"status must be one of {', '.join(Status)}, got {shown(status)}.", field="status")
    return Status(status)


def _reasons(reason: str) -> list[str]:
    """The codes that a reason, or the last part of one, stands for."""
    codes = [code for code in Reason if reason in (code, code.rpartition(".")[2]) and code not in transitions.STALE]
    if not codes:
        raise InvalidInput(f"reason must be a reason code or its last part, got {shown(reason)}.", field="reason")
    return [str(code) for code in codes]


def _beginning(key: str | None) -> Chosen:
    """Keys that begin so, as bounds in the order of bytes, which an index has; not LIKE, which has characters of its
    own."""
    if key is None:
        return Chosen((), {})
    first = {"key_from": text(key, "key")}
    head = key.rstrip(chr(0x10FFFF))
    if not head:
        return Chosen(("key_from",), first)
    following = ord(head[-1]) + 1
    last = head[:-1] + chr(0xE000 if following == 0xD800 else following)  # surrogates are no characters
    return Chosen(("key_from", "key_to"), first | {"key_to": last})


def _pairs(origin: Mapping[str, str]) -> Chosen:
    if not isinstance(origin, Mapping):
        raise InvalidInput(f"origin must be a mapping of text to text, got {shown(origin)}.", field="origin")
    if not origin:
        return Chosen((), {})
    pairs = [
        {"name": text(name, "origin", empty=True), "text": text(value, "origin", empty=True, bytes_max=4096)}
        for name, value in origin.items()
    ]
    return Chosen(("pairs",), {"pairs": as_json(pairs), "pairs_count": len(pairs)})
