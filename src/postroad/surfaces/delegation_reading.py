"""What the delegation commands ask of a database, and show of it."""

from collections.abc import Sequence

from sqlalchemy import Connection

from postroad.engine.delegations import Delegations, wanted
from postroad.model.delegations import Cancellation, Delegation
from postroad.store import delegation_views
from postroad.surfaces import reading
from postroad.surfaces.output import say, show_table, when


def delegations(
    conn: Connection, status: str | None, stream: str | None, to: str | None, after: tuple[str, str] | None, *,
    limit: int, now: int,
) -> Sequence[Delegation]:  # fmt: skip
    """A page of delegations, by stream and key."""
    return delegation_views.list_(conn, wanted(status, stream, to, after), limit=limit)


def cancelled(url: str | None, schema: str | None, stream: str, key: str, *, actor: str, reason: str) -> Cancellation:
    """End one delegation, on the database that the command line or the settings name."""
    with reading.changing(url, schema) as database:
        return Delegations(lambda: database, lambda: None).cancel(stream, key, actor=actor, reason=reason)


def show(found: Sequence[Delegation], *, limit: int) -> None:
    """A table of delegations."""
    if not found:
        say("(no delegations)")
        return
    rows = [
        (one.parent, one.key, one.stream, one.status, when(one.created_at), when(one.ended_at or one.deadline),
         one.error, one.note)
        for one in found
    ]  # fmt: skip
    show_table(("stream", "key", "to", "status", "since", "ended or due", "error", ""), rows)
    if len(found) == limit:
        say(f"There may be more: --after {found[-1].parent} {found[-1].key}")
