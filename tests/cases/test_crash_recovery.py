"""What a process that dies leaves behind is found by its leases alone, by whoever comes next."""

import asyncio
import signal
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from postroad import Dispatch, Kind, Postroad, Retry, Turn
from postroad.engine.declarations import Sender
from postroad.model.clock import SECOND
from postroad.store import alerts, dispatch_claims, queues
from postroad.testing import Harness
from tests.cases.apps import OpenApp, Processes, idle, until
from tests.engine.conftest import Open

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
NOTE = Kind("note", dict[str, int])


def claim_and_die(post: Postroad, kind: str, *, now: int | None = None) -> int:
    """Claim everything of a kind that is due, as a process that then died; how many."""
    sender = post.declared(kind)
    assert isinstance(sender, Sender)
    token = post.entropy.token()
    with post.database.engine.begin() as conn:
        claimed = dispatch_claims.claim(
            post.database.bind(conn), sender.policy, names=[kind], token=token, limit=1_000,
            now=post.database.clock.wall() if now is None else now,
        )  # fmt: skip
    return len(claimed.claims)


def test_orphans_are_found_without_any_record_of_their_owner(harness: Open) -> None:
    """Rows of a dead process are sent again once their lease is over, not before, by a process of the same name."""
    post = Postroad()
    post.sender("mail", timeout=10, lease=15)(lambda d: None)
    mail = Kind("mail", Any)
    h = harness(post)
    with post.begin() as tx:
        for n in range(3):
            tx.send(mail, {}, key=f"k{n}")
    assert claim_and_die(post, "mail") == 3
    ends = h.clock.now + timedelta(seconds=15)
    for _ in range(14):
        h.advance(1)
    assert h.sent(mail) == []
    assert {row.due_at for row in post.dispatches.list()} == {ends}, "nobody renewed what is not his"
    h.advance(1)
    assert sorted((d.key, d.attempt, d.possible_duplicate) for d in h.sent(mail)) == [
        (f"k{n}", 2, True) for n in range(3)
    ]


@pytest.mark.acceptance
def test_a_batch_cut_by_a_kill_is_finished_by_the_next_process(processes: Processes, open_app: OpenApp) -> None:
    """SIGKILL after half of the rows: the next process sends the rest, and again only what was not settled, marked.

    That is at most what the concurrency lets be under way, and as much again whose results are being settled.
    """
    processes.write("""
@post.sender("mail", timeout=0.5, lease=2.1, concurrency=10, retry=Retry(attempts=3, first=0, cap=0))
async def mail(d):
    note(key=d.key, attempt=d.attempt, repeat=d.possible_duplicate)
""")
    post = open_app()
    post.elsewhere("mail")
    with post.begin() as tx:
        for n in range(400):
            tx.send("mail", {}, key=f"k{n}")
    first = processes.run()
    until(lambda: len(processes.journal()) >= 200, "half are sent")
    first.kill()
    assert first.wait() == -signal.SIGKILL
    second = processes.run()
    until(lambda: idle(post), "all are settled")
    second.terminate()
    assert second.wait() == 0, processes.said(1)
    sends = Counter(line["key"] for line in processes.journal())
    assert sends.keys() == {f"k{n}" for n in range(400)}
    assert sum(sends.values()) - 400 <= 2 * 10, "only what was not settled went out twice"
    assert all(line["repeat"] == (line["attempt"] > 1) for line in processes.journal())
    assert Counter(row.status for row in post.dispatches.list(limit=1_000)) == {"delivered": 400}


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_connections_that_break_during_recovery_skip_nothing(place: dict[str, Any], open_app: OpenApp) -> None:
    """The server ends every session while orphans are being taken over: all of them are, and none is passed over."""
    place["database"] += ("&" if "?" in place["database"] else "?") + f"application_name={place['schema']}"
    post = open_app()
    sent: list[str] = []

    @post.sender("mail", timeout=1, concurrency=5)
    async def mail(d: Dispatch[Any]) -> None:
        sent.append(d.key)
        await asyncio.sleep(0.002)

    with post.begin() as tx:
        for n in range(250):
            tx.send("mail", {}, key=f"k{n}", at=LONG_AGO)
    assert claim_and_die(post, "mail", now=post.database.clock.wall() - 3600 * SECOND) == 250
    operator = create_engine(place["database"].split("application_name=")[0].rstrip("?&"))
    with post.running():
        for part in (20, 80, 140):
            until(lambda part=part: len(sent) >= part, "some are recovered")
            with operator.begin() as conn:
                ended = conn.execute(
                    text(
                        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = :name"
                    ),
                    {"name": place["schema"]},
                ).scalar_one()
                assert ended
        until(lambda: set(sent) == {f"k{n}" for n in range(250)}, "all are recovered")
        until(lambda: _readable(post), "all are settled")
    operator.dispose()


