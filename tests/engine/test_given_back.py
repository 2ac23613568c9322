"""What a process has claimed and has not begun when it must end: as if nobody had claimed it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad import Dispatch, Kind, Postroad, Unreachable
from postroad.engine.dispatcher import Dispatcher
from postroad.engine.loop import Step
from postroad.engine.running import build
from postroad.model.rows import Hold
from postroad.store import dispatch_claims, dispatch_why, gates
from postroad.testing.contracts.dispatches import history
from tests.engine.conftest import Open

OLD: Kind[Any] = Kind("post", Any)
MAIL: Kind[Any] = Kind("mail", Any, aliases=["post"])


class Mailer:
    """An app that counts what its sender was called with, and a dispatcher of it that is told to end."""

    def __init__(self, enter: Open, **sender: Any) -> None:
        self.post = Postroad()
        self.down = False
        self.tried: list[str] = []

        @self.post.sender(MAIL, **sender)
        def mail(d: Dispatch[Any]) -> None:
            self.tried.append(d.key)
            if self.down:
                raise Unreachable("refused")

        self.harness = enter(self.post, senders="run")

    def send(self, kind: Kind[Any], *keys: str) -> None:
        with self.post.begin() as tx:
            for key in keys:
                tx.send(kind, {}, key=key)

    def claims_and_ends(self) -> None:
        """The end comes between the claim and the first attempt."""
        (dispatcher,) = (loop for loop in build(self.post.parts()) if isinstance(loop, Dispatcher))
        dispatcher.abandon("shutdown")

        async def work() -> None:
            assert await dispatcher.step() is not Step.NOTHING
            await dispatcher.finish()

        asyncio.run(work())


@pytest.mark.parametrize("on_unknown", ["resend", "park"])
def test_what_had_not_begun_counts_as_nothing(harness: Open, on_unknown: str) -> None:
    """Nothing was sent, so it is neither an attempt nor unclear: it is not parked, and the next process sends it."""
    mailer = Mailer(harness, on_unknown=on_unknown)
    mailer.send(MAIL, "k")
    mailer.claims_and_ends()
    row = mailer.post.dispatches.get("k")
    assert row is not None
    assert (row.status, row.reason, row.attempt) == ("pending", "dispatch.pending.released", 0)
    assert mailer.tried == []
    mailer.harness.drain()
    assert mailer.tried == ["k"]


@pytest.mark.parametrize("kind", [MAIL, OLD], ids=lambda kind: kind.name)
def test_a_probe_that_had_not_begun_leaves_its_place(harness: Open, kind: Kind[Any]) -> None:
    """Its gate waits for no lease: the next process tries at once, also if the dispatch bears a former name."""
    mailer = Mailer(harness)
    mailer.down = True
    mailer.send(kind, "k")
    mailer.harness.drain()
    mailer.down = False
    mailer.harness.clock.advance(1)
    mailer.claims_and_ends()
    (gate,) = mailer.post.database.read(gates.list_)
    assert (gate.kind, gate.probing, gate.failures) == ("mail", False, 1)
    mailer.harness.drain()
    assert mailer.tried == ["k", "k"]
    assert mailer.post.database.read(gates.list_) == []


class Slow:
    """Three messages of a mailer's whose claim and the look at it afterwards take their time."""

    def __init__(self, enter: Open, monkeypatch: pytest.MonkeyPatch, *, claim: float, look: float = 0) -> None:
        self.mailer = Mailer(enter, timeout=5, lease=30, on_unknown="park")
        self.mailer.send(MAIL, "a", "b", "c")
        self.given: list[int] = []
        clock = self.mailer.harness.clock

        waits = {dispatch_claims.claim: claim, dispatch_claims.recheck: look}  # the first time

        def after(fn: Callable[..., Any]) -> Callable[..., Any]:
            def slowly(*args: Any, **more: Any) -> Any:
                found = fn(*args, **more)
                clock.advance(waits.pop(fn, 0))
                return found

            return slowly

        def release(conn: Connection, holds: Sequence[Hold], **more: Any) -> list[str]:
            self.given.append(len(holds))
            return given_back(conn, holds, **more)

        given_back = dispatch_claims.release
        monkeypatch.setattr(dispatch_claims, "claim", after(dispatch_claims.claim))
        monkeypatch.setattr(dispatch_claims, "recheck", after(dispatch_claims.recheck))
        monkeypatch.setattr(dispatch_claims, "release", release)

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Claim, and before the look happens what there is."""
        (dispatcher,) = (loop for loop in build(self.mailer.post.parts()) if isinstance(loop, Dispatcher))

        async def work() -> None:
            assert await dispatcher.step() is not Step.NOTHING
            meanwhile()
            await dispatcher.finish()

        asyncio.run(work())

    def steal(self) -> None:
        """Their leases are over, and another process takes them."""
        self.mailer.harness.clock.advance(30)
        policy = self.mailer.post.parts().registry.senders["mail"].policy
        self.mailer.post.database.transact(dispatch_claims.claim, policy, names=["mail"], token="other", limit=9)

    def reasons(self) -> list[list[str]]:
        """What became of each after its claim."""
        post = self.mailer.post
        rows = [post.dispatches.get(key) for key in "abc"]
        return [[reason for *_, reason in post.database.read(history, row.id)[2:]] for row in rows if row is not None]


def test_what_has_waited_a_little_is_sent_after_a_look(harness: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that took a sixth of its lease is looked at once more, then its attempts begin."""
    slow = Slow(harness, monkeypatch, claim=8)
    slow.step()
    assert slow.mailer.tried == ["a", "b", "c"]
    assert slow.given == []


@pytest.mark.parametrize(("claim", "look"), [(28.0, 0.0), (8.0, 20.0)], ids=["the claim", "the look at it"])
def test_what_has_waited_too_long_is_given_back(
    harness: Open, monkeypatch: pytest.MonkeyPatch, claim: float, look: float
) -> None:
    """No attempt begins that may outlast its lease; all of a claim are given back in one transaction, uncounted."""
    slow = Slow(harness, monkeypatch, claim=claim, look=look)
    slow.step()
    assert slow.mailer.tried == []
    assert slow.given == [3]
    assert slow.reasons() == [["dispatch.pending.released"]] * 3


def test_a_lease_that_is_over_is_given_back_if_nobody_took_it(harness: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may only be sent once is not parked because a process was slow: nothing of it was sent."""
    slow = Slow(harness, monkeypatch, claim=45)
    slow.step()
    assert slow.reasons() == [["dispatch.pending.released"]] * 3


def test_what_was_lost_before_it_had_begun_is_known_as_unsent(harness: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has parked it, since it may have arrived; the history says that it has not, and `why` as well."""
    slow = Slow(harness, monkeypatch, claim=28)
    slow.step(slow.steal)
    assert slow.mailer.tried == []
    assert slow.reasons() == [["dispatch.dead_letter.unknown_outcome", "dispatch.stale.unsent"]] * 3
    post = slow.mailer.post
    said = post.database.read(dispatch_why.why, "a", now=slow.mailer.harness.clock.wall())
    assert "attempt 1 of 8 had not begun" in said
    assert "nothing of it was sent, resolve it with --resend" in said
    post.dispatches.resolve("a", "resend", actor="me")
    slow.mailer.harness.drain()
    assert slow.mailer.tried == ["a"]
