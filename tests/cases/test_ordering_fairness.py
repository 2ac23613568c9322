"""Order and fairness: who may overtake, who must wait, and who must never be skipped or starved."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from postroad import OUTCOME, Dispatch, Kind, Postroad, Retry, RetryLater, Turn
from postroad.model import failpoints
from postroad.model.clock import FakeClock
from postroad.store import dispatch_claims, inbox, outbox
from postroad.store.database import Database
from postroad.testing import Harness
from postroad.testing.contracts.dispatches import POLICY, dispatch
from postroad.testing.contracts.streams import Uses, event, names
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, int])


class Crash(BaseException):
    """The process died here."""


def dead_after(place: str, times: int) -> Callable[[str], None]:
    """From the moment at which a place is reached for the n-th time on nothing of this process goes on."""
    left = times

    def reached(name: str) -> None:
        nonlocal left
        left -= name == place
        if left <= 0:
            raise Crash

    return reached


def test_a_transaction_that_commits_late_is_not_skipped(database: Database, clock: FakeClock) -> None:
    """Rows with a lower position or time that become visible after higher ones were taken are taken all the same."""
    if database.is_sqlite:
        pytest.skip("two transactions that wrote cannot be open at once")
    uses = Uses()
    claim_mail = partial(dispatch_claims.claim, policy=POLICY, names=["mail"], limit=10)
    insert = partial(outbox.insert, source="test", actor="ann", in_turn=False, now=clock.wall())
    with database.engine.connect() as conn, conn.begin():
        bound = database.bind(conn)
        inbox.publish(bound, [event(101)], now=clock.wall())
        insert(bound, [dispatch(101)])
        uses.publish(database.transact, event(102), event(102, "load/2"))
        database.transact(lambda conn, now: insert(conn, [dispatch(102)]))
        assert [one.key for one in database.transact(claim_mail, token="t1").claims] == ["key/102"]
        uses.drain(database.transact, "first")
    assert [one.key for one in database.transact(claim_mail, token="t2").claims] == ["key/101"]
    assert names(uses.claim_one(database.transact, "t3").events) == ["e101"]


def test_what_is_far_in_the_future_holds_up_nothing(harness: Open) -> None:
    """A dispatch and a timer that are due in a week wait alone; later ones of the same stream that are due now go."""
    post = Postroad()
    post.sender("sms")(lambda d: None)

    @post.turn("chat")
    def chat(t: Turn) -> None:
        for seven_days in [e for e in t.events if e.kind == "note"]:
            t.send("sms", {}, key="week", after=7 * 86_400)
            t.send("sms", {}, key="now")
            t.send("sms", {}, key="second", after=1)
            t.set_timer("week", after=7 * 86_400)
            t.set_timer("minute", after=60, data={"of": seven_days.key})

    post.filter("chat", OUTCOME)(lambda e: "sent")
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1})
    h.drain()
    assert sent(h) == ["now"]
    h.advance(60)
    assert sent(h) == ["now", "second"]
    assert [e.key for e in h.entries("chat/1") if e.kind == "postroad.timer_fired"] == ["evt:minute"]
    h.advance(7 * 86_400)
    assert sent(h) == ["now", "second", "week"]


def test_a_failed_turn_is_not_overtaken_by_its_streams_later_events(harness: Open) -> None:
    """While a stream backs off its later events wait behind; other streams go on; then all are decided in order."""
    post = Postroad()
    seen: list[tuple[str, list[str]]] = []
    broken = ["chat/1"]

    @post.turn("chat")
    def chat(t: Turn) -> None:
        if t.stream in broken:
            raise RetryLater("not yet", after=30)
        seen.append((t.stream, [e.key for e in t.events]))

    h = harness(post)
    publish(post, "chat/1", "greeting")
    h.drain()
    publish(post, "chat/1", "answer", "goodbye")
    publish(post, "chat/2", "other")
    h.advance(20)
    assert seen == [("chat/2", ["other"])]
    broken.clear()
    h.advance(60)
    assert seen[1:] == [("chat/1", ["greeting"]), ("chat/1", ["answer", "goodbye"])]


def test_dispatches_without_a_lane_may_overtake(harness: Open) -> None:
    """A dispatch that waits for its next attempt holds up no other; each goes out at its own due time."""
    post = Postroad()
    post.sender("sms", retry=Retry(attempts=3, first=30, jitter=False))(lambda d: None)
    h = harness(post)
    with post.begin() as tx:
        for n in range(3):
            tx.send("sms", {}, key=f"m{n}", after=n / 1000)
    h.fail("sms", RetryLater("busy"))
    h.advance(1)
    assert sent(h) == ["m1", "m2"]
    h.advance(60)
    assert sent(h) == ["m1", "m2", "m0"]


def test_a_streams_burst_starves_no_other_stream(harness: Open) -> None:
    """Behind a thousand events of one stream another's only event has its turn after a few others, not after all."""
    post = Postroad()
    order: list[str] = []

    @post.turn("chat", concurrency=1)
    def chat(t: Turn) -> None:
        order.append(t.stream)
        h.clock.advance(0.05)

    h = harness(post)
    publish(post, "chat/burst", *(f"e{n}" for n in range(1_000)))
    h.clock.advance(1)
    publish(post, "chat/single", "e")
    h.drain()
    assert order.index("chat/single") <= 2
    assert order.count("chat/burst") == 10, "the burst takes what capacity is left, a hundred events at a time"


