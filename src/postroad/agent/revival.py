"""Revival: a ping for each seat whose consumer may be dead, sent by whoever is alive (provisional)."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from postroad.engine.transaction import Transaction
from postroad.model.clock import SECOND, micros, moment, span
from postroad.model.dispatches import Accepted
from postroad.model.errors import InvalidInput, Span, shown
from postroad.model.kinds import Kind

REVIVAL_PING: Kind[dict[str, str]] = Kind("revival_ping", dict[str, str])
TTL_SECONDS = 3_600
_START = datetime(1970, 1, 1, tzinfo=UTC)


def send_revivals(
    tx: Transaction, seats: Iterable[str], *, epoch: datetime | float, ttl: Span = TTL_SECONDS
) -> list[Accepted]:
    """Send each seat a `revival_ping`, once for each epoch however often this is called.

    The key is `revival:<seat>:<epoch>`, the epoch in seconds since 1970, written the same way however it was given.
    A ping that has not gone out at epoch + ttl expires; one of epoch 0 never does.

    Args:
        seats: Where to, each a `to` as the kind's sender understands it.
        epoch: When the seats were reset, as an aware datetime or in seconds since 1970; 0 if that is not known.
        ttl: For how long after the epoch a ping is of use.

    Returns:
        What `send` answers, for each seat in the given order; a seat that is given twice has the same dispatch.

    Raises:
        InvalidInput: A seat is no text that can be stored, or the epoch is no time.
    """
    if isinstance(seats, str):
        raise InvalidInput(f"seats must be several texts, got {shown(seats)}.", field="seats")
    since = _epoch(epoch)
    expires = moment(since + span(ttl, "ttl")) if since else None
    rendered = f"{since / SECOND:.6f}".rstrip("0").rstrip(".")
    return [
        tx.send(REVIVAL_PING, {"seat": seat}, to=seat, key=f"revival:{seat}:{rendered}", expires=expires)
        for seat in map(_seat, seats)
    ]


def _seat(seat: object) -> str:
    if not isinstance(seat, str) or not seat:
        raise InvalidInput(f"A seat must be a text, got {shown(seat)}.", field="seats")
    return seat


def _epoch(epoch: object) -> int:
    """Microseconds since 1970."""
    if isinstance(epoch, datetime):
        return micros(epoch, "epoch")
    if isinstance(epoch, bool) or not isinstance(epoch, int | float) or not 0 <= epoch < 2**40:
        raise InvalidInput(f"epoch must be an aware datetime or seconds since 1970, got {shown(epoch)}.", field="epoch")
    try:
        return micros(_START + timedelta(seconds=epoch), "epoch")
    except (OverflowError, ValueError):
        raise InvalidInput(f"epoch is outside of the years 1 to 9999, got {shown(epoch)}.", field="epoch") from None
