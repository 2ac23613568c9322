"""Delegations: work that a turn starts on another stream, and how its end comes back to the stream that wanted it."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from postroad.model.events import REPORT_NAME, Event
from postroad.model.ids import DELEGATED_PREFIX

DEPTH_MAX = 5
FAN_OUT_MAX = 100
TIMEOUT_SECONDS = 86_400
OVERDUE = "its time was over before it began"
TURN_KIND = "delegation"


class DelegationStatus(StrEnum):
    """Where a delegation stands. It ends once, whoever says so first."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream is asked to do, as the payload of an event of it.

    Attributes:
        parent: The stream that wants it, and `key` its name for it: together they are one delegation.
        data: What there is to do, as it was given.
        depth: How many streams stand above this one: 1 if nobody has delegated to the parent.
        timeout: How long it has, in seconds, from when it was received.
    """

    parent: str
    key: str
    data: Any
    depth: int
    timeout: float


class Delegated(msgspec.Struct, frozen=True, kw_only=True):
    """How a delegation ended, as the report to the stream that wanted it says.

    Attributes:
        key: The delegation's key.
        stream: Where the work was done.
        status: "done", "failed", "cancelled" (by a person, or that stream was stopped or deleted) or "timed_out".
        result: What `finish` was given; None unless it is done.
        error: Why it is not done; None if it is.
    """

    key: str
    stream: str
    status: str
    result: Any = None
    error: str | None = None

    @classmethod
    def of(cls, item: Event) -> "Delegated | None":
        """The end of a delegation if the event or entry reports one, else None."""
        if item.kind != REPORT_NAME or not item.key.startswith(DELEGATED_PREFIX):
            return None
        return msgspec.json.decode(item.raw, type=_Reported).data


class _Reported(msgspec.Struct):
    data: Delegated


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegation:
    """A delegation as it stands.

    Attributes:
        parent: The stream that wants it, and `key` its name for it.
        stream: Where the work is done.
        status: "open", or how it ended: "done", "failed", "cancelled", "timed_out".
        depth: How many streams stand above the one that does it.
        deadline: When it is timed out, if it is open then.
        ended_at: When it ended; None: it is open.
        error: Why it is not done.
        note: What came of it after its end, or that its report was dropped; else "".
    """

    parent: str
    key: str
    stream: str
    status: str
    depth: int
    created_at: datetime
    deadline: datetime
    ended_at: datetime | None
    error: str | None
    note: str


class Cancellation(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a delegation that a person wanted to cancel.

    Attributes:
        done: Whether this ended it.
        status: What it has ended as; "" if there is no such delegation.
        refused: Why nothing was done; "" if it was.
    """

    done: bool
    status: str
    refused: str = ""


class NewDelegation(msgspec.Struct, frozen=True, kw_only=True):
    """A delegation to be written, with the id of the event that starts it. `timeout` in microseconds."""

    stream: str
    key: str
    child: str
    event_id: str
    depth: int
    timeout: int


class DelegationEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a delegation of `stream` is to end. `result` is JSON."""

    stream: str
    key: str
    status: DelegationStatus
    result: str = "null"
    error: str | None = None


class Standing(msgspec.Struct, frozen=True):
    """How many delegations a stream has open, and how deep the deepest task is that it works at; 0: at none."""

    open: int
    depth: int
