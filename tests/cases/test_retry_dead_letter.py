"""Attempts are bounded, spread over time, and whatever dies says why, can be found and sent again."""

import os
import subprocess
import sys
from collections import Counter
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from postroad import Dispatch, DispatchFilter, Kind, Postroad, Retry, RetryLater
from postroad.model.clock import SECOND
from postroad.store import audit
from postroad.store.statements import Statement
from tests.engine.conftest import Open

MAIL = Kind("mail", dict[str, str])
# Dead letters of a route, as an outage leaves them; and a row of history each.
DEAD = Statement("""
WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < :rows)
INSERT INTO {p}outbox (id, key, stream, kind, version, destination, body, headers, policy, status, attempt,
    max_attempts, epoch, last_error, content_hash, origin, created_at, updated_at)
SELECT 'id' || n, 'k' || n, '', 'mail', 1, CASE WHEN n % 5 = 0 THEN 'other' ELSE 'route' END, '{}', '{}', 'event',
    'dead_letter', 8, 8, 0, 'refused', '', '{}', :now, :now FROM n
""")
DIED = Statement("""
INSERT INTO {p}transitions (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata, at)
SELECT id, 'delivering', 'dead_letter',
    CASE WHEN destination = 'other' THEN 'dispatch.dead_letter.permanent' ELSE 'dispatch.dead_letter.max_attempts' END,
    'attempt 8 of 8 failed: refused', 'system', '', '[]', '{}', :now FROM {p}outbox
""")
COUNTS = Statement("SELECT status, count(*) AS number FROM {p}outbox GROUP BY status")
DUES = Statement("SELECT due_at FROM {p}outbox WHERE status = 'pending' AND kind = 'mail' ORDER BY due_at")


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
    died = ended["dead_letter"]
    found = post.dispatches.list(reason="max_attempts")
    assert len(found) == died, "one command lists them by reason"
    assert post.dispatches.retry(DispatchFilter(reason="max_attempts"), actor="ann", reason="broker is up").done == died
    h.advance(60)
    assert Counter(one.status for one in post.dispatches.list()) == {"delivered": 30}


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


def fill(post: Postroad, rows: int) -> None:
    """So many dead letters."""

    def write(conn: Any, *, now: int) -> None:
        DEAD(conn, rows=rows, now=now)
        DIED(conn, now=now)

    post.database.transact(write)


def counts(post: Postroad) -> dict[str, int]:
    """How many dispatches are in which status."""
    return {row.status: row.number for row in post.database.read(COUNTS)}


def test_a_bulk_retry_that_is_killed_loses_and_repeats_nothing(place: dict[str, Any]) -> None:
    """Killed half-way, all rows are pending or dead; the same command once more does the rest and no row twice."""
    post = Postroad(**place, migrate=True)
    fill(post, 1000)
    code = (
        "import postroad.bundled_sqlite\n"
        "from postroad.testing.failpoints import arm_from_environment\n"
        "from postroad.surfaces.cli import main\narm_from_environment()\nmain()"
    )
    command = [sys.executable, "-c", code, "dispatch", "retry", "--status", "dead_letter", "--database"]
    command += [place["database"], *(("--schema", place["schema"]) if "schema" in place else ())]
    killed = subprocess.run(
        command,
        check=False,
        timeout=60,
        capture_output=True,
        env={**os.environ, "POSTROAD_FAILPOINT": "commit.before:2"},
    )
    assert killed.returncode == -9, killed.stderr
    assert counts(post) == {"pending": 500, "dead_letter": 500}
    done = post.dispatches.retry(DispatchFilter(status="dead_letter"), actor="ann")
    assert (done.found, done.done, counts(post)) == (500, 500, {"pending": 1000})
    assert {one.epoch for one in post.dispatches.list(limit=1000)} == {1}
    assert len(post.database.read(audit.list_)) == 2, "one for each chunk that was committed"
    post.close()


def test_a_backlog_is_retried_without_a_flood(place: dict[str, Any]) -> None:
    """One audited command for a route and a reason; due at a rate, so that new dispatches go before most of it."""
    post = Postroad(**place, migrate=True)
    post.sender(MAIL)(lambda d: None)
    fill(post, 5000)
    wanted = DispatchFilter(to="route", reason="max_attempts")
    done = post.dispatches.retry(wanted, actor="ann", reason="up again", rate=50)
    assert (done.found, done.done, dict(done.refused)) == (4000, 4000, {})
    dues = [row.due_at for row in post.database.read(DUES)]
    gaps = {later - earlier for earlier, later in pairwise(dues)}
    assert gaps == {SECOND // 50}, "over all chunks, at the rate that was asked for"
    with post.begin() as tx:
        tx.send(MAIL, {}, to="new", key="new")
    new = row(post, "new")
    assert sum(due < new.due_at.timestamp() * SECOND for due in dues) < len(dues) // 2
    one = row(post, "k1")
    assert (one.attempt, one.last_error) == (0, None)
    assert one.history[0]["summary"] == "attempt 8 of 8 failed: refused", "the old error stays readable"
    assert {each.subject for each in post.database.read(audit.list_)} == {"to=route reason=max_attempts"}
    post.close()
