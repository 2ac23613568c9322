"""History: one row for each change of a dispatch, written in the transaction that makes the change."""

from collections.abc import Sequence
from functools import lru_cache

from sqlalchemy import Connection

from postroad.model.lifecycle import Reason, check_edge
from postroad.model.rows import NewTransition
from postroad.store.statements import Statement, as_json

STALE = frozenset({Reason.STALE_OK, Reason.STALE_FAILED, Reason.STALE_UNSENT})
RESOLVED = frozenset({Reason.RESOLVED_SENT, Reason.RESOLVED_DISCARDED})
# Said of a dispatch whose status stays: no edges, and not checked as such.
WITHOUT_EDGE = STALE | RESOLVED

INSERT = """
INSERT INTO {p}transitions
    (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
SELECT new.entity, new.from_status, new.to_status, new.reason_code, new.summary, new.source, new.actor,
    new.evidence, new.metadata, :now
FROM {rows:new(entity text, from_status text, to_status text, reason_code text, summary text, source text,
               actor text, evidence text, metadata text)}
ORDER BY new.ord
"""
_INSERT = Statement(INSERT)


@lru_cache(maxsize=256)
def about(attempt: int, epoch: int) -> str:
    """What every row says of the attempt that it is about, as `metadata`."""
    return as_json({"attempt": attempt, "epoch": epoch})


def record(conn: Connection, transitions: Sequence[NewTransition], *, now: int) -> None:
    """Write rows of history in the given order.

    What is said of a dispatch without changing it (a WITHOUT_EDGE reason, from = to) is not checked.

    Raises:
        IllegalEdge: A dispatch cannot go from that status to that one; nothing was written.
    """
    check(transitions)
    if transitions:
        _INSERT.for_rows(conn, transitions, now=now)


def check(transitions: Sequence[NewTransition]) -> None:
    """Refuse, with IllegalEdge, what `record` refuses; for whoever writes these by a statement of its own."""
    for transition in transitions:
        if transition.reason_code not in WITHOUT_EDGE or transition.from_status != transition.to_status:
            check_edge(transition.from_status, transition.to_status)
