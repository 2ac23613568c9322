"""What the suites of log, inbox and queue share: events and entries to write, claims, and what the tables hold."""

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, ClassVar

from sqlalchemy import Connection

from postroad.model.clock import SECOND
from postroad.model.errors import ConcurrencyConflict
from postroad.model.rows import (
    ClaimedTurns,
    Hold,
    InboxEvent,
    NewEntry,
    NewEvent,
    Published,
    TurnClaim,
    TurnCommit,
)
from postroad.store import inbox, log, queues, runs, turns
from postroad.store.protocols import Inbox, Queue
from postroad.store.statements import Statement, as_json

Run = Callable[..., Any]

LEASE = 30 * SECOND
STREAM = "load/1"

_INBOX = Statement("SELECT stream, event_id, reason, front FROM {p}inbox ORDER BY position")
_QUEUES = Statement("SELECT * FROM {p}queues ORDER BY stream")
_LOG = Statement("SELECT * FROM {p}log ORDER BY stream, seq")
_STREAMS = Statement("SELECT * FROM {p}streams ORDER BY id")
_DELETE_STREAM = Statement(
    "INSERT INTO {p}streams (id, type, version, deleted_at) VALUES (:stream, 'load', 0, 1) "
    "ON CONFLICT (id) DO UPDATE SET deleted_at = 1"
)
_TAKE_AWAY = Statement("DELETE FROM {p}inbox WHERE position IN (SELECT value FROM {ints:positions})")


def event(number: int, stream: str = STREAM, data: str = '{"n":1}', **more: Any) -> NewEvent:
    """An event `e<number>` of a stream."""
    return NewEvent(stream=stream, event_id=f"e{number}", kind="ping", data=data, **more)


def entry(name: str, data: str = "1") -> NewEntry:
    """An entry of a log."""
    return NewEntry(entry_id=name, kind="note", data=data)


def hold(held: TurnClaim) -> Hold:
    """The proof of a claim."""
    return Hold(held.stream, held.token)


def names(events: Iterable[InboxEvent]) -> list[str]:
    """The ids of events."""
    return [one.event_id for one in events]


def decided(held: TurnClaim, *entries: str, **more: Any) -> TurnCommit:
    """A turn that consumes its whole set and records these entries."""
    return TurnCommit(
        claim=held,
        **{"consumed": held.events, "entries": [entry(f"{held.turn_id}/{name}") for name in entries], **more},
    )


def commit(run: Run, *decisions: TurnCommit, **more: Any) -> Any:
    """Commit turns in one transaction."""
    return run(turns.commit, list(decisions), **more)


class Uses:
    """A suite's inbox and queue: the built-in ones, unless a subclass names others."""

    inbox: ClassVar[Inbox] = inbox
    queue: ClassVar[Queue] = queues

    def publish(self, run: Run, *events: NewEvent) -> list[Published]:
        """Publish events in one transaction."""
        answers: list[Published] = run(self.inbox.publish, list(events))
        return answers

    def look(self, run: Run, token: str = "t1", **how: Any) -> ClaimedTurns:
        """One pass of claiming loads."""
        given = {"stream_type": "load", "token": token, "limit": 10, "batch": 10, "lease": LEASE, **how}
        found: ClaimedTurns = run(self.queue.claim, **given)
        return found

    def claim(self, run: Run, token: str = "t1", **how: Any) -> list[TurnClaim]:
        """The streams that one pass of claiming gets."""
        return self.look(run, token, **how).claims

    def claim_one(self, run: Run, token: str = "t1", **how: Any) -> TurnClaim:
        """The only stream that there is to claim."""
        (won,) = self.claim(run, token, **how)
        return won

    def drain(self, run: Run, token: str = "drain") -> None:
        """Claim and commit until nothing is left that is due."""
        passes = count()
        while won := self.claim(run, f"{token}{next(passes)}"):
            commit(run, *(decided(held) for held in won))


def append_next(conn: Connection, stream: str, *entries: NewEntry, now: int) -> int:
    """Append behind whatever is there."""
    return log.append(conn, stream, entries, expected_version=log.version(conn, stream), now=now)


def append_until_it_fits(run: Run, stream: str, name: str) -> None:
    """What a program does that others race with: read the version, append, and again on a conflict."""
    while True:
        try:
            run(append_next, stream, entry(name))
        except ConcurrencyConflict:
            continue
        return


def logged(conn: Connection, stream: str = STREAM) -> list[tuple[int, str]]:
    """(seq, id) of a stream's whole log."""
    return [(one.seq, one.key) for one in log.read(conn, stream, limit=100_000)]


def waits(conn: Connection) -> list[tuple[str, str, str | None]]:
    """(stream, id, reason) of what stands in inboxes."""
    return [(row.stream, row.event_id, row.reason) for row in _INBOX(conn)]


def fronts(conn: Connection) -> list[int]:
    """The front marks of what stands in inboxes."""
    return [row.front for row in _INBOX(conn)]


def queue_rows(conn: Connection) -> list[Any]:
    """The queues table."""
    return list(_QUEUES(conn))


def ends(conn: Connection, stream: str = STREAM) -> list[str | None]:
    """How a stream's runs ended, newest first."""
    return [row.end for row in runs.of_stream(conn, stream)]


def everything(conn: Connection) -> list[list[tuple[Any, ...]]]:
    """All that log, inbox and queues hold."""
    return [[tuple(row) for row in statement(conn)] for statement in (_INBOX, _QUEUES, _LOG, _STREAMS)]


def delete_stream(conn: Connection, stream: str) -> None:
    """Leave a deleted stream's tombstone."""
    _DELETE_STREAM(conn, stream=stream)


def take_away(conn: Connection, events: Iterable[InboxEvent]) -> None:
    """Remove events from the inbox, as an operator's purge does."""
    _TAKE_AWAY(conn, positions=as_json([one.position for one in events]))
