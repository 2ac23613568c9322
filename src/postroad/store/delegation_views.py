"""Delegations as an operator looks for them: of all streams, by the streams that wanted them and their keys."""

from functools import cache

import msgspec
from sqlalchemy import Connection

from postroad.model.delegations import Delegation
from postroad.store import dialects
from postroad.store.delegations import COLUMNS, shown
from postroad.store.statements import Statement

# What is open as its own index says it: a parameter would not be known to name it. Other states as no index says them:
# most of what there is has ended.
_CONDITIONS = {
    "open": "status = 'open'",
    "status": "coalesce(status, '-') = :status",
    "stream": "stream = :stream",
    "child": "child = :child",
    "after": "(stream, key) > (:after_stream, :after_key)",
}


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which delegations are meant; None: whatever it is. `after`: only those behind this one, by stream and key."""

    status: str | None = None
    stream: str | None = None
    child: str | None = None
    after: tuple[str, str] | None = None


def list_(conn: Connection, wanted: Wanted, *, limit: int) -> list[Delegation]:
    """Delegations by stream and key."""
    given = {"stream": wanted.stream, "child": wanted.child}
    if wanted.status == "open":
        given["open"] = wanted.status
    else:
        given["status"] = wanted.status
    parameters = {name: value for name, value in given.items() if value is not None}
    named = tuple(parameters)
    parameters.pop("open", None)
    if wanted.after is not None:
        named += ("after",)
        parameters |= {"after_stream": wanted.after[0], "after_key": wanted.after[1]}
    dialects.distrust_statistics(conn)
    return [shown(row) for row in _statement(named)(conn, **parameters, limit=limit)]


@cache
def _statement(named: tuple[str, ...]) -> Statement:
    where = " AND ".join(_CONDITIONS[name] for name in named) or "true"
    # What a short index gives is sorted: else the planner might rather walk the long one that gives their order.
    order = "coalesce(stream, '-')" if {"open", "child"} & set(named) else "stream"
    return Statement(f"SELECT {COLUMNS} FROM {{p}}delegations WHERE {where} ORDER BY {order}, key LIMIT :limit")
