"""A stream as its operators see it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from postroad.model.clock import moment
from postroad.model.events import Event

StreamState = Literal["idle", "waiting", "running", "backing_off", "parked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEvent:
    """An event that waits, or that a turn is at; `position`: how many of its stream stand before it."""

    position: int
    key: str
    kind: str
    received_at: datetime


class EventRow(Event):
    """An event in a stream's inbox, as its operators see it: it waits, or has ended without a decision.

    Attributes:
        cursor: Its place in the inbox; a page goes on behind it.
        reason: Why it has ended; None: it waits, or a turn is at it.
    """

    __slots__ = ("_ended", "cursor", "reason")

    def __init__(
        self, *, stream: str, key: str, kind: str, raw: str, version: int, received: int, cursor: int,
        reason: str | None = None, ended: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(stream=stream, key=key, kind=kind, raw=raw, version=version, received=received)
        self.cursor = cursor
        self.reason = reason
        self._ended = ended

    @property
    def ended_at(self) -> datetime | None:
        """When it ended without a decision; None: it has not."""
        return None if self._ended is None else moment(self._ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """A stream as its operators see it.

    Attributes:
        version: How many entries its log has; of a deleted stream: had.
        state: "running": a turn is under way. "backing_off": the last attempt failed, the next one is `until` then.
            "parked": a person must let it go. "waiting": events wait, and nobody is at them yet. "idle": none do.
        attempts: How often the turn that is under way, backs off or is parked was begun; else 0.
        until: When the claim ends unless it is renewed, or the back-off is over; None: neither is there.
        silent_since: Of a turn that is under way: when its worker was last heard of, if it has missed what it was to
            say since; it may be dead, and another one takes over at `until` at the latest. Else None.
        why: A sentence on what its events wait for; '' if none wait.
        waiting: The events that are not decided yet, oldest first, at most 100.
        dead: How many no turn could process, of 10,000 that ended without a decision at the most. What a stop has
            withdrawn, and what was dropped with its stream, is none of them.
    """

    stream: str
    type: str
    version: int
    deleted_at: datetime | None
    state: StreamState
    attempts: int
    until: datetime | None
    silent_since: datetime | None = None
    why: str
    waiting: tuple[WaitingEvent, ...]
    dead: int
