"""Alerts: what a person must know, written in the transaction that found it, rung by the pump."""

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model.clock import moment
from postroad.model.dispatches import Alert
from postroad.model.rows import NewAlert
from postroad.store.statements import Statement, as_json


class AlertRow(msgspec.Struct, frozen=True, kw_only=True):
    """An alert as it stands in the table; `rung_at` None: no sink has been told yet."""

    id: int
    severity: str
    code: str
    subject: str
    detail: str
    raised_at: int
    rung_at: int | None


_RAISE = Statement("""
    INSERT INTO {p}alerts (severity, code, subject, detail, raised_at)
    SELECT severity, code, subject, detail, :now
    FROM {rows:alerts(severity text, code text, subject text, detail text)}
    ORDER BY ord
""")
_UNRUNG = Statement("""
    SELECT id, severity, code, subject, detail, raised_at FROM {p}alerts
    WHERE rung_at IS NULL AND id > :after ORDER BY id LIMIT :limit
""")
# The subquery, not a join: its few ids are looked up one by one, whatever the table's statistics say.
_MARK = Statement("""
    UPDATE {p}alerts SET rung_at = :now
    WHERE id IN (SELECT value FROM {ints:ids}) AND rung_at IS NULL
""")
_LIST = Statement("""
    SELECT id, severity, code, subject, detail, raised_at, rung_at FROM {p}alerts
    ORDER BY id DESC LIMIT :limit
""")


def raise_alerts(conn: Connection, alerts: Sequence[NewAlert], *, now: int) -> None:
    """Write alerts; the pump rings them once this transaction has committed."""
    if alerts:
        _RAISE(conn, alerts=as_json(alerts), now=now)


def unrung(conn: Connection, *, after: int = 0, limit: int = 100) -> list[tuple[int, Alert]]:
    """The oldest alerts with an id above `after` that are not marked as rung, with their ids."""
    return [
        (
            row.id,
            Alert(
                severity=row.severity,
                code=row.code,
                subject=row.subject,
                detail=row.detail,
                raised_at=moment(row.raised_at),
            ),
        )
        for row in _UNRUNG(conn, after=after, limit=limit)
    ]


def mark_rung(conn: Connection, ids: Sequence[int], *, now: int) -> None:
    """Remember that the sinks were told. A crash before this rings twice; that is meant."""
    if ids:
        _MARK(conn, ids=as_json(ids), now=now)


def list_(conn: Connection, *, limit: int = 50) -> list[AlertRow]:
    """The newest alerts, newest first, rung or not."""
    return _LIST(conn, limit=limit).into(AlertRow)
