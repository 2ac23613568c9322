"""Delays and bounds of retries."""

from datetime import timedelta
from typing import Any

import pytest

from postroad.model.clock import SECOND
from postroad.model.errors import InvalidInput
from postroad.model.retry import Retry


def test_delays_double_up_to_the_cap() -> None:
    """The patient policy's delays are 60, 120, 240, 480, 960, 1,800 seconds and so on."""
    bounds = [Retry.PATIENT.bound(attempt) // SECOND for attempt in range(1, 9)]
    assert bounds == [60, 120, 240, 480, 960, 1_800, 1_800, 1_800]


def test_the_quick_policy() -> None:
    """The quick policy starts at 2 seconds, stops growing at 30, and has a budget of 150."""
    assert [Retry.QUICK.bound(attempt) // SECOND for attempt in range(1, 7)] == [2, 4, 8, 16, 30, 30]
    assert (Retry.QUICK.attempts, Retry.QUICK.budget, Retry.PATIENT.budget) == (8, 150 * SECOND, None)


@pytest.mark.parametrize("attempt", [-1, 0, 1])
def test_the_first_delay_is_the_smallest(attempt: int) -> None:
    """No attempt number gives a smaller bound than the first."""
    assert Retry().bound(attempt) == 60 * SECOND


def test_any_attempt_has_a_finite_bound() -> None:
    """A bound exists for attempt numbers far beyond sense, quickly."""
    assert Retry(first=0.000001, cap=10).bound(10**9) == 10 * SECOND


def test_jitter_draws_from_the_whole_range() -> None:
    """Full jitter: a delay is the drawn fraction of its bound; without jitter it is the bound."""
    assert Retry().delay(1, 0.0) == 0
    assert Retry().delay(2, 0.5) == 60 * SECOND
    assert Retry(jitter=False).delay(2, 0.0) == 120 * SECOND


def test_a_floor_is_kept() -> None:
    """A Retry-After is never undercut by jitter."""
    assert Retry().delay(1, 0.0, floor=7) == 7


def test_lengths_of_time() -> None:
    """Lengths are seconds or timedeltas."""
    retry = Retry(first=timedelta(minutes=1), cap=1.5, budget=timedelta(0))
    assert (retry.first, retry.cap, retry.budget) == (60 * SECOND, 1_500_000, 0)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"attempts": 0}, "attempts"),
        ({"attempts": True}, "attempts"),
        ({"attempts": 1.0}, "attempts"),
        ({"first": -1}, "first"),
        ({"cap": float("inf")}, "cap"),
        ({"budget": "1"}, "budget"),
    ],
)
def test_nonsense_is_refused(given: dict[str, Any], field: str) -> None:
    """What bounds nothing is refused with the argument's name."""
    with pytest.raises(InvalidInput) as refused:
        Retry(**given)
    assert refused.value.about == {"field": field}


@pytest.mark.parametrize(
    ("retry", "seconds"),
    [
        (Retry(attempts=1), 5),
        (Retry(attempts=3, first=10, cap=15), 10 + 15 + 3 * 5),
        (Retry(attempts=9, first=10, cap=10, budget=30), 30 + 5),
        (Retry(attempts=9, first=40, cap=40, budget=30), 5 + 40 + 5),
        (Retry(attempts=2, first=10, cap=10, budget=3_000), 5 + 10 + 5),
    ],
)
def test_the_horizon(retry: Retry, seconds: int) -> None:
    """The horizon is the longest way from the first send to the end of the last: all waits and all timeouts.

    With a budget no attempt but the second begins later than it after the first began.
    """
    assert retry.horizon(5 * SECOND) == seconds * SECOND
