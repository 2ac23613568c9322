"""What a process has claimed and has not begun when it must end: as if nobody had claimed it."""

import asyncio
from typing import Any

import pytest

from postroad import Dispatch, Kind, Postroad, Unreachable
from postroad.engine.dispatcher import Dispatcher
from postroad.engine.loop import Step
from postroad.engine.running import build
from postroad.store import gates
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

    def send(self, kind: Kind[Any], key: str) -> None:
        with self.post.begin() as tx:
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
