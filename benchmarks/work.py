"""What is measured: five works, how much of each, and the same payloads for both sides."""

import hashlib
import secrets
import time
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

import msgspec

TYPE = "bench"
EVENT = "event"
DECIDED = "decided"
MAIL = "mail"
SENDS_PER_TURN = 2
ENTRIES_PER_TURN = 2  # the event and what was decided
ATTEMPTS = 8
TURN_LEASE = 30_000_000
SEND_LEASE = 15_000_000
TIMER_SECONDS = 3_600
BULK = 500

Name = Literal["publish", "publish bulk", "decide", "drain", "timers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One thing to measure.

    `streams` is how many streams are busy at once, each with one thing in flight: one publisher, one turn, one
    send. So the limit may write that much in one transaction (`batch`), and ours may group it however it does.
    Bulk publishing is one publisher with transactions of `BULK` events, spread over the streams; timers are all due
    at once, and fired as many in a transaction.
    """

    name: Name
    streams: int
    count: int = 0

    @property
    def batch(self) -> int:
        """How many of these the limit puts into one transaction."""
        return BULK if self.name in ("publish bulk", "timers") else self.streams

    def of(self, count: float) -> "Work":
        """The same work, that many times or a little more: whole batches, at least one."""
        return replace(self, count=max(1, ceil(count / self.batch)) * self.batch)


WORKS = (
    Work(name="publish", streams=1),
    Work(name="publish", streams=64),
    Work(name="publish bulk", streams=1),
    Work(name="publish bulk", streams=64),
    Work(name="decide", streams=1),
    Work(name="decide", streams=64),
    Work(name="drain", streams=1),
    Work(name="drain", streams=64),
    Work(name="drain", streams=500),
    Work(name="timers", streams=1),
    Work(name="timers", streams=64),
)


def now() -> int:
    """Microseconds since 1970 UTC, as the tables hold them."""
    return time.time_ns() // 1000


def token() -> str:
    """32 hexadecimal digits, as ids and claim tokens are."""
    return secrets.token_hex(16)


def content_hash(*parts: str) -> str:
    """64 hexadecimal digits of a dispatch's content."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def text(payload: object) -> str:
    """A payload's JSON text."""
    return msgspec.json.encode(payload).decode()


def stream(number: int) -> str:
    """The name of a stream."""
    return f"{TYPE}/{number:06}"


def event(number: int) -> dict[str, str]:
    """An event's payload: about 200 bytes of JSON."""
    return {"number": f"{number:06}", "text": "the truck stands before the gate and waits for a free ramp " * 3}


def decision(number: str) -> dict[str, str]:
    """What a turn records: about 200 bytes of JSON."""
    return {"event": number, "reason": "late by more than half an hour, so the driver and the gate are told " * 2}


def mail(number: str) -> dict[str, str]:
    """What a dispatch carries: about 200 bytes of JSON."""
    return {"number": number, "text": "please tell us when you expect to arrive at the gate of the warehouse " * 2}


def outcome(dispatch: str, key: str) -> str:
    """The JSON text of the event that tells a stream of a delivered dispatch."""
    return text(
        {
            "dispatch": dispatch,
            "key": key,
            "kind": MAIL,
            "status": "delivered",
            "reason": "dispatch.delivered.transport_ok",
            "error": None,
            "on_failure": "event",
        }
    )
