"""A turn as its handler sees it: the exact set of events, the log, and the verbs of a transaction."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec

from postroad.engine.arguments import Context, payload
from postroad.engine.folding import Folding
from postroad.engine.tools import Tool
from postroad.engine.transaction import Transaction
from postroad.model import events, ids
from postroad.model.clock import moment
from postroad.model.errors import InvalidInput, Refused, shown
from postroad.model.events import Entry, Event
from postroad.model.folds import Fold
from postroad.model.kinds import Kind
from postroad.model.lifecycle import RunEnd
from postroad.model.payload import whole
from postroad.model.rows import InboxEvent, NewAlert, NewEntry, TurnClaim, TurnCommit
from postroad.store import log
from postroad.store.database import Database

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
LOG_WINDOW_MAX = 10_000


class Turn(Transaction):
    """The processing of an exact set of events of one stream. What it recorded commits when the handler returns.

    Attributes:
        id: The same for the same set of events, on every attempt.
        stream: The stream's name; `subject` is the part after the first slash.
        events: The events to decide on, oldest first.
        attempt: This attempt's number, from 1.
        now: When this attempt was claimed.
        post: The app.
        stopping: True once the runtime wants the turn to end: the process is to end, the claim is lost, or the
            deadline has passed. After its end a turn's verbs are refused.
    """

    def __init__(
        self, context: Context, claim: TurnClaim, waiting: Sequence[InboxEvent], *, now: int, post: "Postroad",
        database: Database, folding: Folding, ending: Callable[[], bool],
    ) -> None:  # fmt: skip
        super().__init__(context)
        self._claim = claim
        self._database = database
        self._folding = folding
        self._ordinal = 0
        self.id = claim.turn_id
        self.stream = claim.stream
        self.events: Sequence[Event] = [event_of(claim.stream, e) for e in waiting]
        self.attempt = claim.attempt
        self.now: datetime = moment(now)
        self.interrupted: Sequence[Any] = ()
        self._ending = ending
        self.post = post

    @property
    def stopping(self) -> bool:
        return self._over or self._ending()

    @property
    def subject(self) -> str:
        """What the stream is about: the part of its name after the first slash."""
        return ids.subject(self.stream)

    def log(self, *, last: int = 200) -> Sequence[Entry]:
        """The stream's last entries, oldest first, as of this turn's claim; at most 10,000."""
        window = whole(last, "last", least=0, most=LOG_WINDOW_MAX)
        return self._database.read(log.last, self.stream, limit=window)

    def fold(self, fold: Fold[S]) -> S:
        """The fold's state over the stream's whole log as of this turn's claim."""
        if not isinstance(fold, Fold):
            raise InvalidInput(f"fold must be a Fold, got {shown(fold)}.", field="fold")
        return self._folding.at(self.stream, fold, self._claim.version)

    def record(self, kind: Kind[T] | str, data: T) -> None:
        """Append an entry to this stream's log."""
        name, version, encoded = payload(kind, data)
        self._open_records().entries.append(self._entry(name, version, encoded))

    async def call(self, tool: Tool[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a tool, recorded under this run."""
        raise _no_tools()

    async def call_json(self, name: str, arguments: str) -> str:
        """Call a tool as a model asked for it."""
        raise _no_tools()

    def _entry(self, kind: str, version: int, data: str) -> NewEntry:
        ordinal = len(self._records.entries)
        return NewEntry(
            entry_id=ids.entry_id(self.id, ordinal), kind=kind, version=version, data=data,
            run_id=self._claim.run_id, cause=self.id,
        )  # fmt: skip

    def _timer_stream(self, stream: str | None) -> str:
        return self.stream if stream is None else ids.check_stream(stream)

    def _default_key(self, otherwise: str | None = None) -> str:
        self._ordinal += 1
        return ids.key_in_turn(self.id, self._ordinal)

    def commit_at(self, decided_at: int, noops: Mapping[str, str] | None = None) -> TurnCommit:
        """What this turn writes, for a decision taken at `decided_at`; `noops`: reasons by event id."""
        records = self._records
        return TurnCommit(
            claim=self._claim,
            consumed=self._claim.events,
            entries=[*noop_entries(self._claim, noops or {}), *records.entries],
            dispatches=[s.row(self.stream, decided_at) for s in records.sends],
            timers=[t.row(decided_at) for t in records.timers],
            publishes=[event for event, _ in records.publishes],
            acks=records.acks,
            withdrawals=[key for key, _ in records.withdrawals],
        )


def _no_tools() -> Refused:
    return Refused("Recorded tool calls are not available in this release; call the function itself.")


def event_of(stream: str, event: InboxEvent) -> Event:
    """An event as handlers see it."""
    return Event(
        stream=stream, key=event.event_id, kind=event.kind, raw=event.data, version=event.version,
        received=event.received_at,
    )  # fmt: skip


def noop_entries(claim: TurnClaim, reasons: Mapping[str, str]) -> list[NewEntry]:
    """One `postroad.noop` entry for each event that needed no decision."""
    return [
        NewEntry(
            entry_id=f"postroad.noop:{event_id}",
            kind=events.NOOP,
            data=msgspec.json.encode(events.Noop(event=event_id, reason=reason)).decode(),
            run_id=claim.run_id,
            cause=claim.turn_id,
        )
        for event_id, reason in reasons.items()
    ]


def answer(claim: TurnClaim, consumed: list[InboxEvent], reasons: Mapping[str, str]) -> TurnCommit:
    """The commit that answers events of a set without a decision: the events, then a noop for each reason."""
    return TurnCommit(claim=claim, consumed=consumed, entries=noop_entries(claim, reasons))


def failure(claim: TurnClaim, *, reason: str, error: str) -> NewEntry:
    """The visible entry of a set that ended without a decision."""
    failed = events.Failure(events=[e.event_id for e in claim.events], reason=reason, error=error)
    return NewEntry(
        entry_id=f"postroad.failed:{claim.turn_id}",
        kind=events.FAILED,
        data=msgspec.json.encode(failed).decode(),
        run_id=claim.run_id,
        cause=claim.turn_id,
    )


def bury(claim: TurnClaim, *, reason: str, error: str) -> TurnCommit:
    """The commit of a set that is given up: outcomes are recorded, the rest goes dead, visibly, with an alert."""
    kept = [e for e in claim.events if e.kind in _ALWAYS_RECORDED]
    return TurnCommit(
        claim=claim,
        consumed=kept,
        dead=[e for e in claim.events if e.kind not in _ALWAYS_RECORDED],
        dead_reason=reason,
        entries=[failure(claim, reason=reason, error=error)],
        alerts=[NewAlert(code="turn.dead", subject=claim.stream, detail=f"{reason}: {error}"[:2_000])],
        end=RunEnd.FAILED,
        error=error,
    )


def duplicate_key(claim: TurnClaim, key: str) -> TurnCommit:
    """The commit of a decision whose dispatch key exists and that nothing replaced: visible, with an alert."""
    said = f"dispatch key {key!r} exists already"
    return TurnCommit(
        claim=claim,
        consumed=claim.events,
        entries=[failure(claim, reason="turn.failed.duplicate_key", error=said)],
        alerts=[NewAlert(code="turn.duplicate_key", subject=claim.stream, detail=said)],
        end=RunEnd.FAILED,
        error=said,
    )


_ALWAYS_RECORDED = frozenset({events.OUTCOME_NAME})
