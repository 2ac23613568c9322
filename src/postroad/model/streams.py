"""A stream as its operators see it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

StreamState = Literal["idle", "waiting", "running", "backing_off", "parked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEvent:
    """An event that waits, or that a turn is at; `position`: how many of its stream stand before it."""

    position: int
    key: str
    kind: str
    received_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow:
    """A stream as its operators see it.

    Attributes:
        version: How many entries its log has; of a deleted stream: had.
        state: "running": a turn is under way. "backing_off": the last attempt failed, the next one is `until` then.
            "parked": a person must let it go. "waiting": events wait, and nobody is at them yet. "idle": none do.
        attempts: How often the turn that is under way, backs off or is parked was begun; else 0.
        until: When the claim ends unless it is renewed, or the back-off is over; None: neither is there.
        why: A sentence on what its events wait for; '' if none wait.
        waiting: The events that are not decided yet, oldest first, at most 100.
        dead: How many ended without a decision; counted up to 10,000.
    """

    stream: str
    type: str
    version: int
    deleted_at: datetime | None
    state: StreamState
    attempts: int
    until: datetime | None
    why: str
    waiting: tuple[WaitingEvent, ...]
    dead: int
