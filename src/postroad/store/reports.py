"""Reports: what others tell a stream between its turns. They wait in its inbox as messages do, and no turn has both.

Whoever reports is answered with the entry, once there is one, and is never refused for having said it before. A report
ends as an entry, or with its stream: nothing else buries or withdraws it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
from sqlalchemy import Connection

from postroad.model import ids, reports
from postroad.model.errors import InvalidInput, KeyConflict, SourceRefused, StreamDeleted
from postroad.model.events import REPORT_NAME, Entry
from postroad.model.rows import InboxEvent, NewAlert, NewEvent, TurnCommit
from postroad.store import alerts, dialects, inbox, log
from postroad.store.statements import Row, Statement, as_json

OwnerOf = Callable[[Connection, str], str | None]

IS_ONE = f"(kind = '{REPORT_NAME}')"

_NEWEST = Statement(
    "SELECT at.stream, (SELECT l.entry_id FROM {p}log l WHERE l.stream = at.stream AND l.seq = at.seq) AS entry_id "
    "FROM {rows:at(stream text, seq int)}"
)
_SOURCES = Statement(
    "SELECT name, (SELECT s.version FROM {p}streams s WHERE s.id = source.name) AS version, "
    "(SELECT s.deleted_at FROM {p}streams s WHERE s.id = source.name) AS deleted_at, "
    "(SELECT i.position FROM {p}inbox i WHERE i.type = source.type AND i.stream = source.name AND i.reason IS NULL "
    "ORDER BY i.position LIMIT 1) AS waits FROM {rows:source(name text, type text)}"
)


class NewReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report to be accepted, if its source is there, and is the owner's where one is given.

    `tells`: the commit itself wakes who lands it.
    """

    event: NewEvent
    source: str | None = None
    owner: str | None = None
    tells: bool = False


def accept(
    conn: Connection, batch: Sequence[NewReport], *, owner_of: OwnerOf | None = None, now: int
) -> list[Entry | None]:
    """Put reports into their streams' inboxes; of those that have landed, now or before, the entries.

    `owner_of` says whose a stream is, None of one that there is not; without it a stream is there if it has or will
    have entries, and its owner's name stands in front of the first slash of its subject.

    Raises:
        SourceRefused: A source is missing, deleted, or not the owner's. Nothing was written.
        KeyConflict: The key is another event's, or without `keep` another report's. Nothing was written.
        StreamDeleted: The stream was deleted. Nothing was written.
    """
    _check_sources(conn, batch, owner_of)
    published = inbox.publish(conn, [one.event for one in batch], now=now)
    if any(one.tells for one in batch):
        dialects.notify_at_commit(conn, frozenset({"turns"}))
    return [
        None if place.position is not None else _entry(conn, one.event)
        for one, place in zip(batch, published, strict=True)
    ]


def _entry(conn: Connection, event: NewEvent) -> Entry | None:
    """The entry that holds the event's id; None if what held it has died, and is purged."""
    return next(iter(log.find(conn, event.stream, [event.event_id])), None)


def _check_sources(conn: Connection, batch: Sequence[NewReport], owner_of: OwnerOf | None) -> None:
    names = {one.source for one in batch if one.source is not None}
    if not names:
        return
    asked = [{"name": name, "type": ids.stream_type(name)} for name in sorted(names)]
    rows = {row.name: row for row in _SOURCES(conn, source=as_json(asked))}
    owners = {
        name: _named_owner(row) if owner_of is None else _owner(conn, owner_of, name) for name, row in rows.items()
    }
    for one in batch:
        if one.source is None:
            continue
        owner = owners[one.source]
        if owner is None or rows[one.source].deleted_at is not None:
            raise SourceRefused(f"{one.source} is missing or was deleted.", source=one.source)
        if one.owner is not None and owner != one.owner:
            raise SourceRefused(f"{one.source} does not belong to {one.owner}.", source=one.source, owner=one.owner)


def _named_owner(row: Row) -> str | None:
    """Whose a stream is by its name; None: it has no entries, and none wait to become such."""
    return None if row.version is None and row.waits is None else ids.subject(row.name).partition("/")[0]


def _owner(conn: Connection, owner_of: OwnerOf, name: str) -> str | None:
    with dialects.users_plans(conn):
        owner: object = owner_of(conn, name)
    if owner is None or isinstance(owner, str):
        return owner
    raise InvalidInput(f"stream_owner has said {owner!r} of {name}: it must be a text or None.", field="stream_owner")


def newest(conn: Connection, turns: Iterable[TurnCommit]) -> dict[str, str | None]:
    """The newest entry of each stream in which one of these turns is about to land reports."""
    landing = [turn.claim for turn in turns if any(event.kind == REPORT_NAME for event in turn.consumed)]
    if not landing:
        return {}
    at = [{"stream": claim.stream, "seq": claim.version} for claim in landing]
    return {row.stream: row.entry_id for row in _NEWEST(conn, at=as_json(at))}


def as_entries(events: Sequence[InboxEvent], newest: str | None) -> list[str]:
    """The payloads of events as their entries have them, behind the entry `newest`: a report's names its parent."""
    parents = [newest, *(event.event_id for event in events)]
    return [
        reports.landed(event.data, parent) if event.kind == REPORT_NAME else event.data
        for event, parent in zip(events, parents, strict=False)
    ]


def tell(conn: Connection, events: Sequence[NewEvent], *, now: int) -> list[NewEvent]:
    """Publish reports from within a transaction that must not fail for them; those that were dropped.

    Dropped, with an alert, are reports to a deleted stream and those whose key another kind of event has taken. A key
    that a report has taken is no matter: the first one stands.
    """
    left, dropped = list(events), list[NewEvent]()
    while left:
        try:
            inbox.publish(conn, left, now=now)  # a refusal leaves none of them
            break
        except StreamDeleted as error:
            refused = [event for event in left if event.stream == error.stream]
        except KeyConflict as error:
            refused = [e for e in left if (e.stream, e.event_id) == (error.about["stream"], error.key)]
        dropped += refused
        left = [event for event in left if event not in refused]
    alerts.raise_alerts(conn, _alerts_of(dropped), now=now)
    return dropped


def _alerts_of(dropped: Iterable[NewEvent]) -> list[NewAlert]:
    """One alert per stream: a deleted one may have been told of much."""
    return [
        NewAlert(
            severity="warning",
            code="report.dropped",
            subject=stream,
            detail=f"{count} reports were dropped: the stream was deleted or the key is another event's",
        )
        for stream, count in sorted(Counter(event.stream for event in dropped).items())
    ]
