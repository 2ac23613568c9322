"""What the gate commands ask of a database."""

from collections.abc import Sequence
from datetime import datetime

import msgspec
from sqlalchemy import Connection

from postroad.model.clock import moment
from postroad.store import audit, dialects
from postroad.store import gates as store
from postroad.store.database import Database
from postroad.surfaces import reading


class GateView(msgspec.Struct, frozen=True, kw_only=True):
    """A closed gate; `host` '': that of the kind as a whole. `until`: the next attempt; `probing`: one is made now."""

    kind: str
    host: str
    closed_at: datetime
    until: datetime
    failures: int
    probing: bool
    reason: str


def gates(conn: Connection, *, now: int) -> Sequence[GateView]:
    """The closed gates, the one that has been closed longest first."""
    return [
        GateView(
            kind=row.kind,
            host=row.host,
            closed_at=moment(row.closed_at),
            until=moment(row.until),
            failures=row.failures,
            probing=row.probing,
            reason=row.reason,
        )
        for row in store.list_(conn)
    ]


def opened(url: str | None, schema: str | None, kind: str, host: str, *, actor: str, reason: str) -> bool:
    """Open a gate, audited, and wake the dispatchers; False if it is not closed."""
    by = audit.operator(actor, reason)
    with reading.changing(url, schema) as database:
        return _open(database, kind, host, by)


def _open(database: Database, kind: str, host: str, by: audit.Operator) -> bool:
    def act(conn: Connection, *, now: int) -> bool:
        found = store.open_(conn, kind, host, by=by, now=now)
        if found:
            dialects.notify_at_commit(conn, frozenset({"sends"}))
        return found

    return database.transact(act)


def named(kind: str, host: str) -> str:
    """A gate in words."""
    return f"host {host} of kind {kind}" if host else f"kind {kind}"
