"""What another queue (SQS FIFO, NATS) has to do to take our own's place.

The modules `postroad.store.inbox` and `postroad.store.queues` are the ones that are built in; the contract
suites in `postroad.testing.contracts` tell whether others keep the promises.
"""

from collections.abc import Sequence
from typing import Protocol

from sqlalchemy import Connection

from postroad.model.lifecycle import RunEnd
from postroad.model.rows import ClaimedTurns, Hold, NewAlert, NewEvent, Published


class Inbox(Protocol):
    """Where events wait, as publishers see it."""

    def publish(self, conn: Connection, events: Sequence[NewEvent], *, now: int) -> list[Published]:
        """Put events into their streams' inboxes, each id once per stream; answers in the order given."""

    def waiting(self, conn: Connection, stream: str) -> int:
        """How many events of the stream wait."""

    def before(self, conn: Connection, stream: str, position: int) -> int:
        """How many events of the stream wait in front of this position."""


class Queue(Protocol):
    """Who may process a stream's next turn, as workers see it. All but `claim` need a current token."""

    def claim(
        self,
        conn: Connection,
        *,
        stream_type: str,
        token: str,
        limit: int,
        batch: int,
        lease: int,
        cursor: str = "",
        debounce: int = 0,
        debounce_max: int = 0,
        takeover: bool = True,
        now: int,
    ) -> ClaimedTurns:
        """Claim up to `limit` streams of a type, each with its next events."""

    def adopt(self, conn: Connection, *, stream_type: str, now: int) -> int:
        """Housekeeping that a claim asked for by `clogged`; how much was done."""

    def lock(self, conn: Connection, holds: Sequence[Hold]) -> None:
        """Wait for whoever works on these claims' rows just now."""

    def renew(self, conn: Connection, holds: Sequence[Hold], *, lease: int, now: int) -> list[Hold]:
        """Let claims run for another `lease`; the holds that are lost."""

    def back_off(
        self, conn: Connection, hold: Hold, *, delay: int, error: str, end: RunEnd = RunEnd.FAILED, now: int
    ) -> None:
        """Leave the stream for `delay`; its set stays as it is."""

    def release(self, conn: Connection, hold: Hold, *, now: int) -> None:
        """Give back what never began."""

    def put_back(self, conn: Connection, holds: Sequence[Hold], *, now: int) -> None:
        """Undo takeovers of which nothing began."""

    def split(self, conn: Connection, hold: Hold, *, error: str, now: int) -> None:
        """Have each event of the set tried alone from now on."""

    def park(self, conn: Connection, hold: Hold, *, error: str, alert: NewAlert, now: int) -> None:
        """Leave the stream until a person resolves it."""

    def end_stale(self, conn: Connection, hold: Hold, *, now: int) -> None:
        """Write that a run came back after its claim was over."""
