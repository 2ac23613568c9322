"""Whoever lost a claim, for whatever reason, changes nothing any more; whoever has it is left in peace."""

import asyncio
import threading
import time
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from postroad import Dispatch, Kind, Postroad, Retry, Turn
from postroad.model import failpoints
from postroad.model.clock import SECOND, FakeClock, SystemClock
from postroad.model.rows import Settled
from postroad.store import dispatch_claims, outbox, queues, runs, settle
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import (
    LEASE,
    POLICY,
    Waiting,
    another,
    claim,
    dispatch,
    outbox_rows,
    settlement,
)
from tests.cases.apps import OpenApp, idle, until

NOTE = Kind("note", dict[str, int])
_QUEUES = Statement("SELECT stream, until FROM {p}queues")


def queue_rows(conn: Connection) -> Any:
    """The claimed streams."""
    return _QUEUES(conn).all()


def two_lost_claims(database: Database, clock: FakeClock) -> list[Any]:
    """Two claims of a first process, whose leases are over."""

    def run(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return database.transact(fn, *args, **kwargs)

    run(outbox.insert, [dispatch(1), dispatch(2)], source="test", actor="ann", in_turn=False)
    held = claim(run, token="first")
    clock.advance(LEASE / SECOND)
    return held


def take_over(database: Database) -> list[str]:
    """Claim what is due as a second process; the keys."""
    won = database.transact(dispatch_claims.claim, POLICY, names=["mail"], token="second", limit=10)
    return [one.key for one in won.claims]


def state(database: Database, *keys: str) -> list[tuple[str, str | None]]:
    """(status, token) of dispatches."""
    rows = {row.key: row for row in database.read(outbox_rows)}
    return [(rows[key].status, rows[key].claim_token) for key in keys]


@pytest.fixture
def disarm() -> Any:
    """No failpoint stays armed."""
    yield
    failpoints.arm(None)


@pytest.mark.usefixtures("disarm")
def test_a_settle_between_a_takeovers_choice_and_its_write(database: Database, clock: FakeClock) -> None:
    """The settle waits, finds the claim gone and changes nothing; the new claim and its neighbours stay as they are."""
    held = two_lost_claims(database, clock)
    late: list[Waiting] = []
    first = another(database, clock)

    def reached(place: str) -> None:
        if place == "dispatch.selected" and not late:
            late.append(Waiting(database, lambda: first.transact(settle.settle, [settlement(held[0])])))
            late[0].blocked()

    failpoints.arm(reached)
    assert take_over(database) == ["key/1", "key/2"]
    assert late[0].result() == [Settled(held[0].id, "delivering", "dispatch.stale.transport_ok", True)]
    assert state(database, "key/1", "key/2") == [("delivering", "second")] * 2
    first.close()


@pytest.mark.usefixtures("disarm")
def test_a_takeover_between_a_settles_lock_and_its_write(database: Database, clock: FakeClock) -> None:
    """What is being settled is not taken over and stays delivered; the others of the batch are rescued."""
    held = two_lost_claims(database, clock)
    second = another(database, clock)
    taken: list[list[str]] = []
    rescue = threading.Thread(target=lambda: taken.append(take_over(second)))

    def reached(place: str) -> None:
        if place == "settle.locked":
            rescue.start()
            if not database.is_sqlite:  # there it waits for this transaction
                rescue.join()

    failpoints.arm(reached)
    database.transact(settle.settle, [settlement(held[0])])
    rescue.join()
    assert taken == [["key/2"]]
    assert state(database, "key/1", "key/2") == [("delivered", None), ("delivering", "second")]
    second.close()


def test_a_send_that_blocks_its_process_past_the_lease_is_no_second_success(open_app: OpenApp) -> None:
    """An async sender that never awaits loses its claim: another process sends, the late result is history only."""
    one, two = open_app(), open_app()
    begun, release = threading.Event(), threading.Event()
    stale: list[Any] = []
    one.observe(lambda name, values: stale.append(values) if name == "dispatch.settled" and values["stale"] else None)

    @one.sender("mail", timeout=0.1, lease=1.7)
    async def blocks(d: Dispatch[Any]) -> str:
        begun.set()
        release.wait(30)
        return "first"

    two.sender("mail", timeout=0.1, lease=1.7)(lambda d: "second")
    with one.running():
        with one.begin() as tx:
            tx.send("mail", {}, key="k")
        assert begun.wait(30)
        with two.running():
            until(lambda: _row(two, "k").status == "delivered", "the second process sent it")
        release.set()
        until(lambda: stale, "the first process was told")
    row = _row(two, "k")
    assert (row.status, row.attempt) == ("delivered", 2)
    assert [one["reason_code"].split(".")[1] for one in row.history] == [
        "pending", "delivering", "delivering", "delivered", "stale",
    ]  # fmt: skip


def _row(post: Postroad, key: str) -> Any:
    found = post.dispatches.get(key)
    assert found is not None
    return found


def test_a_send_whose_claim_its_own_process_took_over_is_waited_for(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sends of one dispatch are known to a process that ends: neither is cut off."""
    short = 3 * SECOND // 10
    real = dispatch_claims.claim
    monkeypatch.setattr(
        dispatch_claims,
        "claim",
        lambda conn, policy, **more: real(conn, msgspec.structs.replace(policy, lease=short), **more),
    )
    post = open_app()
    ended: list[str] = []

    @post.sender("mail", timeout=20, retry=Retry(attempts=3, first=0, cap=0))
    async def mail(d: Dispatch[Any]) -> None:
        try:
            while d.attempt == 1 and "2" not in ended:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5 if d.attempt == 1 else 0)  # so that the process ends meanwhile
            ended.append(str(d.attempt))
        except asyncio.CancelledError:
            ended.append(f"{d.attempt} cancelled")
            raise

    with post.begin() as tx:
        tx.send("mail", {}, key="k")
    with post.running():
        until(lambda: idle(post))
    assert ended == ["2", "1"]


def test_a_process_that_ends_renews_until_its_last_turn_is_settled(open_app: OpenApp) -> None:
    """During the grace a turn longer than its lease keeps its claim; nobody else starts it."""
    begun, release = threading.Event(), threading.Event()
    ran: list[int] = []

    def declare(post: Postroad, number: int) -> Postroad:
        @post.turn("chat", lease=1.2)
        def chat(t: Turn) -> None:
            ran.append(number)
            begun.set()
            release.wait(30)

        return post

    old, new = declare(open_app(), 1), declare(open_app(), 2)

    def leave() -> None:
        with old.running():
            assert begun.wait(30)

    leaving = threading.Thread(target=leave)
    with old.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1})
    leaving.start()
    assert begun.wait(30)
    with new.running():
        time.sleep(2.5)  # two leases: what must not happen has had its time
        assert leaving.is_alive()
        release.set()
        leaving.join()
    assert ran == [1]
    assert [str(r.end) for r in old.database.read(runs.of_stream, "chat/1")] == ["committed"]


def test_a_renewal_that_fails_for_a_lease_ends_the_run_before_another_begins(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unconfirmed is lost: the run is given up and told so before its lease ends, and what it still records is void."""
    one, two = open_app(), open_app()
    begun, release, over = threading.Event(), threading.Event(), threading.Event()
    lost: list[str] = []
    one.observe(lambda name, values: lost.append(values["subject"]) if name == "lease.lost" else None)
    stopping: list[bool] = []

    @one.turn("chat", lease=2.5)
    def first(t: Turn) -> None:
        begun.set()
        release.wait(30)
        stopping.append(t.stopping)
        try:
            t.record("by", {"n": 1})
        finally:
            over.set()

    two.turn("chat", lease=2.5)(lambda t: t.record("by", {"n": 2}))
    transact = one.database.transact

    def broken(fn: Any, *args: Any, **kwargs: Any) -> Any:
        if fn is queues.renew:
            raise OperationalError("renew", {}, Exception("the connection is blocked"))
        return transact(fn, *args, **kwargs)

    monkeypatch.setattr(one.database, "transact", broken)
    with one.running():
        with one.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": 1})
        assert begun.wait(30)
        until(lambda: lost, "the first process noticed")
        (claimed,) = one.database.read(queue_rows)
        assert one.database.clock.wall() < claimed.until, "before anybody else may begin"
    with two.running():
        until(lambda: len(two.read("chat/1")) == 2, "the second process decided")
    release.set()
    assert over.wait(30)
    assert stopping == [True]
    assert [e.data for e in two.read("chat/1")] == [{"n": 1}, {"n": 2}]
    assert sorted(str(r.end) for r in two.database.read(runs.of_stream, "chat/1")) == ["committed", "stale"]


def test_a_host_whose_clock_is_ahead_takes_no_live_claim(
    postgres_url: str, fresh_schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Postgres leases are judged by the server's clock: five minutes ahead, a host still waits for their end."""

    class Ahead(SystemClock):
        def wall(self) -> int:
            return super().wall() + 300 * SECOND

    one = Postroad(postgres_url, schema=fresh_schema, migrate=True)
    one.sender("mail", timeout=30, lease=60)(lambda d: None)
    with one.begin() as tx:
        tx.send("mail", {}, key="k")
    policy = one._registry.senders["mail"].policy
    mine = one.database.transact(dispatch_claims.claim, policy, names=["mail"], token="mine", limit=1)
    assert len(mine.claims) == 1
    monkeypatch.setattr("postroad.store.database.SystemClock", Ahead)
    ahead = Database(postgres_url, schema=fresh_schema)
    theirs = ahead.transact(dispatch_claims.claim, policy, names=["mail"], token="theirs", limit=1)
    assert (theirs.claims, theirs.ended) == ([], [])
    ahead.close()
    one.close()
