"""The worker: claims streams, lets handlers decide, commits each decision whole."""

import asyncio
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection

from postroad.engine.answers import Answers
from postroad.engine.calls import Abort
from postroad.engine.declarations import Decider
from postroad.engine.endings import STOPPED, answer
from postroad.engine.loop import AT_ONCE, Loop, Parts, Step, waited_little
from postroad.engine.reports import lands
from postroad.engine.run import Run
from postroad.model import ids
from postroad.model.errors import CommitUnknown
from postroad.model.failpoints import failpoint
from postroad.model.ids import stream_type
from postroad.model.rows import ClaimedTurns, Hold, TurnClaim, TurnCommit
from postroad.store import due, queues, stopping

SET_MAX = 100
RECORDED_MAX = 64
SEVERAL = 3


def claim_all(
    conn: Connection,
    wants: Sequence[tuple[Decider, int, str, bool]],
    *,
    token: str,
    asked: int,
    now: int,
) -> dict[str, ClaimedTurns]:
    """Claim for each stream type at most as many streams as can start at once, in one transaction.

    `wants`: per type the decider, the free capacity, the walk's cursor, and whether expired claims may be taken
    over. That was decided at `asked`: if this transaction had to wait since, others have waited too, and nothing
    is taken over.
    """
    idle = _idle(conn, [decider.stream_type for decider, *_ in wants], now=now)
    return {
        decider.stream_type: ClaimedTurns([], clogged=False, cursor=cursor)
        if decider.stream_type in idle
        else queues.claim(
            conn,
            stream_type=decider.stream_type,
            token=token,
            limit=free,
            batch=SET_MAX,
            lease=decider.lease,
            cursor=cursor,
            debounce=decider.debounce,
            debounce_max=decider.debounce_max,
            takeover=takeover and waited_little(asked, now, decider.lease),
            now=now,
        )
        for decider, free, cursor, takeover in wants
    }


def _idle(conn: Connection, types: Sequence[str], *, now: int) -> frozenset[str]:
    """Of several stream types those that have nothing to take: asking for all of them costs less than two claims."""
    found = due.streams(conn, types) if len(types) >= SEVERAL else {}
    return frozenset(name for name, one in found.items() if one.at is None or one.at > now)


