"""Time as an argument: microseconds since 1970 UTC as an int, from a clock that somebody passed in."""

import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Protocol

from postroad.model.errors import InvalidInput, Span, shown

SECOND = 1_000_000
SPAN_DAYS_MAX = 100 * 366  # of any length of time that is given
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock(Protocol):
    """Two readings of time; the only source of `now` for loops and transactions."""

    def wall(self) -> int:
        """The wall clock in microseconds since 1970 UTC."""

    def monotonic(self) -> int:
        """Microseconds from a start that means nothing; never runs backwards."""


class SystemClock:
    """The host's clock."""

    def wall(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> int:
        return time.monotonic_ns() // 1000


class FakeClock:
    """A clock that stands still until a test moves it.

    >>> clock = FakeClock("2026-01-05T07:00Z")
    >>> clock.advance(60)
    >>> clock.now.isoformat()
    '2026-01-05T07:01:00+00:00'
    """

    def __init__(self, start: str | datetime = "2026-01-01T00:00Z") -> None:
        self._wall = micros(_instant(start), "start")
        self._steady = 0

    def wall(self) -> int:
        return self._wall

    def monotonic(self) -> int:
        return self._steady

    @property
    def now(self) -> datetime:
        """The clock's time as an aware datetime."""
        return moment(self._wall)

    def advance(self, by: Span) -> None:
        """Let time pass, as both readings see it."""
        step = span(by, "by")
        self._wall += step
        self._steady += step

    def advance_to(self, wall: int) -> None:
        """Let time pass until the wall clock shows `wall`; never backwards."""
        step = max(0, wall - self._wall)
        self._wall += step
        self._steady += step

    def jump(self, by: Span) -> None:
        """Step the wall clock alone, forwards or backwards, as an administrator would."""
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        back = isinstance(seconds, int | float) and seconds < 0
        self._wall += -span(-seconds, "by") if back else span(seconds, "by")


def _instant(start: str | datetime) -> datetime:
    if not isinstance(start, str):
        return start
    try:
        return datetime.fromisoformat(start)
    except ValueError:
        raise InvalidInput(f"start must be an ISO time, got {shown(start)}.", field="start") from None


@lru_cache(maxsize=256)  # what is claimed or written together has its times in common
def moment(stamp: int) -> datetime:
    """The aware UTC datetime of a stored time in microseconds."""
    return _EPOCH + timedelta(0, stamp // SECOND, stamp % SECOND)  # exact, and a quarter of what fromtimestamp takes


def micros(instant: datetime, field: str) -> int:
    """Microseconds since 1970 UTC of an aware datetime; a naive one is refused with the field's name."""
    if not isinstance(instant, datetime) or instant.tzinfo is None or instant.utcoffset() is None:
        raise InvalidInput(f"{field} must be a datetime with a time zone, got {shown(instant)}.", field=field)
    try:
        instant = instant.astimezone(UTC)
    except OverflowError:  # it would be stored, and never read again
        raise InvalidInput(f"{field} is outside of the years 1 to 9999 in UTC.", field=field) from None
    return (instant - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def span(length: Span, field: str) -> int:
    """A length of time (seconds or timedelta) in microseconds; negative, too long or endless ones are refused."""
    seconds = length.total_seconds() if isinstance(length, timedelta) else length
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidInput(
            f"{field} must be a number of seconds or a timedelta, not negative, got {shown(length)}.", field=field
        )
    if seconds > SPAN_DAYS_MAX * 86_400:
        raise InvalidInput(
            f"{field} is too long: {SPAN_DAYS_MAX} days (a hundred years) are the most, got {shown(length)}.",
            field=field,
        )
    return round(seconds * SECOND)
