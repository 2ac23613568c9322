"""How long what has ended is kept."""

import msgspec

from postroad.model.clock import SECOND

DAY = 86_400 * SECOND


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of time in microseconds, each counted from the moment at which a row came to its end.

    Attributes:
        delivered: Dispatches that were sent and asked for no acknowledgement.
        acked: Dispatches that were acknowledged.
        dead_letter: Dispatches that failed for good, and events that ended without a decision.
        expired: Dispatches whose deadline passed or that were withdrawn.
        records: Runs of turns that have ended and their tool calls, and alerts that have rung.
        deleted: What a deleted stream contained, from its deletion on: its log, events, runs, tool calls and timers.
        tombstones: How long a key stays taken after its row went, where no stream holds it for longer; and how long
            the history of a dispatch whose row went is kept.
        history: Whether a dispatch's history outlives its row.
    """

    delivered: int = 7 * DAY
    acked: int = 7 * DAY
    dead_letter: int = 30 * DAY
    expired: int = 30 * DAY
    records: int = 30 * DAY
    deleted: int = DAY
    tombstones: int = 90 * DAY
    history: bool = True
