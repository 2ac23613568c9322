"""The life of a dispatch as data: edges, and where an attempt's result leads."""

from typing import Any

import pytest

from postroad.model.clock import SECOND
from postroad.model.errors import IllegalEdge
from postroad.model.lifecycle import (
    EDGES,
    TERMINAL,
    Next,
    Reason,
    Result,
    Status,
    after_attempt,
    budget_spent,
    check_edge,
)
from postroad.model.retry import Retry

RETRY = Retry(attempts=3, budget=100, first=10, cap=60, jitter=False)
PENDING, DELIVERING, DEAD = Status.PENDING, Status.DELIVERING, Status.DEAD_LETTER


def after(result: Result, **given: Any) -> Next:
    """What an attempt makes of a dispatch; the first of three at time 0 unless told otherwise."""
    defaults = {"attempt": 1, "attempts_max": 3, "first_attempt_at": 0, "now": 0, "fraction": 1.0}
    return after_attempt(result, RETRY, **{**defaults, **given})


def test_the_edges_are_these() -> None:
    """The graph is closed; delivered and acked have no way out, and only pending comes from nothing."""
    ways = {before: {after.value for before_, after in EDGES if before_ is before} for before in (None, *Status)}
    assert ways == {
        None: {"pending"},
        Status.PENDING: {"delivering", "expired", "acked"},
        Status.DELIVERING: {"delivering", "pending", "delivered", "acked", "dead_letter", "expired"},
        Status.DELIVERED: set(),
        Status.ACKED: set(),
        Status.DEAD_LETTER: {"pending"},
        Status.EXPIRED: {"pending"},
    }
    assert {Status.DELIVERED, Status.ACKED, Status.DEAD_LETTER, Status.EXPIRED} == TERMINAL


def test_an_edge_is_accepted() -> None:
    """A step along an edge passes."""
    check_edge(None, PENDING)
    check_edge(PENDING, DELIVERING)


def test_a_step_without_an_edge_is_refused() -> None:
    """A step that is no edge raises, with both statuses as data."""
    with pytest.raises(IllegalEdge) as refused:
        check_edge(PENDING, DEAD)
    assert refused.value.about == {"before": PENDING, "after": DEAD}


@pytest.mark.parametrize(
    ("result", "following"),
    [
        ("ok", Next(Status.DELIVERED, Reason.TRANSPORT_OK)),
        ("cut_short", Next(PENDING, Reason.RELEASED, 0)),
        ("permanent", Next(DEAD, Reason.PERMANENT)),
        ("unknown", Next(DEAD, Reason.UNKNOWN_OUTCOME)),
        ("failed", Next(PENDING, Reason.RETRY_BACKOFF, 10 * SECOND)),
    ],
)
def test_each_result_leads_somewhere(result: Result, following: Next) -> None:
    """A result decides where a dispatch goes; only a plain failure looks at the bounds."""
    assert after(result) == following


def test_the_last_attempt_is_the_last() -> None:
    """A failure of the last attempt is final, and says so; a dispatch with one attempt gets one."""
    assert after("failed", attempt=3) == Next(DEAD, Reason.MAX_ATTEMPTS)
    assert after("failed", attempts_max=1) == Next(DEAD, Reason.MAX_ATTEMPTS)


def test_a_retry_after_is_a_floor() -> None:
    """A Retry-After is never undercut and never shortens a delay."""
    assert after("failed", floor=25 * SECOND).delay == 25 * SECOND
    assert after("failed", floor=5 * SECOND).delay == 10 * SECOND


def test_the_budget_ends_what_would_start_after_it() -> None:
    """A later retry must start within the budget, its end included; the first one may start any time."""
    assert after("failed", attempt=2, now=80 * SECOND).delay == 20 * SECOND
    assert after("failed", attempt=2, now=80 * SECOND + 1) == Next(DEAD, Reason.BUDGET)
    assert after("failed", attempt=1, now=900 * SECOND).status == PENDING


@pytest.mark.parametrize(
    ("budget", "attempt", "first", "spent"),
    [(None, 5, 0, False), (10, 5, None, False), (10, 1, 0, False), (10, 2, 0, True), (99, 2, 0, False)],
)
def test_a_budget_is_spent(budget: int | None, attempt: int, first: int | None, spent: bool) -> None:
    """Without a budget, without a first attempt and before the first retry nothing is spent."""
    assert budget_spent(budget, attempt=attempt, first_attempt_at=first, start=50) is spent


def test_reasons_name_their_status() -> None:
    """A reason code is dispatch.<status>.<why>; `stale` and `resolved` stand for no status at all."""
    parts = [reason.split(".") for reason in Reason]
    assert all(part[0] == "dispatch" and part[1] in {*Status, "stale", "resolved"} for part in parts)
