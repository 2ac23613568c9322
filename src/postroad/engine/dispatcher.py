"""The dispatcher: claims due dispatches, has their senders carry them out, settles what came of it."""

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, assert_never

import msgspec
from sqlalchemy import Connection

from postroad.engine.calls import Abort, Aborted, CallResult, Raised, Returned, TimedOut, contained
from postroad.engine.declarations import KILL_GRACE, LEASE_MARGIN, Sender
from postroad.engine.loop import Loop, Parts, waited_little
from postroad.engine.telemetry import logger
from postroad.model.clock import SECOND, moment
from postroad.model.dispatches import Dispatch, Receipt
from postroad.model.errors import CommitUnknown, GiveUp, OutcomeUnknown, RetryLater
from postroad.model.failpoints import failpoint
from postroad.model.lifecycle import Result, Status
from postroad.model.payload import encode, safe_error
from postroad.model.retry import floor_of
from postroad.model.rows import ClaimedDispatches, DispatchClaim, Hold, Settled, Settlement
from postroad.store import dispatch_claims, settle
from postroad.store.dialects import is_away

SETTLE_MAX = 200


def claim_due(
    conn: Connection, wants: Sequence[tuple[Sender, int, bool]], *, token: str, asked: int, now: int
) -> list[ClaimedDispatches]:
    """Claim of each kind that has due rows at most as many as can start at once, in one transaction.

    `wants`: per kind its sender, the free capacity, and whether expired claims may be taken over. That was
    decided at `asked`: if this transaction had to wait since, others have waited too, and nothing is taken over.
    """
    wants = [(s, free, takeover and waited_little(asked, now, s.policy.lease)) for s, free, takeover in wants]
    names = [name for sender, _, _ in wants for name in sender.kind.names]
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
        self._results: list[Settlement] = []
        self._refused: dict[tuple[str, str], int] = {}  # since when the database refuses a result, by id and token
        self._settling: asyncio.Task[None] | None = None
        self._unanswered: tuple[str, int] | None = None

    def leases(self) -> Iterable[int]:
        return (sender.policy.lease for sender in self.parts.registry.senders.values())

    async def step(self) -> bool:
        # What was sent comes first: while settling is impossible nothing new is sent.
        await self._settle_waiting()
        self.stalls.look()
        wants = self._wants()
        if not wants:
            return False
        # The token and when it was used: a claim whose COMMIT was not answered is looked up, not made again.
        token, asked = self._unanswered or (self.parts.entropy.token(), self.parts.database.clock.monotonic())
        claimed = await (self._look_up(token) if self._unanswered else self._claim(wants, token, asked))
        self._unanswered = None
        self.stalls.answered()
        failpoint("dispatch.after_claim_commit")
        for claim in claimed:
            self._start(claim, asked)
        return bool(claimed)

    async def finish(self) -> None:
        while tasks := [task for table in self._sending.values() for task in table.values()]:
            await asyncio.wait(tasks)
        await self._settle_waiting()

    def abandon(self, why: str) -> None:
        for abort in list(self._aborts.values()):
            if not abort.done():
                abort.set_result(why)

    def _wants(self) -> list[tuple[Sender, int, bool]]:
        return [
            (sender, free, self.stalls.may_take_over(sender.policy.lease))
            for name, sender in self._senders.items()
            if (free := sender.concurrency - len(self._sending[name])) > 0
        ]

    async def _claim(self, wants: list[tuple[Sender, int, bool]], token: str, asked: int) -> list[DispatchClaim]:
        database = self.parts.database
        try:
            found = await database.atransact(claim_due, wants, token=token, asked=database.clock.wall())
        except CommitUnknown:
            self._unanswered = (token, asked)
            return await self._look_up(token)
        for ended in (row for one in found for row in one.ended):
            self._ended(ended)
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
            self.wake()

        task.add_done_callback(done)

    async def _send(self, claim: DispatchClaim, sender: Sender, asked: int) -> None:
        self.parts.count("attempted")
        if not await self._still_ours(claim, sender, asked):
            return
        failpoint("dispatch.before_send")
        result = await self._carry_out(claim, sender)
        failpoint("dispatch.after_send")
        self._results.append(self._judge(claim, sender, result))
        await self._settle_quietly()

    async def _still_ours(self, claim: DispatchClaim, sender: Sender, asked: int) -> bool:
        """A claim that has waited is looked at again; one that no attempt fits into any more is given back."""
        waited = self.parts.database.clock.monotonic() - asked
        if waited <= claim_margin(sender) and waited <= sender.policy.lease // 6:
            return True
        hold = Hold(claim.id, claim.token)
        if waited > claim_margin(sender):
            await self.parts.database.atransact(dispatch_claims.release, [hold])
            return False
        return bool(await self.parts.database.atransact(dispatch_claims.recheck, [hold]))

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

    async def _settle_waiting(self) -> None:
        """Settle what there is. Only one settle is under way at a time: two would settle the same results twice.

        What comes meanwhile shares the next batch.
        """
        if self._settling is None or self._settling.done():
            self._settling = asyncio.ensure_future(self._settle_all())
        await asyncio.shield(self._settling)

    async def _settle_quietly(self) -> None:
        try:
            await self._settle_waiting()
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
            self._ended(one)
        self.parts.wakeups.announce(("turns", "timers"))

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
                self._refused.setdefault((each.id, each.token), self.parts.database.clock.monotonic())
        left = [each for each in batch if each.id in refused]
        now = self.parts.database.clock.monotonic()
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
        database = self.parts.database
        lock = partial(settle.lock, settlements=batch)
        try:
            return await database.atransact(settle.settle, batch, lock=lock, urgent=True)
        except CommitUnknown:
            # What has happened must not be settled again: it would look like a late claimant's.
            asked = {(one.id, one.token) for one in batch}
            left = await database.aread(settle.unsettled, batch)
            self._results = [one for one in self._results if (one.id, one.token) not in asked or one.id in left]
            return []

    def _ended(self, settled: Settled) -> None:
        name = "stale" if settled.stale else _COUNTED.get(settled.status, "retried")
        self.parts.count(name)
        self.parts.telemetry.emit(
            "dispatch.settled",
            id=settled.id,
            status=settled.status,
            reason=settled.reason,
            stale=settled.stale,
        )


