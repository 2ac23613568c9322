"""What a transaction has recorded and not yet written, and the function that writes it."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import msgspec
from sqlalchemy import Connection

from postroad.engine.wakeups import Topic
from postroad.model.acks import Presented
from postroad.model.delegations import DelegationEnd, NewDelegation
from postroad.model.dispatches import Accepted, Withdrawn
from postroad.model.errors import InvalidInput
from postroad.model.failpoints import failpoint
from postroad.model.rows import Enqueued, NewDispatch, NewEntry, NewEvent, Published, TimerChange
from postroad.store import acks, delegations, dialects, inbox, outbox, streams, timers
from postroad.store.groups import Name, Verb


class When(msgspec.Struct, frozen=True):
    """A time in microseconds, or a length of time after the decision; `given` is False if it was left out."""

    at: int | None
    after: int
    given: bool

    def from_(self, base: int) -> int:
        """The time itself, for a decision taken at `base`."""
        return base + self.after if self.at is None else self.at


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """What a dispatch says and to whom; `digest` is what "same content" is held against."""

    kind: str
    version: int
    destination: str
    body: str
    digest: str
    host: str | None = None


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """A dispatch as recorded: times are still relative to the moment of the decision."""

    id: str
    key: str
    content: Content
    on_failure: Literal["event", "alert"]
    max_attempts: int | None
    when: When
    expires: When | None
    origin: str
    keep: bool
    accepted: Accepted
    lane: str | None = None
    ack: bool = False

    def row(self, stream: str, base: int) -> NewDispatch:
        """The row to write, for a decision taken at `base`."""
        return NewDispatch(
            id=self.id,
            key=self.key,
            stream=stream,
            kind=self.content.kind,
            version=self.content.version,
            destination=self.content.destination,
            body=self.content.body,
            on_failure=self.on_failure,
            max_attempts=self.max_attempts,
            due_at=self.when.from_(base),
            expires_at=None if self.expires is None else self.expires.from_(base),
            content_hash=self.content.digest,
            origin=self.origin,
            keep=self.keep,
            lane=self.lane,
            host=self.content.host,
            ack_required=int(self.ack),
        )


class TimerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a timer as recorded."""

    verb: Literal["set", "rearm", "cancel"]
    stream: str
    key: str
    at: int | None = None
    after: int = 0
    data: str = "{}"

    def row(self, base: int) -> TimerChange:
        """The change to apply, for a decision taken at `base`."""
        spec = "" if self.verb == "cancel" else f"after {self.after}" if self.at is None else f"at {self.at}"
        fire_at = base + self.after if self.at is None else self.at
        return TimerChange(verb=self.verb, stream=self.stream, key=self.key, fire_at=fire_at, data=self.data, spec=spec)


@dataclass(slots=True)
class Records:
    """Everything that verbs have recorded, in order."""

    publishes: list[tuple[NewEvent, Accepted]] = field(default_factory=list)
    reports: list[NewEvent] = field(default_factory=list)  # of a turn only
    delegated: list[NewDelegation] = field(default_factory=list)  # likewise
    finished: list[DelegationEnd] = field(default_factory=list)  # likewise
    sends: list[Sending] = field(default_factory=list)
    timers: list[TimerRecord] = field(default_factory=list)
    acks: list[Presented] = field(default_factory=list)
    withdrawals: list[tuple[str, Withdrawn]] = field(default_factory=list)
    entries: list[NewEntry] = field(default_factory=list)
    deletions: list[str] = field(default_factory=list)
    writes: list[Callable[[Connection], object]] = field(default_factory=list)
    tells: bool = False
    """Whether the commit itself wakes loops, since this process has none that would tell others."""

    @property
    def topics(self) -> frozenset[Topic]:
        """The loops that have work once this is committed."""
        found: set[Topic] = set()
        if self.publishes or self.reports or self.finished:
            found.add("turns")
        if self.sends:
            found.add("sends")
        if self.acks or self.withdrawals:  # outcomes are events, and the next one of a lane may go
            found |= {"turns", "sends"}
        if self.timers or self.delegated:
            found.add("timers")
        if self.deletions:  # what waits in them ends
            found.add("turns")
        return frozenset(found)

    def run_writes(self, conn: Connection) -> None:
        """The user's own rows."""
        for fn in self.writes:
            answer = fn(conn)
            if inspect.iscoroutine(answer):  # of a plain function around an async one
                answer.close()
                raise InvalidInput("What `write` was given is async: it would never run.", field="fn")

    def fill(self, published: Sequence[Published], enqueued: Sequence[Enqueued], withdrawn: Sequence[str]) -> None:
        """Let the objects that the verbs returned know what became of them."""
        for (event, accepted), row in zip(self.publishes, published, strict=True):
            accepted.fill(row.event_id, row.created, event.stream, row.position)
        for sending, sent in zip(self.sends, enqueued, strict=True):
            sending.accepted.fill(sent.id, sent.created)
        done = set(withdrawn)
        for key, answer in self.withdrawals:
            answer.done = key in done


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the database answered to a transaction's records."""

    published: list[Published]
    enqueued: list[Enqueued]
    withdrawn: list[str]


