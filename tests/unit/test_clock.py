"""Time as an argument."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroad.model.clock import SECOND, FakeClock, SystemClock, micros, moment, span
from postroad.model.errors import InvalidInput, shown

NAIVE = datetime.fromisoformat("1971-01-01T00:00")
AWARE = st.datetimes(
    min_value=NAIVE,
    max_value=NAIVE.replace(year=2999),
    timezones=st.timezones() | st.just(UTC),
)


def test_the_system_clock_reads_the_host() -> None:
    """The wall clock is near the host's time, the steady one doesn't run backwards."""
    clock = SystemClock()
    assert abs(clock.wall() - micros(datetime.now(UTC), "now")) < 60 * SECOND
    assert clock.monotonic() <= clock.monotonic()


def test_a_fake_clock_stands_still() -> None:
    """It moves only when it is moved, and both readings move together."""
    clock = FakeClock("2026-01-05T07:00Z")
    wall, steady = clock.wall(), clock.monotonic()
    clock.advance(1.5)
    clock.advance(timedelta(minutes=1))
    assert (clock.wall() - wall, clock.monotonic() - steady) == (61_500_000, 61_500_000)
    assert clock.now == datetime(2026, 1, 5, 7, 1, 1, 500_000, tzinfo=UTC)


def test_a_fake_clock_starts_where_it_is_told() -> None:
    """An aware datetime of any zone is a start; a naive one is refused."""
    start = datetime(2026, 3, 29, 3, 30, tzinfo=timezone(timedelta(hours=2)))
    assert FakeClock(start).now == start
    with pytest.raises(InvalidInput, match="start must be a datetime with a time zone"):
        FakeClock("2026-01-01T00:00")


def test_advance_to_never_goes_back() -> None:
    """A moment in the past leaves the clock where it is."""
    clock = FakeClock()
    wall = clock.wall()
    clock.advance_to(wall + 7)
    clock.advance_to(wall)
    assert (clock.wall(), clock.monotonic()) == (wall + 7, 7)


def test_a_jump_moves_the_wall_clock_alone() -> None:
    """As when an administrator sets the clock: forwards or backwards, and no time has passed."""
    clock = FakeClock()
    wall = clock.wall()
    clock.jump(-3600)
    clock.jump(timedelta(seconds=1))
    assert (clock.wall(), clock.monotonic()) == (wall - 3599 * SECOND, 0)


@given(AWARE)
def test_micros_and_moment_are_inverse(instant: datetime) -> None:
    """A stored time comes back as the same instant, whatever zone it was given in."""
    assert moment(micros(instant, "at")) == instant.astimezone(UTC)


@given(st.integers(min_value=-(10**15), max_value=10**16))
def test_moment_and_micros_are_inverse(stamp: int) -> None:
    """To the microsecond, before 1970 too: no float is in between."""
    assert micros(moment(stamp), "at") == stamp


@pytest.mark.parametrize("instant", [NAIVE, "2026-01-01T00:00Z", 1_767_225_600, None])
def test_only_aware_datetimes_are_instants(instant: Any) -> None:
    """A naive datetime, a text or a number is refused with the field's name."""
    with pytest.raises(InvalidInput, match="at must be a datetime with a time zone") as caught:
        micros(instant, "at")
    assert caught.value.about == {"field": "at"}


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (2, 2 * SECOND), (0.25, 250_000), (timedelta(days=1), 86_400 * SECOND), (1e-7, 0)],
)
def test_a_span_is_seconds_or_a_timedelta(length: Any, expected: int) -> None:
    """Numbers are seconds; the result is microseconds, rounded."""
    assert span(length, "after") == expected


@pytest.mark.parametrize("length", [-1, timedelta(seconds=-1), float("nan"), -float("inf"), True, "5", None])
def test_a_span_that_is_none_is_refused(length: Any) -> None:
    """Negative or no number: refused with the field's name."""
    with pytest.raises(InvalidInput, match="after must be a number of seconds or a timedelta") as caught:
        span(length, "after")
    assert caught.value.about == {"field": "after"}


@pytest.mark.parametrize(
    "length", [1e18, float("inf"), 10**400, timedelta.max, timedelta(days=3_650_000), timedelta(days=36_600, seconds=1)]
)
def test_a_span_that_is_too_long_says_how_long_it_may_be(length: Any) -> None:
    """Endless or centuries long: refused with the field's name and the most; that itself is taken."""
    with pytest.raises(InvalidInput, match=r"after is too long: 36600 days \(a hundred years\) are the most") as caught:
        span(length, "after")
    assert caught.value.about == {"field": "after"}
    assert span(timedelta(days=36_600), "after") == 36_600 * 86_400 * SECOND


def test_what_an_error_shows_of_a_value_is_bounded() -> None:
    """A value is shown by its repr, cut at 80 characters; one that has no repr by its type."""

    class Silent:
        def __repr__(self) -> str:
            raise ValueError

    assert shown("x") == "'x'"
    assert shown("x" * 100) == f"'{'x' * 78}…"
    assert shown(10**5_000) == "a value of type int"
    assert shown(Silent()) == "a value of type Silent"


def test_the_wall_clock_is_set_back_alone() -> None:
    """A jump moves the wall clock in both directions and leaves the steady one."""
    clock = FakeClock("2026-01-01T00:00Z")
    before = clock.wall()
    clock.jump(-90)
    assert (clock.wall() - before, clock.monotonic()) == (-90 * SECOND, 0)
    clock.jump(timedelta(seconds=100))
    assert (clock.wall() - before, clock.monotonic()) == (10 * SECOND, 0)
