"""Three dispatchers over the same thousand rows, whose claims are over before some of their sends are.

A lease is longer than its sender's timeout or refused where it is declared, so that claims are over before their sends
only where processes, clocks or databases stand still. Here every claim is written with a lease of one second, whatever
its kind says; one send in twelve takes longer. What happened is read from the tables.
"""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from postroad import Dispatch, Postroad, Retry, RetryLater
from postroad.engine import dispatcher, settling
from postroad.model.clock import SECOND
from postroad.model.lifecycle import Reason, Status
from postroad.model.rows import SendPolicy, Settled, Settlement
from postroad.store.statements import Row, Statement, as_json
from tests.cases.apps import OpenApp, idle, open_app, until
from tests.engine.conftest import place

__all__ = ["open_app", "place"]

ROWS = 1_000
APPS = 3
LEASE = SECOND
STALE = frozenset({Reason.STALE_OK, Reason.STALE_FAILED})
_STANDING = Statement("SELECT * FROM {p}outbox WHERE id {in_list:ids} ORDER BY id")
_STORIES = Statement("SELECT * FROM {p}transitions ORDER BY id")


@dataclass
class Seen:
    """What three processes did, in their own words: who sent what, and what became of the row of each stale result."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    sends: dict[str, list[tuple[int, int, bool]]] = field(default_factory=lambda: defaultdict(list))
    settled: int = 0
    stale: int = 0
    changed: list[str] = field(default_factory=list)

    def over(self) -> bool:
        """Whether every send has said what it came to, however late."""
        with self.lock:
            return self.settled >= sum(map(len, self.sends.values())) >= ROWS

    def watched(self, settle: Callable[..., list[Settled]]) -> Callable[..., list[Settled]]:
        """The product's settle, between two looks at the rows in the same transaction."""

        def settle_and_look(conn: Connection, batch: Sequence[Settlement], *, now: int, **more: Any) -> list[Settled]:
            ids = as_json([one.id for one in batch])
            before = {row.id: row for row in _STANDING(conn, ids=ids)}
            settled = settle(conn, batch, now=now, **more)
            after = {row.id: row for row in _STANDING(conn, ids=ids)}
            current = {one.id for one in batch if before[one.id].claim_token == one.token}
            late = [one.id for one in batch if before[one.id].claim_token != one.token]
            with self.lock:
                self.settled += len(batch)
                self.stale += len(late)
                self.changed += [f"{before[id]} {after[id]}" for id in {*late} - current if before[id] != after[id]]
            return settled

        return settle_and_look


def briefly(claim: Callable[..., Any]) -> Callable[..., Any]:
    """The product's claim, with a lease of one second."""

    def claim_briefly(conn: Connection, policy: SendPolicy, **more: Any) -> Any:
        return claim(conn, msgspec.structs.replace(policy, lease=LEASE), **more)

    return claim_briefly


def of_process(post: Postroad, number: int, seen: Seen) -> None:
    """Give an app its sender: one send in twelve outlasts its claim, one in thirty fails; by key and attempt."""

    @post.sender("mail", timeout=20, concurrency=60, retry=Retry(attempts=9, first=0, cap=0))
    async def mail(d: Dispatch[Any]) -> None:
        with seen.lock:
            seen.sends[d.id].append((d.attempt, number, d.possible_duplicate))
        drawn = int(d.key) * 7 + d.attempt * 5
        # A send that is made again takes long enough for the first one's result to come while it is under way.
        await asyncio.sleep(1.3 if drawn % 12 == 0 and d.attempt < 4 else 0.6 if d.possible_duplicate else 0.02)
        if drawn % 30 == 1:
            raise RetryLater("not now")


def steps_of(post: Postroad) -> dict[str, list[Row]]:
    """The history of each dispatch."""
    stories: dict[str, list[Row]] = defaultdict(list)
    for step in post.database.read(lambda conn: _STORIES(conn).all()):
        stories[step.entity].append(step)
    return stories


def cause_of(step: Row, before: Row) -> str:
    """Why an attempt was made although there had been one; '' if its history does not say."""
    if before.reason_code == Reason.RETRY_BACKOFF and before.to_status == Status.PENDING:
        return "failed"
    attempt = msgspec.json.decode(step.metadata)["attempt"]
    lost = f"the lease of attempt {attempt - 1} was lost"
    return "lost" if before.reason_code == Reason.ATTEMPT and lost in step.summary else ""


def check(stories: dict[str, list[Row]], seen: Seen) -> Counter[str]:
    """Hold the sends against the history: each one is an attempt of it, each extra one has a cause; which ones."""
    causes: Counter[str] = Counter()
    for id, sends in seen.sends.items():
        steps = [step for step in stories[id] if step.reason_code not in STALE]
        begun = [step for step in steps if step.reason_code == Reason.ATTEMPT]
        attempts = [msgspec.json.decode(step.metadata)["attempt"] for step in begun]
        assert attempts == list(range(1, len(attempts) + 1)), "attempts are counted"
        assert sorted(attempt for attempt, *_ in sends) == attempts, "what was sent was begun, and once"
        assert all(repeat == (attempt > 1) for attempt, _, repeat in sends)
        for before, step in pairwise(steps):
            if step.reason_code == Reason.ATTEMPT and msgspec.json.decode(step.metadata)["attempt"] > 1:
                causes[cause_of(step, before)] += 1
    return causes


@pytest.mark.acceptance
def test_dispatchers_that_overlap(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends that outlast their claims are made again, each with its cause; their own results change no row, ever."""
    seen = Seen()
    monkeypatch.setattr(settling.dispatches, "settle", seen.watched(settling.dispatches.settle))
    monkeypatch.setattr(dispatcher.dispatch_claims, "claim", briefly(dispatcher.dispatch_claims.claim))
    posts = [open_app() for _ in range(APPS)]
    for number, post in enumerate(posts):
        of_process(post, number, seen)
    with posts[0].begin() as tx:
        for n in range(ROWS):
            tx.send("mail", {}, key=str(n))
    with ExitStack() as stack:
        for post in posts:
            stack.enter_context(post.running())
        until(lambda: seen.over() and idle(posts[0]), "every dispatch has ended, and every send")
    rows, stories = posts[0].dispatches.list(limit=2 * ROWS), steps_of(posts[0])
    assert Counter(row.status for row in rows) == {"delivered": ROWS}
    assert seen.changed == []
    causes = check(stories, seen)
    extra = sum(map(len, seen.sends.values())) - ROWS
    late = sum(step.reason_code in STALE for story in stories.values() for step in story)
    print(f"{extra} extra sends by {dict(causes)}, {seen.stale} results came too late")
    assert causes[""] == 0
    assert sum(causes.values()) == extra
    # None of it for nothing: claims were lost to others, and what their sends came to came too late.
    assert causes["lost"] > 20 < seen.stale
    assert causes["failed"] > 10
    assert late == seen.stale, "each result that came too late is in the history"
    overtaken = {id for id, sends in seen.sends.items() if len({number for _, number, _ in sends}) > 1}
    assert len(overtaken) > 10, "others took over"
