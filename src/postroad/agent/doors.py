"""Two channels for one thing to say: a conversation, which may be busy, and one that is heard at once (provisional)."""

import asyncio
from typing import Any, Generic, TypeVar

import msgspec

from postroad.engine.app import Postroad
from postroad.engine.reports import written
from postroad.engine.transaction import Transaction
from postroad.model.clock import SECOND, span
from postroad.model.dispatches import Accepted, DispatchRow
from postroad.model.errors import InvalidInput, KeyConflict, Span, UnknownKind, shown
from postroad.model.events import Entry
from postroad.model.kinds import Kind
from postroad.model.lifecycle import Reason, Status
from postroad.model.payload import KEY_BYTES_MAX, text
from postroad.store import dispatch_views

T = TypeVar("T")
ACTOR = "door"
PREFIX = "ring:"
LOOK_SECONDS = 0.1
WAIT_SECONDS = 2
PATIENCE_SECONDS = 5
LANDED, RANG, REFUSED = 200, 202, 503
_HEARD = (Reason.STALE_OK, Reason.RESOLVED_SENT)  # found out later, of a dead letter
_UNHEARD = (Reason.PERMANENT, Reason.MAX_ATTEMPTS, Reason.BUDGET)


class Ring(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """What the second channel is to say.

    Attributes:
        kind: The kind of the dispatch that says it; some running app must have its sender.
        body: What it says.
        to: Where it goes, as the kind's sender understands it.
    """

    kind: Kind[T] | str
    body: T
    to: str = ""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it by now. Whatever that is, the report is accepted and will land.

    Attributes:
        entry: The report as it landed; None: not yet.
        ring: The dispatch to the second channel; None: there was no need to ring.
    """

    entry: Entry | None
    ring: DispatchRow | None

    @property
    def rang(self) -> bool:
        """Whether the second channel has taken it."""
        ring = self.ring
        return ring is not None and (ring.status in (Status.DELIVERED, Status.ACKED) or ring.reason in _HEARD)

    @property
    def status(self) -> int:
        """What a door answers over HTTP: 200 it landed, 202 the second channel was rung, 503 neither: come again."""
        if self.entry is not None:
            return LANDED
        return RANG if self.rang else REFUSED


async def report_or_ring(
    post: Postroad,
    stream: str,
    data: Any,
    *,
    key: str,
    ring: Ring[Any],
    wait: Span = WAIT_SECONDS,
    patience: Span = PATIENCE_SECONDS,
    source: str | None = None,
    owner: str | None = None,
) -> Told:
    """Report, and if that has not landed within `wait`, ring the second channel, once for each key.

    For a door that others knock at again when they hear nothing: however many callers, retries and processes there
    are, one key makes one entry and one ring. A ring that was refused for good is tried again by whoever asks next;
    one that may have been heard is left to a person. As any dispatch it can go out twice if its process dies between
    the sending and its record.

    Args:
        key: The same at each retry: the source's own id, never one made up on the way.
        wait: For how long the conversation may be busy before the second channel is rung.
        patience: For how long to wait then until the ring has been heard.
        source, owner: As `areport` has them.

    Raises:
        InvalidInput: A value is none, of the report or of the ring; nothing was reported or rung.
        UnknownKind: Nobody in this app declares the ring's kind; nothing was reported or rung.
        SourceRefused, StreamDeleted, KeyConflict: As `areport` does; then nothing was rung.
        KeyConflict: Something else was sent under the ring's key; the report is accepted.
    """
    patient = span(patience, "patience") / SECOND
    _check(post, key, ring)
    entry = await post.areport(stream, data, key=key, wait=wait, source=source, owner=owner)
    if entry is not None:
        return Told(entry=entry, ring=None)
    id = await _send(post, key, ring)
    rung = await _heard(post, id, patient)
    # It may have landed meanwhile: then that is what the caller wants to know.
    return Told(entry=await post.areport(stream, data, key=key, source=source, owner=owner), ring=rung)


async def ring_then_report(
    post: Postroad,
    stream: str,
    data: Any,
    *,
    key: str,
    ring: Ring[Any],
    wait: Span = WAIT_SECONDS,
    source: str | None = None,
    owner: str | None = None,
) -> Told:
    """Ring the second channel first, once for each key, then report: for what stops somebody's work.

    The ring is committed before the report, which waits at most `wait` for a conversation that may be busy. The
    arguments and errors are those of `report_or_ring`. What is no stream, no key or no payload rings nobody; a report
    that is refused for what is in the database (StreamDeleted, SourceRefused, KeyConflict) has rung all the same.
    """
    _check(post, key, ring)
    written(stream, data, key=key, source=source, owner=owner, on_conflict="keep")
    span(wait, "wait")
    id = await _send(post, key, ring)
    entry = await post.areport(stream, data, key=key, wait=wait, source=source, owner=owner)
    return Told(entry=entry, ring=await _look(post, id))


def _check(post: Postroad, key: str, ring: Ring[Any]) -> None:
    """Refuse at once what could not be rung later, when the report is accepted."""
    if not isinstance(ring, Ring):
        raise InvalidInput(f"ring must be a Ring, got {shown(ring)}.", field="ring")
    text(key, "key", bytes_max=KEY_BYTES_MAX - len(PREFIX))  # the ring's is longer by that
    _send_in(Transaction(post), key, ring)  # which nobody commits


def _send_in(tx: Transaction, key: str, ring: Ring[Any]) -> Accepted:
    return tx.send(ring.kind, ring.body, to=ring.to, key=PREFIX + key, on_conflict="keep")


async def _send(post: Postroad, key: str, ring: Ring[Any]) -> str:
    """The id of the one dispatch with this key; one that was given up without having been heard is sent again."""
    async with post.begin() as tx:
        sent = _send_in(tx, key, ring)
    row = None if sent.created else await _look(post, sent.id)
    if row is None:
        return sent.id
    if not _is_of(post, ring.kind, row):
        raise KeyConflict(f"{row.key} was sent before as {row.kind}: a ring's key is for rings.", key=row.key)
    if row.reason in _UNHEARD:
        await asyncio.to_thread(post.dispatches.retry, sent.id, actor=ACTOR, reason="asked for again")
    return sent.id


def _is_of(post: Postroad, kind: Kind[Any] | str, row: DispatchRow) -> bool:
    """Whether a dispatch is of this kind, by any of its names."""
    name = kind.name if isinstance(kind, Kind) else kind
    try:
        return row.kind == name or post.declared(row.kind) is post.declared(name)
    except UnknownKind:
        return False


async def _heard(post: Postroad, id: str, patience: float) -> DispatchRow | None:
    """The dispatch once it has come to an end, or as it is when the patience is over."""
    loop = asyncio.get_running_loop()
    until = loop.time() + patience
    while True:
        row = await _look(post, id)
        if row is None or row.status not in (Status.PENDING, Status.DELIVERING) or loop.time() >= until:
            return row
        await asyncio.sleep(min(LOOK_SECONDS, max(0, until - loop.time())))


async def _look(post: Postroad, id: str) -> DispatchRow | None:
    return await post.database.aread(dispatch_views.get, id)
