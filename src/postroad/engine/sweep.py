"""Retention beside the pump's other work: a pass now and then, in short pieces with long rests between them."""

from postroad.engine.loop import Parts
from postroad.engine.telemetry import logger
from postroad.model.clock import SECOND
from postroad.model.retention import Retention
from postroad.store import rates, retention
from postroad.store.retention import Place, Tally

EVERY = 3_600 * SECOND
FIRST = 60 * SECOND  # after the start, which must not depend on it
AGAIN = 60 * SECOND  # after an error
PIECE = SECOND // 20  # how long it goes on
REST = 24  # times as long as the piece took: of a hundred sends less than five meet it
# How long a transaction takes on SQLite, where others who write wait for it, if the size of its chunk can help it;
# on Postgres it may take as long as a piece.
CHUNK_TAKES = SECOND // 100
CHUNK_MIN = 10


class Sweep:
    """One process's passes over what is old. Several processes may have theirs at once."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._clock = parts.database.clock
        self._place = Place()
        self._tally = Tally()
        self._chunk = retention.CHUNK
        self._next = 0  # on the steady clock
        if parts.retention is not None:
            self._rest(FIRST)

    def wait(self) -> int | None:
        """How long until it goes on, in microseconds; None: it never does."""
        return None if self._parts.retention is None else max(0, self._next - self._clock.monotonic())

    async def step(self) -> None:
        """Go on for a moment, if it is time to. What fails is told and tried again later: the pump has more to do."""
        kept = self._parts.retention
        if kept is None or self.wait() != 0:
            return
        began = self._clock.monotonic()
        try:
            place = await self._piece(kept, began)
            if place is None:
                await self._parts.database.atransact(rates.forget)
        except Exception as error:
            self._parts.telemetry.emit("retention.error", error=error)
            logger.warning("retention: %s", error)
            # It may have been committed: then the audit has it, and what comes is another row.
            self._tally = Tally()
            self._rest(AGAIN)
            return
        if place is None:
            self._end()
        else:
            self._next = self._clock.monotonic() + REST * (self._clock.monotonic() - began)

    async def _piece(self, kept: Retention, began: int) -> Place | None:
        """Delete for as long as a piece lasts; None: the pass is over."""
        database = self._parts.database
        place: Place | None = self._place
        while place is not None and self._clock.monotonic() - began < PIECE:
            asked = self._clock.monotonic()
            found = await database.aread(
                retention.look, place, retention=kept, limit=self._chunk, now=self._clock.wall()
            )
            place = found.next
            if found.rows:
                place, self._tally = await database.atransact(retention.end, found, self._tally, retention=kept)
            self._fit(self._clock.monotonic() - asked)
            self._place = place or Place()
        return place

    def _fit(self, took: int) -> None:
        """Make the next chunk so large that it takes as long as it may."""
        most = CHUNK_TAKES if self._parts.database.is_sqlite else PIECE
        fitting = self._chunk * most // max(took, 1)
        self._chunk = max(CHUNK_MIN, min(fitting, 2 * self._chunk, retention.CHUNK))

    def _end(self) -> None:
        if self._tally.counts:
            self._parts.telemetry.emit("retention.swept", **self._tally.counts)
        self._tally = Tally()
        self._rest(EVERY)

    def _rest(self, length: int) -> None:
        """Rest for about so long: processes that were started together do not sweep together."""
        self._next = self._clock.monotonic() + round(length * (0.5 + self._parts.entropy.fraction()))