class Worker(Loop):
    """Turns of the stream types that this app decides for."""

    name = "worker"
    topics = ("turns",)

    def __init__(self, parts: Parts, *, interval: int | None = None) -> None:
        super().__init__(parts, interval=interval)
        self._running: dict[str, dict[str, asyncio.Task[None]]] = {name: {} for name in parts.registry.deciders}
        self._aborts: dict[str, Abort] = {}
        self._cursors: dict[str, str] = dict.fromkeys(parts.registry.deciders, "")
        # A turn whose claimant died runs with no other beside it before it may reach its cap: user code that
        # takes the whole process down must not take its neighbours' attempts along. Only one at a time is kept
        # for that, and nothing is claimed beside it: what has not begun must not count as an attempt.
        self._solitary: list[TurnClaim] = []
        self._alone = ""
        self._answers = Answers(parts)
        self._unanswered: list[str] = []
        self._looked = parts.database.clock.monotonic()  # for turns that people have stopped
        self._asked = False

    def leases(self) -> Iterable[int]:
        return (decider.lease for decider in self.parts.registry.deciders.values())

    async def due(self) -> int | None:
        if self._solitary or self._unanswered:
            return AT_ONCE
        wanted = {decider.stream_type for decider, *_ in self._wants()}
        found = await self._read(due.streams, list(self.parts.registry.deciders))
        self._asked = True
        if any(of_type.stopped for of_type in found.values()):
            await self._see_to_stops()
        return min((one.at for kind, one in found.items() if kind in wanted and one.at is not None), default=None)

    async def step(self) -> Step:
        self.stalls.look()
        await self._see_to_stops_sometimes()
        if self._alone:
            return Step.NOTHING
        if self._solitary:
            await self._start_solitary()
            return Step.NOTHING
        wants = self._wants()
        if not wants:
            return Step.NOTHING
        token = self.parts.entropy.token()
        await self._give_back()
        try:
            claimed = await self.parts.database.atransact(
                claim_all, wants, token=token, asked=self.parts.database.clock.wall()
            )
        except CommitUnknown:
            self._unanswered.append(token)
            raise
        self.stalls.answered()
        failpoint("turn.after_claim_commit")
        claims = [claim for found in claimed.values() for claim in found.claims]
        for name, found in claimed.items():
            self._cursors[name] = found.cursor
            if found.clogged:
                await self.parts.database.atransact(queues.adopt, stream_type=name)
        await self._begin(claims)
        if not claims:
            return Step.NOTHING
        full = any(len(claimed[decider.stream_type].claims) >= free for decider, free, *_ in wants)
        return Step.MORE if full or any(found.clogged for found in claimed.values()) else Step.SOME

    async def _see_to_stops_sometimes(self) -> None:
        """Before a step that nothing was asked for: one that knows that there is more to do looks only now and then."""
        asked, self._asked = self._asked, False
        busy = self._certain and self.parts.database.clock.monotonic() < self._looked + self.interval
        if not asked and not busy:
            await self._see_to_stops()

    async def _see_to_stops(self) -> None:
        """End the turns that people have stopped, wherever they are."""
        database = self.parts.database
        self._looked = database.clock.monotonic()
        idle = []
        for asked in await database.aread(stopping.asked, list(self.parts.registry.deciders)):
            if asked.claim_token is None:
                idle.append(asked.stream)
            elif (abort := self._aborts.get(ids.run_id(asked.claim_token, asked.stream))) is not None:
                _set(abort, STOPPED)
        if idle:
            await database.atransact(stopping.hurry, idle)

    async def _give_back(self) -> None:
        """Claims whose COMMIT was not answered: whether they happened or not, nothing of them has begun."""
        while self._unanswered:
            await self.parts.database.atransact(queues.release_all, self._unanswered[0])
            del self._unanswered[0]

    async def finish(self) -> None:
        while tasks := [task for table in self._running.values() for task in table.values()]:
            await asyncio.wait(tasks)
        await self.parts.partials.finish()
        if self._solitary and not self._running_count():
            await self._start_solitary()
            await self.finish()

    def abandon(self, why: str) -> None:
        for abort in list(self._aborts.values()):
            if not abort.done():
                abort.set_result(why)

    def _wants(self) -> list[tuple[Decider, int, str, bool]]:
        wants = []
        for name, decider in self.parts.registry.deciders.items():
            free = RECORDED_MAX if decider.fn is None else decider.concurrency - len(self._running[name])
            if free > 0:
                wants.append((decider, free, self._cursors[name], self.stalls.may_take_over(decider.lease)))
        return wants

    def _running_count(self) -> int:
        return sum(len(table) for table in self._running.values())

    async def _begin(self, claims: Sequence[TurnClaim]) -> None:
        answered: list[TurnCommit] = []
        for claim in claims:
            decider = self._decider(claim)
            landing = lands(claim, decider)
            if decider.fn is None or (landing and not claim.again):
                answered.append(answer(claim, claim.events, {}))
                continue
            self._keep(claim, decider)
            if not landing and claim.interrupted and decider.attempts <= claim.attempt and claim.attempt > 1:
                self._solitary.append(claim)
            else:
                self._start(claim)
        if answered:
            await self._answers.commit(answered)
        if self._solitary:
            await self._start_solitary()

    def _decider(self, claim: TurnClaim) -> Decider:
        return self.parts.registry.deciders[stream_type(claim.stream)]

    def _keep(self, claim: TurnClaim, decider: Decider) -> None:
        loop = asyncio.get_running_loop()
        abort: Abort = loop.create_future()
        self._aborts[claim.run_id] = abort

        def lost() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_set, abort, "lease lost")

        hold = Hold(claim.stream, claim.token)
        self.parts.keeper.hold(hold, lease=decider.lease, timeout=decider.timeout, lost=lost)

    async def _start_solitary(self) -> None:
        """Begin the first of those that run alone, once nothing else runs; none of the others has begun then."""
        first, *others = self._solitary
        if others:
            for claim in others:
                self._forget(claim)
            await self.parts.database.atransact(queues.put_back, [Hold(c.stream, c.token) for c in others])
            self._solitary = [first]
        if not self._running_count():
            self._solitary = []
            self._alone = first.run_id
            self._start(first)

    def _start(self, claim: TurnClaim) -> None:
        table = self._running[stream_type(claim.stream)]
        decider = self._decider(claim)
        run = Run(self.parts, decider, claim, self._aborts[claim.run_id], self._answers)
        task = asyncio.ensure_future(run.carry_out())
        table[claim.run_id] = task

        def done(_: asyncio.Task[None]) -> None:
            # There was no room for another turn of this type, or nothing runs beside this one.
            crowded = len(table) >= decider.concurrency or bool(self._alone)
            table.pop(claim.run_id, None)
            if self._alone == claim.run_id:
                self._alone = ""
            self._forget(claim)
            if crowded or self._solitary:
                self.wake()

        task.add_done_callback(done)

    def _forget(self, claim: TurnClaim) -> None:
        self._aborts.pop(claim.run_id, None)
        self.parts.partials.let_go(claim)
        self.parts.keeper.let_go(Hold(claim.stream, claim.token))


def _set(abort: Abort, why: str) -> None:
    if not abort.done():
        abort.set_result(why)