def test_a_kinds_burst_starves_no_other_kind(harness: Open) -> None:
    """Behind a thousand dispatches of one kind another kind's only one goes out within the first pass."""
    post = Postroad()
    post.sender("bulk", concurrency=4)(lambda d: None)
    post.sender("urgent", concurrency=4)(lambda d: None)
    h = harness(post)
    with post.begin() as tx:
        for n in range(200):
            tx.send("bulk", {}, key=f"b{n}")
    h.clock.advance(1)
    with post.begin() as tx:
        tx.send("urgent", {}, key="u")
    h.drain()
    order = sent(h)
    assert order.index("u") <= 4
    assert len(order) == 201


def test_dispatches_of_one_stream_become_due_in_the_order_of_its_turns(
    harness: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one sender at a time a stream's messages go out turn by turn, as its log has them."""
    post = Postroad()
    post.sender("sms", concurrency=1)(lambda d: None)

    @post.turn("chat")
    def chat(t: Turn) -> None:
        h.clock.advance(0.001)
        for e in t.events:
            if e.kind == "note":
                t.send("sms", {}, key=f"{e.key}/z")
                t.send("sms", {}, key=f"{e.key}/a")

    post.filter("chat", OUTCOME)(lambda e: "sent")
    h = harness(post)
    for key in ("e3", "e1", "e2"):
        publish(post, "chat/1", key)
    with monkeypatch.context() as patched:  # only turns
        patched.setattr(h, "_loops", [loop for loop in h._loops if loop.name == "worker"])
        patched.setattr("postroad.engine.worker.SET_MAX", 1)
        while h.drain().turns:
            pass
    h.drain()
    assert [key.partition("/")[0] for key in sent(h)] == ["e3", "e3", "e1", "e1", "e2", "e2"]


def test_a_crash_in_the_middle_of_a_decisions_dispatches_skips_none(harness: Open) -> None:
    """Of twenty dispatches of one decision seven were sent when the process died: the others follow, one repeats."""
    post = Postroad()
    attempts: list[Dispatch[Any]] = []
    post.sender("sms", concurrency=5)(attempts.append)

    @post.turn("chat")
    def chat(t: Turn) -> None:
        for n in range(20 if t.events[0].kind == "note" else 0):
            t.send("sms", {}, key=f"m{n:02}")

    post.filter("chat", OUTCOME)(lambda e: "sent")
    first = harness(post, senders="run")
    publish(post, "chat/1", "go")
    failpoints.arm(dead_after("dispatch.after_send", 7))
    try:
        with pytest.raises(Crash):
            first.drain()
    finally:
        failpoints.arm(None)
    second = harness(post, senders="run", seed=1, start=first.clock.now)
    second.advance(120)
    keys = [d.key for d in attempts]
    assert sorted(set(keys)) == [f"m{n:02}" for n in range(20)]
    assert len(keys) <= 20 + 5, "only what was sent and not settled is repeated"
    assert [d.possible_duplicate for d in attempts] == [d.key in keys[:n] for n, d in enumerate(attempts)]


def test_a_reader_that_stops_in_the_middle_of_a_commit_goes_on_behind_it(harness: Open) -> None:
    """A place in the log is one entry's own: a reader that saw seven of a turn's twenty reads the other thirteen."""
    post = Postroad()

    @post.turn("chat")
    def chat(t: Turn) -> None:
        for n in range(19):
            t.record("said", {"n": n})

    h = harness(post)
    publish(post, "chat/1", "go")
    h.drain()
    first = post.read("chat/1", limit=7)
    rest = post.read("chat/1", after=first[-1].seq)
    assert [e.seq for e in (*first, *rest)] == list(range(1, 21))


def publish(post: Postroad, stream: str, *keys: str) -> None:
    with post.begin() as tx:
        for key in keys:
            tx.publish(stream, NOTE, {"n": 1}, key=key)


def sent(h: Harness) -> list[str]:
    return [d.key for d in h._captured]
