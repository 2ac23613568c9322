"""When to try again: capped exponential backoff with full jitter, bounded by attempts and by a budget."""

from typing import ClassVar

from postroad.model.clock import span
from postroad.model.errors import InvalidInput, Span, shown
from postroad.model.payload import whole

ATTEMPTS_MAX = 1_000_000


class Retry:
    """Capped exponential backoff with full jitter, bounded by attempts and by a budget from the first attempt.

    After attempt n the delay is drawn from [0, min(first * 2**(n-1), cap)] (full jitter, "Exponential Backoff
    And Jitter", AWS Architecture Blog 2015), or is the upper bound itself without jitter. The first retry is
    always allowed, whatever the budget; a later one that would start after the budget is not.

    Args:
        attempts: How often at the most, 1 to 1,000,000.
        budget: How long after the first attempt a retry may still start; None is no such bound.
        first: Upper bound of the delay after the first attempt.
        cap: Upper bound of every delay.
        jitter: False makes each delay its upper bound.
    """

    QUICK: ClassVar["Retry"]
    PATIENT: ClassVar["Retry"]
    __slots__ = ("attempts", "budget", "cap", "first", "jitter")

    def __init__(
        self,
        *,
        attempts: int = 8,
        budget: Span | None = None,
        first: Span = 60,
        cap: Span = 1800,
        jitter: bool = True,
    ) -> None:
        if not isinstance(jitter, bool):
            raise InvalidInput(f"jitter must be True or False, got {shown(jitter)}.", field="jitter")
        self.attempts = whole(attempts, "attempts", most=ATTEMPTS_MAX)
        self.budget = None if budget is None else span(budget, "budget")
        self.first = span(first, "first")
        self.cap = span(cap, "cap")
        self.jitter = jitter

    def bound(self, attempt: int) -> int:
        """The longest delay after attempt number `attempt`, in microseconds; finite for any attempt."""
        doublings = min(max(attempt, 1) - 1, 62)
        return min(self.first << doublings, self.cap)

    def delay(self, attempt: int, fraction: float, floor: int = 0) -> int:
        """The delay after attempt number `attempt`, in microseconds.

        `fraction` in [0, 1) is the jitter's draw; `floor` (a Retry-After) is never undercut.
        """
        bound = self.bound(attempt)
        return max(round(bound * fraction) if self.jitter else bound, floor)

    def horizon(self, timeout: int) -> int:
        """The longest time from the first send to the end of the last one, in microseconds.

        As far as attempts and budget bound it: a Retry-After, and a time without any dispatcher, come on top.
        """
        last = sum(timeout + self.bound(n) for n in range(1, self.attempts))
        if self.budget is not None:
            last = min(last, max(self.budget, timeout + self.bound(1)))
        return last + timeout


def floor_of(after: Span | None) -> int:
    """A Retry-After in microseconds. One that is no sane length of time comes from outside, and counts as none."""
    return 0 if after is None else (length_of(after) or 0)


def length_of(after: Span) -> int | None:
    """A Retry-After in microseconds; None: it is no sane length of time."""
    try:
        return span(after, "after")
    except InvalidInput:
        return None


Retry.QUICK = Retry(attempts=8, budget=150, first=2, cap=30)
Retry.PATIENT = Retry(attempts=8, first=60, cap=1800)
