"""What people and retention did: who, why, to what, and what it was before and after; written with the change."""

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.model.ids import check_name
from postroad.model.payload import text
from postroad.store.statements import Statement, as_json

REASON_BYTES_MAX = 2_000


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """Who does something, and why."""

    actor: str
    reason: str = ""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """What was done; `before` and `after` are JSON."""

    id: int
    action: str
    subject: str
    actor: str
    reason: str
    before: str
    after: str
    at: int


_RECORD = Statement("""
    INSERT INTO {p}audit (action, subject, actor, reason, before, after, at)
    VALUES (:action, :subject, :actor, :reason, :before, :after, :now) RETURNING id
""")
_AMEND = Statement("UPDATE {p}audit SET after = :after WHERE id = :id")
_LIST = Statement("""
    SELECT id, action, subject, actor, reason, before, after, at FROM {p}audit ORDER BY id DESC LIMIT :limit
""")
_OF = Statement("""
    SELECT id, action, subject, actor, reason, before, after, at FROM {p}audit
    WHERE subject = :subject ORDER BY id DESC LIMIT :limit
""")


def operator(actor: object, reason: object) -> Operator:
    """Who and why, if they can be stored; else InvalidInput naming the field."""
    return Operator(
        actor=check_name(actor, "actor"), reason=text(reason, "reason", bytes_max=REASON_BYTES_MAX, empty=True)
    )


def record(
    conn: Connection,
    action: str,
    subject: str,
    *,
    by: Operator,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    now: int,
) -> int:
    """Write what was done, in the transaction that does it; the row's id."""
    written = _RECORD(
        conn,
        action=action,
        subject=subject,
        actor=by.actor,
        reason=by.reason,
        before=as_json(before),
        after=as_json(after),
        now=now,
    )
    return int(written.scalar_one())


def amend(conn: Connection, id: int, *, after: Mapping[str, Any]) -> None:
    """Write what more was done: of what goes on over several transactions, in the one that goes on."""
    _AMEND(conn, id=id, after=as_json(after))


def list_(conn: Connection, *, subject: str | None = None, limit: int = 50) -> list[AuditRow]:
    """The newest rows, newest first; of one subject if it is given."""
    found = _LIST(conn, limit=limit) if subject is None else _OF(conn, subject=subject, limit=limit)
    return found.into(AuditRow)
