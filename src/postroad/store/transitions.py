"""History: one row for each change of a dispatch, written in the transaction that makes the change."""

from collections.abc import Sequence

from sqlalchemy import Connection

from postroad.model.lifecycle import Reason, check_edge
from postroad.model.rows import NewTransition
from postroad.store.statements import Statement, as_json

STALE = frozenset({Reason.STALE_OK, Reason.STALE_FAILED})

_INSERT = Statement("""
INSERT INTO {p}transitions
    (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
SELECT entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, :now
FROM {rows:new(entity text, from_status text, to_status text, reason_code text, summary text, source text,
               actor text, evidence text, metadata text)}
ORDER BY ord
""")


def record(conn: Connection, transitions: Sequence[NewTransition], *, now: int) -> None:
    """Write rows of history in the given order.

    What a claimant did after its claim was over (a STALE reason, from = to) is no edge and is not checked.

    Raises:
        IllegalEdge: A dispatch cannot go from that status to that one; nothing was written.
    """
    for transition in transitions:
        if transition.reason_code not in STALE or transition.from_status != transition.to_status:
            check_edge(transition.from_status, transition.to_status)
    if transitions:
        _INSERT(conn, new=as_json(transitions), now=now)
