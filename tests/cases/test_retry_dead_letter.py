"""Attempts are bounded, spread over time, and whatever dies says why and can be found."""

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest

from postroad import Dispatch, Kind, Postroad, Retry, RetryLater
from postroad.model.clock import SECOND
from tests.engine.conftest import Open

MAIL = Kind("mail", dict[str, str])


def row(post: Postroad, key: str = "k") -> Any:
    found = post.dispatches.get(key)
    assert found is not None
    return found


@pytest.mark.parametrize("first", [5, 10])
def test_a_delay_never_leaves_the_calendar(first: float) -> None:
    """Whatever the first delay and the attempt's number, the due time is finite and within the cap."""
    retry = Retry(attempts=100, first=first, jitter=False)
    assert all(first * SECOND <= retry.delay(n, 0.5) <= 1800 * SECOND for n in range(1, 101))
    longest = Retry(attempts=100, first=first, cap=timedelta(days=365 * 100), jitter=False)
    assert longest.delay(100, 0.5) == 365 * 100 * 86_400 * SECOND


def test_a_row_with_huge_delays_stays_and_can_be_read(harness: Open) -> None:
    """A hundred failures with a cap of a hundred years leave a pending row with a due time that can be shown."""
    post = Postroad()
    years = timedelta(days=365 * 100)
    post.sender(MAIL, retry=Retry(attempts=100, first=years, cap=years, jitter=False))(lambda d: None)
    h = harness(post)
    h.fail(MAIL, RetryLater("busy"), times=100)
    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    for _ in range(20):
        h.drain()
        assert row(post).due_at == h.clock.now + years
        h.clock.advance(years)
    assert (row(post).status, row(post).attempt) == ("pending", 20)


@pytest.mark.parametrize("after", [-5, float("nan"), float("inf"), 1e18, "soon", True, timedelta(seconds=-1)])
def test_a_nonsensical_retry_after_is_ignored(harness: Open, after: Any) -> None:
    """A floor that means nothing neither loses the attempt's result nor makes the loop spin: the policy decides."""
    post = Postroad()
    post.sender(MAIL, retry=Retry(attempts=2, first=10, jitter=False))(lambda d: None)
    h = harness(post)
    h.fail(MAIL, RetryLater("busy", after=after))
    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    h.drain()
    assert (row(post).status, row(post).due_at) == ("pending", h.clock.now + timedelta(seconds=10))
    h.advance(10)
    assert row(post).status == "delivered"


def test_a_turn_with_a_nonsensical_retry_after_backs_off(harness: Open) -> None:
    """The same for turns."""
    post = Postroad()
    seen: list[datetime] = []

    @post.turn("chat")
    def chat(t: Any) -> None:
        seen.append(t.now)
        if len(seen) == 1:
            raise RetryLater("busy", after=float("inf"))

    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", "note", {})
    h.advance(60)
    assert len(seen) == 2
    assert seen[1] - seen[0] <= timedelta(seconds=2)
    assert [e.kind for e in h.entries("chat/1")] == ["note"]


def test_an_outage_of_half_an_hour_burns_no_attempts_in_a_minute(harness: Open) -> None:
    """With the default policy a row has minutes at the least; what dies all the same is listed with its reason."""
    post = Postroad()
    tries: Counter[str] = Counter()
    begun: list[datetime] = []

    @post.sender(MAIL)
    def mail(d: Dispatch[Any]) -> None:
        tries[d.key] += 1
        if h.clock.now - begun[0] < timedelta(minutes=30):
            raise RetryLater("connection refused")

    h = harness(post, senders="run")
    begun.append(h.clock.now)
    for n in range(30):
        with post.begin() as tx:
            tx.send(MAIL, {}, key=f"k{n}")
        h.advance(60)
        if n == 5:
            assert max(tries.values()) < 8, "nothing is dead after five minutes"
    h.advance(7200)
    ended = Counter(one.status for one in post.dispatches.list())
    assert ended["delivered"] >= 20
    assert ended["delivered"] + ended["dead_letter"] == 30
    for dead in post.dispatches.list(status="dead_letter"):
        assert (dead.reason, dead.attempt) == ("dispatch.dead_letter.max_attempts", 8)
        assert dead.last_error == "RetryLater: Try again later. connection refused"


def test_what_an_outage_outlived_is_not_sent_and_the_rest_shows_its_age(harness: Open) -> None:
    """After two hours without a dispatcher an expiry of one hour is final; what goes out says when it was written."""
    post = Postroad()
    post.sender(MAIL)(lambda d: None)
    h = harness(post)
    written = h.clock.now
    with post.begin() as tx:
        tx.send(MAIL, {}, key="stale", expires=3600)
        tx.send(MAIL, {}, key="fresh")
    h.clock.advance(7200)
    h.drain()
    (sent,) = h.sent(MAIL)
    assert (sent.key, sent.created_at, sent.attempt, sent.possible_duplicate) == ("fresh", written, 1, False)
    assert (row(post, "stale").status, row(post, "stale").attempt) == ("expired", 0)