_COUNTED: Mapping[str, str] = {
    Status.DELIVERED: "delivered",
    Status.DEAD_LETTER: "dead_letter",
    Status.EXPIRED: "expired",
}


def claim_margin(sender: Sender) -> int:
    """How long after its claim an attempt may still begin, so that it ends well inside the lease."""
    return sender.policy.lease - sender.timeout - KILL_GRACE - LEASE_MARGIN


def judge(result: CallResult, sender: Sender) -> tuple[Result, str, str | None, int]:
    """What an attempt came to: the result, the error's text, the receipt, and a Retry-After in microseconds."""
    unknown: Result = "unknown" if sender.on_unknown == "park" else "failed"
    match result:
        case Returned(None):
            return "ok", "", None, 0
        case Returned(str() as reference):
            return "ok", "", _receipt(Receipt(reference)), 0
        case Returned(Receipt() as receipt):
            return "ok", "", _receipt(receipt), 0
        case Returned(value):
            if inspect.iscoroutine(value):
                value.close()  # never awaited, so it has sent nothing
            return (
                "failed",
                f"the sender returned {type(value).__name__}; success is Receipt, str or None",
                None,
                0,
            )
        case Raised(RetryLater() as error):
            return "failed", safe_error(error), None, floor_of(error.after)
        case Raised(GiveUp() as error):
            return "permanent", safe_error(error), None, 0
        case Raised(OutcomeUnknown() as error):
            return unknown, safe_error(error), None, 0
        case Raised(error):
            return "failed", safe_error(error), None, 0
        case TimedOut(stuck):
            said = f"timeout after {sender.timeout / SECOND:g} s" + (", still running" if stuck else "")
            return unknown, said, None, 0
        case Aborted(why):
            cut: Result = unknown if sender.on_unknown == "park" else "cut_short"
            return cut, f"ended while sending: {why}", None, 0
        case _:
            assert_never(result)


def _receipt(receipt: Receipt) -> str:
    """What the provider said, as it can be stored; a provider's odd text must not undo a success."""
    try:
        return encode({"reference": receipt.reference, "data": dict(receipt.data)}, "receipt", bytes_max=64 * 1024)
    except Exception as error:
        return encode({"reference": safe_error(receipt.reference, 500), "error": safe_error(error, 500)}, "receipt")
