"""What waits in a stream's inbox and stands in its log, and the built-in kinds' payloads."""

from datetime import datetime
from typing import Any

import msgspec

from postroad.model.clock import moment
from postroad.model.operations import Operation

NOOP = "postroad.noop"
FAILED = "postroad.failed"
INTERRUPTED = "postroad.interrupted"
OUTCOME_NAME = "postroad.outcome"
TIMER_FIRED_NAME = "postroad.timer_fired"
STOP_NAME = "postroad.stop"
TASK_NAME = "postroad.task"
REPORT_NAME = "postroad.report"


class Event:
    """What waits in a stream's inbox.

    Attributes:
        stream: The stream's name.
        key: Its id in that stream, the same on every retry of whoever published it.
        kind: Its kind's name.
        version: The version of the kind it was written in.
        raw: The payload as the exact JSON text that was accepted.
    """

    __slots__ = ("_data", "_received", "key", "kind", "raw", "stream", "version")

    def __init__(self, *, stream: str, key: str, kind: str, raw: str, version: int = 1, received: int = 0) -> None:
        self.stream = stream
        self.key = key
        self.kind = kind
        self.version = version
        self.raw = raw
        self._received = received
        self._data: Any = msgspec.UNSET

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.stream!r}, {self.key!r}, {self.kind!r})"

    @property
    def data(self) -> Any:
        """The payload as plain values; a kind's `of` gives it typed."""
        if self._data is msgspec.UNSET:
            self._data = msgspec.json.decode(self.raw)
        return self._data

    @property
    def received_at(self) -> datetime:
        """When it was accepted."""
        return moment(self._received)


class Entry(Event):
    """What stands in a stream's log.

    Attributes:
        seq: Its place, dense from 1.
        cause: The id of the turn that recorded it, None for an event that came from outside.
    """

    __slots__ = ("_recorded", "cause", "seq")

    def __init__(
        self,
        *,
        stream: str,
        key: str,
        kind: str,
        raw: str,
        version: int = 1,
        received: int = 0,
        seq: int = 0,
        recorded: int = 0,
        cause: str | None = None,
    ) -> None:
        super().__init__(stream=stream, key=key, kind=kind, raw=raw, version=version, received=received)
        self.seq = seq
        self.cause = cause
        self._recorded = recorded

    @property
    def recorded_at(self) -> datetime:
        """When it was committed to the log."""
        return moment(self._recorded)


class Partial(msgspec.Struct, frozen=True):
    """What a running turn has said so far; not durable.

    Attributes:
        stream: The stream's name.
        turn: The turn's id: the `cause` of the entries that it will record.
        text: The whole text so far; empty when it no longer counts, and no entry has taken its place.
    """

    stream: str
    turn: str
    text: str


class Outcome(msgspec.Struct, frozen=True):
    """How a dispatch ended, as an event of the stream that sent it.

    `status` is delivered, acked, dead_letter or expired; `reason` the code of the history row.
    """

    dispatch: str
    key: str
    kind: str
    status: str
    reason: str
    error: str | None = None
    on_failure: str = "event"


class Noop(msgspec.Struct, frozen=True):
    """Why an event needed no decision."""

    event: str
    reason: str


class Failure(msgspec.Struct, frozen=True):
    """What ended without a decision: the events, why, and the error's text; and the tool calls that were made."""

    events: list[str]
    reason: str
    error: str
    operations: list[Operation] = []


class Interruption(msgspec.Struct, frozen=True):
    """A turn that was stopped and is not run again: its events, why, and all that is known of its tool calls."""

    events: list[str]
    reason: str
    error: str
    operations: list[Operation]