def write(conn: Connection, batch: Sequence[Records], *, actor: str, now: int) -> list[Written]:
    """Write what was recorded outside of turns, in bulk, inside the connection's transaction; an answer for each.

    Raises:
        KeyConflict: A key is taken by other content.
        TimerConflict: A timer was set before.
        DispatchNotFound, AckNotRequested, BadAckToken, AckRefused: A token acknowledges nothing.
        StreamDeleted: An event was published to a deleted stream, or a timer armed.
    """
    failpoint("accept.before_insert")
    for records in batch:
        if records.writes:
            with dialects.users_plans(conn):
                records.run_writes(conn)
    # In the order of a turn's commit, streams first: whoever meets the same rows locks them alike.
    deletions = sorted({stream for records in batch for stream in records.deletions})
    streams.delete(conn, deletions, now=now)
    changes = [timer.row(now) for records in batch for timer in records.timers]
    streams.refuse_deleted(conn, {change.stream for change in changes if change.verb != "cancel"})
    sends = [send.row("", now) for records in batch for send in records.sends]
    enqueued = iter(outbox.insert(conn, sends, source="app", actor=actor, in_turn=False, now=now))
    timers.apply(conn, [*timers.disarmed(conn, deletions), *changes], now=now)
    keys = [key for records in batch for key, _ in records.withdrawals]
    presented = [token for records in batch for token in records.acks]
    acks.acknowledge(conn, presented, actor=actor, withdrawals=keys, now=now)
    withdrawn = set(outbox.withdraw(conn, keys, actor=actor, now=now))
    delegations.cancel(conn, deletions, now=now)
    events = [event for records in batch for event, _ in records.publishes]
    published = iter(inbox.publish(conn, events, now=now))
    failpoint("accept.after_insert")
    return [
        Written(
            published=list(islice(published, len(records.publishes))),
            enqueued=list(islice(enqueued, len(records.sends))),
            withdrawn=[key for key, _ in records.withdrawals if key in withdrawn],
        )
        for records in batch
    ]


def begun(conn: Connection, batch: Sequence[Records], *, now: int) -> list[Written]:
    """`write` for transactions of our own."""
    written = write(conn, batch, actor="begin", now=now)
    told = frozenset[Topic]().union(*(records.topics for records in batch if records.tells))
    dialects.notify_at_commit(conn, told)
    return written


def _names(records: Records) -> list[Name]:
    return [
        *(("", stream) for stream in records.deletions),  # least of all: deletions come first
        *(("event", event.stream, event.event_id) for event, _ in records.publishes),
        *(("key", send.key) for send in records.sends if send.key),
        *(("key", key) for key, _ in records.withdrawals),
        *(("ack", token.dispatch) for token in records.acks),
        *(("timer", timer.stream, timer.key) for timer in records.timers),
    ]


BEGIN = Verb(run=begun, names=_names)
