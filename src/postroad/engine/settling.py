"""Settling what attempts came to: in groups, under their claims' tokens, before anything new is sent."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from postroad.engine.loop import Parts
from postroad.engine.telemetry import logger
from postroad.engine.wakeups import Topic
from postroad.model.errors import CommitUnknown
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import Reason, Status
from postroad.model.payload import safe_error
from postroad.model.rows import Settled, Settlement
from postroad.store import settle as dispatches
from postroad.store.dialects import is_away

SETTLE_MAX = 500
_Claim = tuple[str, str]  # a dispatch's id and the claim's token


class _Result(NamedTuple):
    sender: str
    stream: str  # '': its outcome is no event
    settlement: Settlement


class Settler:
    """Holds the results of attempts until they are settled, and settles those that are there together.

    `settled` is called whenever there is room again for others, with whether some of them are to be sent again.
    """

    def __init__(self, parts: Parts, settled: Callable[[bool], None]) -> None:
        self._parts = parts
        self._tell = settled
        self._results: dict[_Claim, _Result] = {}
        self._refused: dict[_Claim, int] = {}  # since when the database refuses a result
        self._unknown: set[_Claim] = set()  # what a COMMIT was about whose answer was lost
        self._settling: asyncio.Task[None] | None = None
        self.load: Counter[str] = Counter()
        """How many results of each sender wait: they take room as what is being sent does."""
        self.hindered = False
        """Whether the database did not take the last ones."""

    def add(self, sender: str, result: Settlement, *, stream: str) -> None:
        """Take over the result of an attempt, and settle it together with what else there is."""
        self._results[result.id, result.token] = _Result(sender, stream, result)
        self.load[sender] += 1
        self.begin()

    def begin(self) -> asyncio.Task[None]:
        """Settle what there is, in the background. The next step hears of it if that fails."""
        if self._settling is None or self._settling.done():
            self._settling = asyncio.ensure_future(self._settle_all())
            self._settling.add_done_callback(_look_at)
        return self._settling

    async def settle(self) -> None:
        """Settle what there is. Only one settle is under way at a time: two would settle the same results twice.

        What comes meanwhile shares the next batch.
        """
        await asyncio.shield(self.begin())

    async def _settle_all(self) -> None:
        try:
            while self._results:
                await self._look_up()
                await self._settle_some([one.settlement for one in islice(self._results.values(), SETTLE_MAX)])
        except Exception:
            self.hindered = True
            raise
        self.hindered = False

    async def _settle_some(self, batch: list[Settlement]) -> None:
        try:
            await self._settle_group(batch)
        except Exception as error:
            if is_away(error):
                raise
            await self._settle_singly(batch)

    async def _settle_group(self, batch: list[Settlement]) -> None:
        settled = await self._settle(batch)
        failpoint("dispatch.after_settle")
        self._parts.wakeups.announce(self._news(batch, settled))
        if settled:
            self._forget(batch)
        for one in settled:
            count_end(self._parts, one)
        self._tell(any(one.status == Status.PENDING for one in settled))

    def _news(self, batch: list[Settlement], settled: Sequence[Settled]) -> set[Topic]:
        """The loops that have work now: outcomes are events, the end of a dispatch may be an alert or free its lane."""
        ended = [one for one, end in zip(batch, settled, strict=False) if end.status != Status.PENDING]
        told = any(self._results[one.id, one.token].stream for one in ended)
        freed = any(one.lane is not None for one in ended)
        # What a gate has held up may go: a probe has reached its destination.
        opened = any(one.probe and one.result not in ("unreachable", "cut_short") for one in batch)
        died = any(one.status in (Status.DEAD_LETTER, Status.EXPIRED) for one in settled)
        return {*(("turns",) if told else ()), *(("sends",) if freed or opened else ()), *(("timers",) if died else ())}

    async def _settle_singly(self, batch: list[Settlement]) -> None:
        """One by one what the database has refused together: a result that it refuses must hold up no other.

        Such a result is let go when others go through, or else when its lease is over: it then counts as an
        attempt whose claimant was lost. Until then nothing new is sent.
        """
        refused: dict[str, Exception] = {}
        for each in batch:
            try:
                await self._settle_group([each])
            except Exception as error:
                if is_away(error):
                    raise
                refused[each.id] = error
                self._refused.setdefault((each.id, each.token), self._parts.database.clock.monotonic())
        left = [each for each in batch if each.id in refused]
        now = self._parts.database.clock.monotonic()
        over = [each for each in left if now - self._refused[each.id, each.token] >= each.policy.lease]
        let_go = left if len(left) < len(batch) else over
        for each in let_go:
            said = safe_error(refused[each.id])
            logger.error("the result of dispatch %s is refused; its lease will free it: %s", each.id, said)
        self._forget(let_go)
        if len(let_go) < len(left):
            raise refused[left[0].id]

    def _forget(self, batch: list[Settlement]) -> None:
        for one in batch:
            claim = (one.id, one.token)
            self.load[self._results.pop(claim).sender] -= 1
            self._refused.pop(claim, None)

    async def _settle(self, batch: list[Settlement]) -> list[Settled]:
        database = self._parts.database
        lock = partial(dispatches.lock, settlements=batch)
        try:
            return await database.atransact(dispatches.settle, batch, lock=lock, urgent=True)
        except CommitUnknown:
            self._unknown.update((one.id, one.token) for one in batch)
            await self._look_up()
            return []

    async def _look_up(self) -> None:
        """Let go of what a COMMIT without an answer has settled.

        Before that is known nothing is settled: what was settled once more would look like a late claimant's.
        """
        asked = [self._results[claim].settlement for claim in sorted(self._unknown) if claim in self._results]
        if asked:
            left = await self._parts.database.aread(dispatches.unsettled, asked)
            self._unknown.clear()
            self._parts.wakeups.announce(("turns", "timers"))
            self._forget([one for one in asked if one.id not in left])


def _look_at(settling: asyncio.Task[None]) -> None:
    if not settling.cancelled() and (error := settling.exception()) is not None:
        # The next step settles first, and reports what hinders it.
        logger.debug("results could not be settled yet: %s", error)


_COUNTED: Mapping[str, str] = {
    Status.DEAD_LETTER: "dead_letter",
    Status.EXPIRED: "expired",
}


def count_end(parts: Parts, settled: Settled) -> None:
    """Count what became of a dispatch and tell the observers; what waits for its acknowledgement was delivered."""
    sent = settled.reason == Reason.TRANSPORT_OK
    name = "stale" if settled.stale else "delivered" if sent else _COUNTED.get(settled.status, "retried")
    parts.count(name)
    parts.telemetry.emit(
        "dispatch.settled",
        id=settled.id,
        status=settled.status,
        reason=settled.reason,
        stale=settled.stale,
    )