def _readable(post: Postroad) -> bool:
    try:
        return idle(post)
    except Exception:  # a connection that was broken is noticed when it is used
        return False


def test_what_a_leaving_process_gives_back_is_ended_by_its_successor(open_app: OpenApp) -> None:
    """In a rolling restart the old process claims nothing more, and what its grace cut short is sent by the new one."""
    old, new = open_app(), open_app()
    begun = threading.Event()
    sent: list[tuple[str, int]] = []

    @old.sender("mail", timeout=30)
    async def stuck(d: Dispatch[Any]) -> None:
        begun.set()
        await asyncio.sleep(30)

    new.sender("mail", timeout=30)(lambda d: sent.append((d.key, d.attempt)))

    async def restart() -> None:
        leave, stay = asyncio.Event(), asyncio.Event()
        leaving = asyncio.ensure_future(old.runtime(grace=SECOND // 20).run(leave))
        async with old.begin() as tx:
            tx.send("mail", {}, key="k")
        while not begun.is_set():
            await asyncio.sleep(0.01)
        staying = asyncio.ensure_future(new.runtime().run(stay))
        leave.set()
        await leaving
        while not sent:
            await asyncio.sleep(0.01)
        stay.set()
        await staying

    asyncio.run(restart())
    row = new.dispatches.get("k")
    assert row is not None
    assert (row.status, sent) == ("delivered", [("k", 2)])


def lose_turn(h: Harness, lease: int) -> None:
    """Claim the waiting turns as a worker that then dies, and let its lease pass."""
    claimed = h.post.database.transact(
        queues.claim, stream_type="chat", token=h.post.entropy.token(), limit=10, batch=100, lease=lease
    )
    assert claimed.claims
    h.clock.advance(lease / SECOND)


def test_a_claimant_lost_on_the_last_attempt_blocks_nobody_behind(harness: Open) -> None:
    """The set goes dead with its reason and an alert, and what was published behind it is decided."""
    post = Postroad()
    seen: list[str] = []

    @post.turn("chat", attempts=2)
    def chat(t: Turn) -> None:
        seen.extend(e.key for e in t.events)

    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="killer")
    for _ in range(2):
        lose_turn(h, 30 * SECOND)
    with post.begin() as tx:
        for n in (2, 3):
            tx.publish("chat/1", NOTE, {"n": n}, key=f"e{n}")
    h.drain()
    failed, *rest = h.entries("chat/1")
    assert (failed.kind, failed.data["events"], failed.data["reason"]) == (
        "postroad.failed", ["killer"], "turn.dead.interrupted",
    )  # fmt: skip
    assert [e.key for e in rest] == seen == ["e2", "e3"]
    assert [a.code for a in post.database.read(alerts.list_)] == ["turn.dead"]


def test_a_send_lost_on_its_last_attempt_is_dead_and_told(harness: Open) -> None:
    """Five claimants that all died are five attempts, each in the history, then a dead letter and an alert."""
    post = Postroad()
    post.sender("mail", timeout=1, retry=Retry(attempts=5))(lambda d: None)
    h = harness(post)
    with post.begin() as tx:
        tx.send("mail", {}, key="k")
    for _ in range(5):
        assert claim_and_die(post, "mail") == 1
        h.clock.advance(6)
    h.drain()
    row = post.dispatches.get("k")
    assert row is not None
    assert (row.status, row.reason, row.attempt) == ("dead_letter", "dispatch.dead_letter.lease_lost", 5)
    assert row.last_error == "the lease of attempt 5 of 5 was lost"
    assert sum("was lost" in one["summary"] for one in row.history) == 5
    assert [a.code for a in post.database.read(alerts.list_)] == ["dispatch.dead_letter"]
