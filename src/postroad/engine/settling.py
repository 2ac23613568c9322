"""Settling what attempts came to: in groups, under their claims' tokens, before anything new is sent."""

import asyncio
from collections.abc import Mapping
from functools import partial

from postroad.engine.loop import Parts
from postroad.engine.telemetry import logger
from postroad.model.errors import CommitUnknown
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import Status
from postroad.model.payload import safe_error
from postroad.model.rows import Settled, Settlement
from postroad.store import settle as dispatches
from postroad.store.dialects import is_away

SETTLE_MAX = 200


class Settler:
    """Holds the results of attempts until they are settled, and settles those that are there together."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._results: list[Settlement] = []
        self._refused: dict[tuple[str, str], int] = {}  # since when the database refuses a result, by id and token
        self._settling: asyncio.Task[None] | None = None

    def add(self, result: Settlement) -> None:
        """Take over an attempt's result."""
        self._results.append(result)

    async def settle(self) -> None:
        """Settle what there is. Only one settle is under way at a time: two would settle the same results twice.

        What comes meanwhile shares the next batch.
        """
        if self._settling is None or self._settling.done():
            self._settling = asyncio.ensure_future(self._settle_all())
        await asyncio.shield(self._settling)

    async def settle_with_others(self) -> None:
        """`settle`, for a sender's task that has nobody to tell when the database is away."""
        try:
            await self.settle()
        except Exception as error:
            # The next step settles first, and reports what hinders it.
            logger.debug("%d results could not be settled yet: %s", len(self._results), error)

    async def _settle_all(self) -> None:
        while self._results:
            batch = self._results[:SETTLE_MAX]
            try:
                await self._settle_group(batch)
            except Exception as error:
                if is_away(error):
                    raise
                await self._settle_singly(batch)

    async def _settle_group(self, batch: list[Settlement]) -> None:
        settled = await self._settle(batch)
        failpoint("dispatch.after_settle")
        if settled:
            self._forget(batch)
        for one in settled:
            count_end(self._parts, one)
        self._parts.wakeups.announce(("turns", "timers"))

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
        done = {(one.id, one.token) for one in batch}
        self._results = [one for one in self._results if (one.id, one.token) not in done]
        for one in done:
            self._refused.pop(one, None)

    async def _settle(self, batch: list[Settlement]) -> list[Settled]:
        database = self._parts.database
        lock = partial(dispatches.lock, settlements=batch)
        try:
            return await database.atransact(dispatches.settle, batch, lock=lock, urgent=True)
        except CommitUnknown:
            # What has happened must not be settled again: it would look like a late claimant's.
            asked = {(one.id, one.token) for one in batch}
            left = await database.aread(dispatches.unsettled, batch)
            self._results = [one for one in self._results if (one.id, one.token) not in asked or one.id in left]
            return []


_COUNTED: Mapping[str, str] = {
    Status.DELIVERED: "delivered",
    Status.DEAD_LETTER: "dead_letter",
    Status.EXPIRED: "expired",
}


def count_end(parts: Parts, settled: Settled) -> None:
    """Count what became of a dispatch and tell the observers."""
    name = "stale" if settled.stale else _COUNTED.get(settled.status, "retried")
    parts.count(name)
    parts.telemetry.emit(
        "dispatch.settled",
        id=settled.id,
        status=settled.status,
        reason=settled.reason,
        stale=settled.stale,
    )
