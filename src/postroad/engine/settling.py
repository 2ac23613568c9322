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
_Key = tuple[str, str, bool]  # a dispatch's id, the claim's token, and whether it is what came after the claim's end


class _Result(NamedTuple):
    sender: str
    stream: str  # '': its outcome is no event
    settlement: Settlement
    late: bool

    @property
    def key(self) -> _Key:
        return self.settlement.id, self.settlement.token, self.late


class Settler:
    """Holds the results of attempts until they are settled, and settles those that are there together.

    `settled` is called whenever there is room again for others, with whether some of them are to be sent again.
    """

    def __init__(self, parts: Parts, settled: Callable[[bool], None]) -> None:
        self._parts = parts
        self._tell = settled
        self._results: dict[_Key, _Result] = {}
        self._refused: dict[_Key, int] = {}  # since when the database refuses a result
        self._unknown: set[_Key] = set()  # what a COMMIT was about whose answer was lost
        self._settling: asyncio.Task[None] | None = None
        self.load: Counter[str] = Counter()
        """How many results of each sender wait: they take room as what is being sent does."""
        self.hindered = False
        """Whether the database did not take the last ones."""

    def add(self, sender: str, result: Settlement, *, stream: str, late: bool = False) -> None:
        """Take over the result of an attempt, and settle it together with what else there is.

        `late`: what became of one that was given up. It comes behind that end, so that it is a word in the history.
        """
        taken = _Result(sender, stream, result, late)
        self._results[taken.key] = taken
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
                await self._settle_some(list(islice(self._results.values(), SETTLE_MAX)))
        except Exception:
            self.hindered = True
            raise
        self.hindered = False

    async def _settle_some(self, batch: list[_Result]) -> None:
        try:
            await self._settle_group(batch)
        except Exception as error:
            if is_away(error):
                raise
            await self._settle_singly(batch)

    async def _settle_group(self, batch: list[_Result]) -> None:
        settled = await self._settle(batch)
        failpoint("dispatch.after_settle")
        self._parts.wakeups.announce(_news(batch, settled))
        if settled:
            self._forget(batch)
        for one in settled:
            count_end(self._parts, one)
        self._tell(any(one.status == Status.PENDING for one in settled))

    async def _settle_singly(self, batch: list[_Result]) -> None:
        """One by one what the database has refused together: a result that it refuses must hold up no other.

        Such a result is let go when others go through, or else when its lease is over: it then counts as an
        attempt whose claimant was lost. Until then nothing new is sent.
        """
        refused: dict[_Key, Exception] = {}
        for each in batch:
            try:
                await self._settle_group([each])
            except Exception as error:
                if is_away(error):
                    raise
                refused[each.key] = error
                self._refused.setdefault(each.key, self._parts.database.clock.monotonic())
        left = [each for each in batch if each.key in refused]
        now = self._parts.database.clock.monotonic()
        over = [each for each in left if now - self._refused[each.key] >= each.settlement.policy.lease]
        let_go = left if len(left) < len(batch) else over
        for each in let_go:
            said = safe_error(refused[each.key])
            logger.error("the result of dispatch %s is refused; its lease will free it: %s", each.settlement.id, said)
        self._forget(let_go)
        if len(let_go) < len(left):
            raise refused[left[0].key]

    def _forget(self, batch: Sequence[_Result]) -> None:
        for one in batch:
            self.load[self._results.pop(one.key).sender] -= 1
            self._refused.pop(one.key, None)

    async def _settle(self, batch: list[_Result]) -> list[Settled]:
        database, asked = self._parts.database, _settlements(batch)
        lock = partial(dispatches.lock, settlements=asked)
        try:
            return await database.atransact(dispatches.settle, asked, lock=lock, urgent=True)
        except CommitUnknown:
            self._unknown.update(one.key for one in batch)
            await self._look_up()
            return []

    async def _look_up(self) -> None:
        """Let go of what a COMMIT without an answer has settled.

        Before that is known nothing is settled: what was settled once more would look like a late claimant's.
        """
        asked = [self._results[key] for key in sorted(self._unknown) if key in self._results]
        if asked:
            left = await self._left(asked)
            self._unknown.clear()
            self._parts.wakeups.announce(("turns", "timers"))
            self._forget([one for one in asked if one.key not in left])

    async def _left(self, asked: Sequence[_Result]) -> set[_Key]:
        """What of these was not settled: of what came late the history tells, of the others their claims."""
        late, database = [one for one in asked if one.late], self._parts.database
        held = await database.aread(dispatches.unsettled, _settlements([one for one in asked if not one.late]))
        unheard = await database.aread(dispatches.unheard, _settlements(late)) if late else set()
        return {one.key for one in asked if one.settlement.id in (unheard if one.late else held)}


def _settlements(batch: Sequence[_Result]) -> list[Settlement]:
    return [one.settlement for one in batch]


def _news(batch: Sequence[_Result], settled: Sequence[Settled]) -> set[Topic]:
    """The loops that have work now: outcomes are events, the end of a dispatch may be an alert or free its lane."""
    ends = list(zip(batch, settled, strict=False))
    told = any(one.stream and (end.stale or end.status != Status.PENDING) for one, end in ends)
    freed = any(one.settlement.lane is not None and end.status != Status.PENDING for one, end in ends)
    # What a gate has held up may go: a probe has reached its destination.
    opened = any(one.probe and one.result not in ("unreachable", "cut_short") for one in _settlements(batch))
    died = any(end.status in (Status.DEAD_LETTER, Status.EXPIRED) for end in settled)
    return {*(("turns",) if told else ()), *(("sends",) if freed or opened else ()), *(("timers",) if died else ())}


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
