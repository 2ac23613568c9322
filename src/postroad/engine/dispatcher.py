"""The dispatcher: claims due dispatches, has their senders carry them out, and hands over what came of it."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection

from postroad.engine.calls import Aborted, Call, CallResult, Raised, TimedOut, contained
from postroad.engine.declarations import KILL_GRACE, LEASE_MARGIN, Sender
from postroad.engine.loop import AT_ONCE, Loop, Parts, Step, waited_little
from postroad.engine.settling import Settler, count_end
from postroad.engine.telemetry import logger
from postroad.engine.verdicts import NOT_BEGUN, gate_of, judge, settlement
from postroad.model.clock import SECOND, moment
from postroad.model.dispatches import Dispatch
from postroad.model.errors import CommitUnknown
from postroad.model.failpoints import failpoint
from postroad.model.rows import ClaimedDispatches, DispatchClaim, Hold, HostRoom, Settlement
from postroad.store import dispatch_claims, due, lanes

LANES_SEEN_MAX = 500  # new members of lanes at once, of each kind
HELD_MAX = SECOND
_Attempt = tuple[str, str]  # id and token: a claim of our own that we took over has two


class Want(NamedTuple):
    """A kind that has room: its sender, how many it may start, and whether expired claims may be taken over."""

    sender: Sender
    free: int
    room: HostRoom | None
    takeover: bool

    def waited_little(self, asked: int, now: int) -> bool:
        """Whether a transaction got its lock soon after it was asked for."""
        return waited_little(asked, now, self.sender.policy.lease)


def claim_due(
    conn: Connection, wants: Sequence[Want], *, token: str, asked: int, now: int
) -> dict[str, ClaimedDispatches]:
    """Claim of each kind that has due rows at most as many as can start at once, in one transaction.

    Whether expired claims may be taken over was decided at `asked`: if this transaction had to wait since, others
    have waited too, and nothing is taken over. Kinds come in the order of their names: rates are locked in it.
    """
    wants = [want._replace(takeover=want.takeover and want.waited_little(asked, now)) for want in wants]
    names = [name for want in wants for name in want.sender.kind.names]
    due = set(names)
    if len(names) > 1:
        due = set(dispatch_claims.due_kinds(conn, names, takeover=any(want.takeover for want in wants), now=now))
    found: dict[str, ClaimedDispatches] = {}
    for sender, free, room, takeover in sorted(wants, key=lambda want: want.sender.kind.name):
        ready = [name for name in sender.kind.names if name in due]
        if ready:
            found[sender.kind.name] = dispatch_claims.claim(
                conn, sender.policy, names=ready, token=token, limit=free, room=room, takeover=takeover, now=now
            )
    if not any(one.claims or one.ended for one in found.values()) and lanes.unseen(conn, names):
        found[""] = ClaimedDispatches([], [], True)
    return found


class Dispatcher(Loop):
    """Sends of the kinds that this app carries out."""

    name = "dispatcher"
    topics = ("sends",)

    def __init__(self, parts: Parts, *, interval: int | None = None) -> None:
        super().__init__(parts, interval=interval)
        self._senders = {sender.kind.name: sender for sender in parts.registry.senders.values()}
        # By sender and id; None: an attempt whose call has not begun.
        self._sending: dict[str, dict[_Attempt, Call | None]] = {name: {} for name in self._senders}
        # Of senders with a limit per host: what is being sent to each.
        self._hosts: dict[str, Counter[str]] = {name: Counter() for name in self._senders}
        self._held: dict[str, int] = {}  # senders whose rate holds back the rest, until then
        # Given up, but still running: what they come to is a word in the history, as long as anybody is there for it.
        self._outlived: set[_Attempt] = set()
        self._over = False
        self._left = asyncio.Event()
        self._abandoned = ""
        self._more = False  # whether there are others that may go now
        self._unseen = False  # whether dispatches have joined lanes that no dispatcher has looked at
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
        found = await self._read(due.sends, names) if names else None
        return min((at for at in (found, *self._held.values()) if at is not None), default=None)

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
        self._start(claimed, asked)
        if self._unseen and await self._promote(wants):
            return Step.MORE
        if not claimed:
            return Step.NOTHING
        return Step.MORE if self._look_for_room() or self._more else Step.SOME

    async def _promote(self, wants: Sequence[Want]) -> bool:
        """Give lanes with new members their heads. False: others hold these lanes."""
        kinds = [name for want in wants for name in want.sender.kind.names]
        return await self.parts.database.atransact(lanes.promote, kinds, limit=LANES_SEEN_MAX) > 0

    def _busy(self, name: str, concurrency: int) -> int:
        """How much of a sender's room is taken.

        While results are settled others are sent, but never are there more results than sends.
        """
        return len(self._sending[name]) + max(0, self._settler.load[name] - concurrency)

    def _look_for_room(self) -> bool:
        """Whether some kind has no room for another send, so that the end of one is news."""
        full = sum(self._free(sender) <= 0 for sender in self._senders.values())
        self._crowded = full > 0 or any(
            sender.concurrency_per_host is not None and max(self._hosts[name].values(), default=0) > 0
            for name, sender in self._senders.items()
        )
        return full > 0

    def _room(self, again: bool = False) -> None:
        """There may be room for another send, or (`again`) another time at which one is due."""
        if self._crowded or again:
            self.wake()

    async def finish(self) -> None:
        while any(self._sending.values()):
            self._left = asyncio.Event()  # of this event loop: one drain follows another
            await self._left.wait()
        await self._settler.settle()

    async def linger(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._outlived:
                    self._left = asyncio.Event()
                    await self._left.wait()
        self._over = True
        await self._settler.settle()

    def abandon(self, why: str) -> None:
        self._abandoned = why
        for call in [call for table in self._sending.values() for call in table.values() if call is not None]:
            call.abort(why)

    def _free(self, sender: Sender) -> int:
        return sender.concurrency - self._busy(sender.kind.name, sender.concurrency)

    def _wants(self) -> list[Want]:
        now = self.parts.database.clock.wall()
        self._held = {name: at for name, at in self._held.items() if now < at <= now + HELD_MAX}
        return [
            Want(
                sender,
                free,
                None if (most := sender.concurrency_per_host) is None else HostRoom(most, dict(self._hosts[name])),
                self.stalls.may_take_over(sender.policy.lease),
            )
            for name, sender in self._senders.items()
            if name not in self._held and (free := self._free(sender)) > 0
        ]

    async def _claim(self, wants: list[Want], token: str, asked: int) -> list[DispatchClaim]:
        database = self.parts.database
        try:
            found = await database.atransact(claim_due, wants, token=token, asked=database.clock.wall())
        except CommitUnknown:
            self._unanswered = (token, asked)
            return await self._look_up(token)
        now = database.clock.wall()
        again = {name: one.again_at for name, one in found.items() if one.again_at is not None}
        self._more = any(at <= now for at in again.values())
        # A hint: what is due for another host meanwhile waits no longer than that.
        self._held |= {name: min(at, now + HELD_MAX) for name, at in again.items() if at > now}
        if self._held:
            self._next = min(self._held.values()) - now
        self._unseen = any(one.unseen for one in found.values())
        ended = [row for one in found.values() for row in one.ended]
        for each in ended:
            count_end(self.parts, each)
        if ended:  # the next ones of their lanes may go
            self.parts.wakeups.announce(("turns", "sends", "timers"))
        return [claim for one in found.values() for claim in one.claims]

    async def _look_up(self, token: str) -> list[DispatchClaim]:
        return await self.parts.database.aread(dispatch_claims.lookup, token)

    def _start(self, claims: Sequence[DispatchClaim], asked: int) -> None:
        """Start the attempts of these claims: at once, or after another look at claims that have waited."""
        by_sender: dict[str, list[DispatchClaim]] = {}
        for claim in claims:
            sender = self.parts.registry.senders[claim.kind]
            self.parts.count("attempted")
            self._sending[sender.kind.name][claim.id, claim.token] = None
            if sender.concurrency_per_host is not None and claim.host is not None:
                self._hosts[sender.kind.name][claim.host] += 1
            by_sender.setdefault(sender.kind.name, []).append(claim)
        for name, own in by_sender.items():
            sender = self._senders[name]
            at_once = self._fits(sender, asked, sender.policy.lease // 6)
            if left := self._begin(own, sender) if at_once else own:
                self._look(left, sender, asked)

    def _fits(self, sender: Sender, asked: int, most: int | None = None) -> bool:
        """Whether an attempt whose claim was asked for then may begin, and has waited for at most so long."""
        waited = self.parts.database.clock.monotonic() - asked
        margin = claim_margin(sender)
        return not self._abandoned and waited <= (margin if most is None else min(margin, most))

    def _look(self, claims: Sequence[DispatchClaim], sender: Sender, asked: int) -> None:
        looking = asyncio.ensure_future(self._look_again(claims, sender, asked))
        looking.add_done_callback(partial(self._looked, claims, sender))

    async def _look_again(self, claims: Sequence[DispatchClaim], sender: Sender, asked: int) -> None:
        """Begin with those that are still ours, and give back those into whose leases no attempt fits any more.

        What was lost before it had begun is a word in the history: nothing was sent.
        """
        database = self.parts.database
        if self._fits(sender, asked):
            now = database.clock.wall()
            held = set(await database.aread(dispatch_claims.recheck, _holds(claims), now=now))
            if self._fits(sender, asked):  # the look has taken its time as well
                left = self._begin([claim for claim in claims if claim.id in held], sender)
                claims = [*left, *(claim for claim in claims if claim.id not in held)]
        if not claims:
            return
        given = set(await database.atransact(dispatch_claims.release, _holds(claims), kind=sender.policy.kind))
        for claim in claims:
            if claim.id not in given:
                word = settlement(claim, sender, NOT_BEGUN, unsent=True)
                self._settler.add(sender.kind.name, word, stream=claim.stream, late=True)

    def _looked(self, claims: Sequence[DispatchClaim], sender: Sender, looking: asyncio.Task[None]) -> None:
        for claim in claims:
            if self._sending[sender.kind.name].get((claim.id, claim.token), "") is None:  # its call has not begun
                self._leave(claim, sender)
        if not looking.cancelled() and (error := looking.exception()) is not None:
            ids = ", ".join(claim.id for claim in claims)
            logger.error("could not look again at dispatches %s; their leases will free them", ids, exc_info=error)
        self.wake()

    def _begin(self, claims: Sequence[DispatchClaim], sender: Sender) -> Sequence[DispatchClaim]:
        """Call the sender for each of these; those are left with which nothing was begun, since we were ended."""
        for place, claim in enumerate(claims):
            failpoint("dispatch.before_send")
            if self._abandoned:
                return claims[place:]
            self._call(claim, sender)
        return ()

    def _call(self, claim: DispatchClaim, sender: Sender) -> None:
        ended = partial(self._ended, claim, sender)
        try:
            dispatch = self._dispatch(claim, sender)
        except Exception as error:
            ended(Raised(error), unsent=True)
            return
        self.parts.telemetry.emit(
            "dispatch.sending", id=claim.id, kind=claim.kind, attempt=claim.attempt, dispatch=dispatch
        )
        late = partial(self._heard, claim, sender)
        call = self.parts.calls.start(sender.fn, dispatch, timeout=sender.timeout, done=ended, late=late)
        table = self._sending[sender.kind.name]
        if (claim.id, claim.token) in table:
            table[claim.id, claim.token] = call

    def _dispatch(self, claim: DispatchClaim, sender: Sender) -> Dispatch[Any]:
        now = self.parts.database.clock.wall()
        return Dispatch(
            id=claim.id,
            key=claim.key,
            kind=claim.kind,
            to=claim.destination,
            body=contained(sender.kind.decode, claim.body, claim.version),
            attempt=claim.attempt,
            created_at=moment(claim.created_at),
            first_attempt_at=moment(claim.first_attempt_at),
            deadline=moment(now + sender.timeout),
            possible_duplicate=claim.possible_duplicate,
            post=self.parts.post,
            ack_token=self.parts.post.keyring.token(claim.id, claim.epoch) if claim.ack_required else None,
            headers=_pairs(claim.headers),
            raw=claim.body,
            version=claim.version,
            expires_at=None if claim.expires_at is None else moment(claim.expires_at),
            origin=_pairs(claim.origin),
        )

    def _ended(self, claim: DispatchClaim, sender: Sender, result: CallResult, *, unsent: bool = False) -> None:
        """An attempt has ended: what it came to is settled together with others. `unsent`: no sender was called."""
        try:
            failpoint("dispatch.after_send")
            if isinstance(result, TimedOut | Aborted) and result.stuck:
                self._outlived.add((claim.id, claim.token))
            judged = self._judge(claim, sender, result, unsent=unsent)
            self._settler.add(sender.kind.name, judged, stream=claim.stream)
        except Exception:
            logger.exception("dispatch %s could not be ended; its lease will free it", claim.id)
        finally:
            self._leave(claim, sender)
            self._room()

    def _heard(self, claim: DispatchClaim, sender: Sender, result: CallResult) -> None:
        """What an attempt came to by itself after it was given up: it is settled behind that, and changes no status."""
        self._outlived.discard((claim.id, claim.token))
        self._left.set()
        late = self._judge(claim, sender, result)
        if not self._over:
            self._settler.add(sender.kind.name, late, stream=claim.stream, late=True)
        elif late.result == "ok":
            logger.warning("dispatch %s was sent after all, too late to be recorded: its loop had ended", claim.id)

    def _leave(self, claim: DispatchClaim, sender: Sender) -> None:
        self._sending[sender.kind.name].pop((claim.id, claim.token), None)
        if sender.concurrency_per_host is not None and claim.host is not None:
            self._hosts[sender.kind.name] -= Counter({claim.host: 1})  # what has none left is not kept
        self._left.set()

    def _judge(
        self, claim: DispatchClaim, sender: Sender, result: CallResult, *, unsent: bool = False
    ) -> Settlement:  # fmt: skip
        verdict = judge(result, sender)
        if isinstance(result, Raised) and verdict.result == "failed":
            self.parts.telemetry.emit("send.raised", id=claim.id, kind=claim.kind, error=result.error)
        gate, fraction = gate_of(claim, result), self.parts.entropy.fraction()
        return settlement(claim, sender, verdict, gate=gate, fraction=fraction, unsent=unsent)


def _holds(claims: Sequence[DispatchClaim]) -> list[Hold]:
    return [Hold(claim.id, claim.token) for claim in claims]


def _pairs(text: str) -> Mapping[str, str]:
    return {} if text == "{}" else msgspec.json.decode(text, type=dict[str, str])


def claim_margin(sender: Sender) -> int:
    """How long after its claim an attempt may still begin, so that it ends well inside the lease."""
    return sender.policy.lease - sender.timeout - KILL_GRACE - LEASE_MARGIN
