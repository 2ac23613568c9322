"""The dispatcher: claims due dispatches, has their senders carry them out, and hands over what came of it."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from postroad.engine.calls import Abort, CallResult, Raised, contained
from postroad.engine.declarations import KILL_GRACE, LEASE_MARGIN, Sender
from postroad.engine.loop import AT_ONCE, Loop, Parts, Step, waited_little
from postroad.engine.settling import Settler, count_end
from postroad.engine.telemetry import logger
from postroad.engine.verdicts import judge
from postroad.model.clock import moment
from postroad.model.dispatches import Dispatch
from postroad.model.errors import CommitUnknown
from postroad.model.failpoints import failpoint
from postroad.model.rows import ClaimedDispatches, DispatchClaim, Hold, Settlement
from postroad.store import dispatch_claims, due


def claim_due(
    conn: Connection, wants: Sequence[tuple[Sender, int, bool]], *, token: str, asked: int, now: int
) -> list[ClaimedDispatches]:
    """Claim of each kind that has due rows at most as many as can start at once, in one transaction.

    `wants`: per kind its sender, the free capacity, and whether expired claims may be taken over. That was
    decided at `asked`: if this transaction had to wait since, others have waited too, and nothing is taken over.
    """
    wants = [(s, free, takeover and waited_little(asked, now, s.policy.lease)) for s, free, takeover in wants]
    names = [name for sender, _, _ in wants for name in sender.kind.names]
    due = set(names)
    if len(names) > 1:
        due = set(dispatch_claims.due_kinds(conn, names, takeover=any(t for _, _, t in wants), now=now))
    return [
        dispatch_claims.claim(conn, sender.policy, names=ready, token=token, limit=free, takeover=takeover, now=now)
        for sender, free, takeover in wants
        if (ready := [name for name in sender.kind.names if name in due])
    ]


class Dispatcher(Loop):
    """Sends of the kinds that this app carries out."""

    name = "dispatcher"
    topics = ("sends",)

    def __init__(self, parts: Parts, *, interval: int | None = None) -> None:
        super().__init__(parts, interval=interval)
        self._senders = {sender.kind.name: sender for sender in parts.registry.senders.values()}
        self._sending: dict[str, dict[str, asyncio.Task[None]]] = {name: {} for name in self._senders}
        self._aborts: dict[str, Abort] = {}
        self._settler = Settler(parts, self._room)
        self._crowded = False
        self._unanswered: tuple[str, int] | None = None

    def leases(self) -> Iterable[int]:
        return (sender.policy.lease for sender in self.parts.registry.senders.values())

    async def due(self) -> int | None:
        if self._settler.hindered or self._unanswered:
            return AT_ONCE
        self._look_for_room()
        names = [name for sender, *_ in self._wants() for name in sender.kind.names]
        return await self.parts.database.aread(due.sends, names) if names else None

    async def step(self) -> Step:
        # What was sent comes first: while settling is impossible nothing new is sent.
        if self._settler.hindered:
            await self._settler.settle()
        self.stalls.look()
        wants = self._wants()
        if not wants:
            return Step.NOTHING
        # The token and when it was used: a claim whose COMMIT was not answered is looked up, not made again.
        token, asked = self._unanswered or (self.parts.entropy.token(), self.parts.database.clock.monotonic())
        claimed = await (self._look_up(token) if self._unanswered else self._claim(wants, token, asked))
        self._unanswered = None
        self.stalls.answered()
        failpoint("dispatch.after_claim_commit")
        for claim in claimed:
            self._start(claim, asked)
        if not claimed:
            return Step.NOTHING
        return Step.MORE if self._look_for_room() else Step.SOME

    def _busy(self, name: str, concurrency: int) -> int:
        """How much of a sender's room is taken.

        While results are settled others are sent, but never are there more results than sends.
        """
        return len(self._sending[name]) + max(0, self._settler.load[name] - concurrency)

    def _look_for_room(self) -> bool:
        """Whether some kind has no room for another send, so that the end of one is news."""
        self._crowded = len(self._wants()) < len(self._senders)
        return self._crowded

    def _room(self, again: bool = False) -> None:
        """There may be room for another send, or (`again`) another time at which one is due."""
        if self._crowded or again:
            self.wake()

    async def finish(self) -> None:
        while tasks := [task for table in self._sending.values() for task in table.values()]:
            await asyncio.wait(tasks)
        await self._settler.settle()

    def abandon(self, why: str) -> None:
        for abort in list(self._aborts.values()):
            if not abort.done():
                abort.set_result(why)

    def _wants(self) -> list[tuple[Sender, int, bool]]:
        return [
            (sender, free, self.stalls.may_take_over(sender.policy.lease))
            for name, sender in self._senders.items()
            if (free := sender.concurrency - self._busy(name, sender.concurrency)) > 0
        ]

    async def _claim(self, wants: list[tuple[Sender, int, bool]], token: str, asked: int) -> list[DispatchClaim]:
        database = self.parts.database
        try:
            found = await database.atransact(claim_due, wants, token=token, asked=database.clock.wall())
        except CommitUnknown:
            self._unanswered = (token, asked)
            return await self._look_up(token)
        for ended in (row for one in found for row in one.ended):
            count_end(self.parts, ended)
            self.parts.wakeups.announce(("turns", "timers"))
        return [claim for one in found for claim in one.claims]

    async def _look_up(self, token: str) -> list[DispatchClaim]:
        return await self.parts.database.aread(dispatch_claims.lookup, token)

    def _start(self, claim: DispatchClaim, asked: int) -> None:
        sender = self.parts.registry.senders[claim.kind]
        table = self._sending[sender.kind.name]
        self._aborts[claim.id] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._send(claim, sender, asked))
        table[claim.id] = task

        def done(finished: asyncio.Task[None]) -> None:
            table.pop(claim.id, None)
            self._aborts.pop(claim.id, None)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                logger.error("dispatch %s could not be ended; its lease will free it", claim.id, exc_info=error)
            self._room()

        task.add_done_callback(done)

    async def _send(self, claim: DispatchClaim, sender: Sender, asked: int) -> None:
        self.parts.count("attempted")
        if not await self._still_ours(claim, sender, asked):
            self.wake()
            return
        failpoint("dispatch.before_send")
        result = await self._carry_out(claim, sender)
        failpoint("dispatch.after_send")
        self._settler.add(sender.kind.name, self._judge(claim, sender, result), stream=claim.stream)

    async def _still_ours(self, claim: DispatchClaim, sender: Sender, asked: int) -> bool:
        """A claim that has waited is looked at again; one that no attempt fits into any more is given back."""
        waited = self.parts.database.clock.monotonic() - asked
        if waited <= claim_margin(sender) and waited <= sender.policy.lease // 6:
            return True
        fits = waited <= claim_margin(sender)
        check = dispatch_claims.recheck if fits else dispatch_claims.release
        held = bool(await self.parts.database.atransact(check, [Hold(claim.id, claim.token)]))
        if not held:
            self.parts.count("stale")
        return fits and held

    async def _carry_out(self, claim: DispatchClaim, sender: Sender) -> CallResult:
        try:
            body = contained(sender.kind.decode, claim.body, claim.version)
        except Exception as error:
            return Raised(error)
        now = self.parts.database.clock.wall()
        dispatch: Dispatch[Any] = Dispatch(
            id=claim.id,
            key=claim.key,
            kind=claim.kind,
            to=claim.destination,
            body=body,
            attempt=claim.attempt,
            created_at=moment(claim.created_at),
            first_attempt_at=moment(claim.first_attempt_at),
            deadline=moment(now + sender.timeout),
            possible_duplicate=claim.possible_duplicate,
            post=self.parts.post,
            headers=msgspec.json.decode(claim.headers, type=dict[str, str]),
        )
        self.parts.telemetry.emit(
            "dispatch.sending", id=claim.id, kind=claim.kind, attempt=claim.attempt, dispatch=dispatch
        )
        return await self.parts.calls.run(sender.fn, dispatch, timeout=sender.timeout, abort=self._aborts[claim.id])

    def _judge(self, claim: DispatchClaim, sender: Sender, result: CallResult) -> Settlement:
        verdict, said, receipt, floor = judge(result, sender)
        if isinstance(result, Raised) and verdict == "failed":
            self.parts.telemetry.emit("send.raised", id=claim.id, kind=claim.kind, error=result.error)
        return Settlement(
            id=claim.id,
            token=claim.token,
            attempt=claim.attempt,
            epoch=claim.epoch,
            result=verdict,
            policy=sender.policy,
            error=said,
            receipt=receipt,
            floor=floor,
            fraction=self.parts.entropy.fraction(),
        )


def claim_margin(sender: Sender) -> int:
    """How long after its claim an attempt may still begin, so that it ends well inside the lease."""
    return sender.policy.lease - sender.timeout - KILL_GRACE - LEASE_MARGIN
