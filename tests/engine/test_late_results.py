"""What a sender comes to after its attempt was given up: a word in the history, and no change."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from postroad import Dispatch, Kind, Postroad, Retry
from postroad.engine.calls import Aborted, Call, CallResult, Done, InlineCalls, Raised, Returned, TimedOut
from postroad.engine.dispatcher import Dispatcher
from postroad.engine.loop import Step
from postroad.engine.running import LINGER_SECONDS, build
from postroad.model.clock import SECOND
from postroad.model.lifecycle import Reason
from postroad.surfaces import dispatch_reading
from postroad.testing import Harness
from postroad.testing.contracts.dispatches import dispatch, enqueue
from tests.cases.apps import OpenApp, open_app, until
from tests.engine.conftest import Open
from tests.engine.test_lost_answers import Happened, lose_one_answer

__all__ = ["open_app"]
MAIL: Kind[Any] = Kind("mail", Any)
ONCE = Retry(attempts=1)
OVER = Reason.MAX_ATTEMPTS, Reason.STALE_OK
Sender = Callable[[Dispatch[Any]], Any]


class GivesUp(InlineCalls):
    """Every call is given up at once, and is still at it: `late` are those that want to hear what it comes to."""

    def __init__(self, end: CallResult) -> None:
        self._end = end
        self.late: list[Done] = []

    def start(
        self, fn: Callable[[Any], Any], argument: Any, *, timeout: int, done: Done, late: Done | None = None
    ) -> Call:
        assert late is not None
        self.late.append(late)
        done(self._end)
        return super().start(lambda _: None, None, timeout=timeout, done=lambda _: None)


class Stage:
    """An app with one dispatch, whose attempts are given up."""

    def __init__(self, enter: Open, end: CallResult, **sender: Any) -> None:
        self.post = Postroad()
        self.post.sender(MAIL, **{"retry": ONCE, **sender})(lambda d: None)
        self.harness: Harness = enter(self.post)
        self.calls = GivesUp(end)
        parts = self.post.parts()
        parts.calls = self.calls
        (self.dispatcher,) = (loop for loop in build(parts) if isinstance(loop, Dispatcher))
        with self.post.begin() as tx:
            tx.send(MAIL, {}, key="k")

    async def give_up(self, *, settled: bool = True) -> Done:
        """Claim it and give its attempt up."""
        assert await self.dispatcher.step() is not Step.NOTHING
        if settled:
            await self.dispatcher.finish()
        return self.calls.late.pop()

    def row(self) -> Any:
        return self.post.dispatches.get("k")

    def reasons(self) -> list[str]:
        return reasons(self.post)

    def shown(self) -> dispatch_reading.DispatchView:
        now = self.harness.clock.wall()
        return self.post.database.read(dispatch_reading.dispatch, "k", whole=False, known=None, now=now)


def reasons(post: Postroad) -> list[str]:
    """The history of the one dispatch, without its beginning."""
    row = post.dispatches.get("k")
    assert row is not None
    return [change["reason_code"] for change in row.history][2:]


@pytest.mark.parametrize("settled", [True, False])
def test_a_late_success_speaks_against_another_attempt(harness: Open, settled: bool) -> None:
    """Settled with its end or after it: the dead letter stays one, says that it has arrived, and is not retried."""
    stage = Stage(harness, TimedOut(stuck=True))

    async def work() -> None:
        (await stage.give_up(settled=settled))(Returned("250 queued"))
        await stage.dispatcher.finish()

    asyncio.run(work())
    assert stage.row().status == "dead_letter"
    assert stage.row().last_error == "timeout after 10 s, still running"
    assert stage.reasons() == list(OVER)
    shown = stage.shown()
    assert "an attempt whose claim was over has sent it" in shown.why
    assert shown.attempts[-1].late == "attempt 1 sent after its claim was over"
    refused = stage.post.dispatches.retry("k", actor="ann")
    assert (refused.done, refused.refused) == (0, {"its history says that it has arrived": 1})
    assert stage.post.dispatches.retry("k", actor="ann", force=True).done == 1


def test_what_is_parked_is_not_resent_after_a_late_success(harness: Open) -> None:
    """A dispatch that may have arrived, and has, is resent by force only, and is no longer said to be unclear."""
    stage = Stage(harness, TimedOut(stuck=True), on_unknown="park")

    async def work() -> None:
        (await stage.give_up())(Returned(None))
        await stage.dispatcher.finish()

    asyncio.run(work())
    assert stage.reasons() == [Reason.UNKNOWN_OUTCOME, Reason.STALE_OK]
    assert "has sent it" in stage.shown().why
    assert not stage.post.dispatches.resolve("k", "resend", actor="ann")
    assert stage.post.dispatches.resolve("k", "sent", actor="ann")


def test_what_is_tried_again_says_that_it_was_sent(harness: Open) -> None:
    """A dispatch that backs off meanwhile goes on as it would have, and `why` tells."""
    stage = Stage(harness, TimedOut(stuck=True), retry=Retry(attempts=2, jitter=False))

    async def work() -> None:
        (await stage.give_up())(Returned(None))
        await stage.dispatcher.finish()

    asyncio.run(work())
    assert stage.row().status == "pending"
    why = stage.shown().why
    assert why.startswith("Backing off until")
    assert "has sent it" in why
    stage.harness.advance(60)
    assert stage.row().status == "delivered"


def test_a_late_failure_is_told_and_forbids_nothing(harness: Open) -> None:
    """What fails after it was given up stands in the history, and another attempt is nobody's worry."""
    stage = Stage(harness, TimedOut(stuck=True))

    async def work() -> None:
        (await stage.give_up())(Raised(ConnectionError("reset")))
        await stage.dispatcher.finish()

    asyncio.run(work())
    assert stage.reasons() == [Reason.MAX_ATTEMPTS, Reason.STALE_FAILED]
    assert stage.row().history[-1]["summary"].endswith("ConnectionError: reset")
    assert stage.post.dispatches.retry("k", actor="ann")


def test_its_stream_hears_of_a_late_success(harness: Open) -> None:
    """Of a dispatch that died and was sent after all its stream gets both outcomes, as of any late claimant."""
    stage = Stage(harness, TimedOut(stuck=True))
    with stage.post.begin() as tx:
        tx.withdraw("k")
    enqueue(stage.post.database.transact, dispatch(1, stream="order/1"))

    async def work() -> None:
        (await stage.give_up())(Returned(None))
        await stage.dispatcher.finish()

    asyncio.run(work())
    stream = stage.post.streams.get("order/1")
    assert stream is not None
    assert [event.key for event in stream.waiting] == ["out:key/1:dead_letter", "out:key/1:delivered"]


@Happened
def test_a_settle_of_what_came_late(harness: Open, monkeypatch: pytest.MonkeyPatch, happened: bool) -> None:
    """A COMMIT without an answer leaves the word there once, whether it had happened or not."""
    stage = Stage(harness, TimedOut(stuck=True))

    async def work() -> None:
        late = await stage.give_up()
        lost = lose_one_answer(stage.harness, monkeypatch, "settle", happened=happened)
        late(Returned(None))
        await stage.dispatcher.finish()
        assert lost

    asyncio.run(work())
    assert stage.reasons() == list(OVER)


@Happened
def test_a_settle_of_both(harness: Open, monkeypatch: pytest.MonkeyPatch, happened: bool) -> None:
    """The same where the end and what came after it are settled together."""
    stage = Stage(harness, TimedOut(stuck=True))
    lost = lose_one_answer(stage.harness, monkeypatch, "settle", happened=happened)

    async def work() -> None:
        (await stage.give_up(settled=False))(Returned(None))
        await stage.dispatcher.finish()

    asyncio.run(work())
    assert lost
    assert stage.reasons() == list(OVER)


def test_what_comes_after_the_end_is_told_to_the_log(harness: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Once the loops have ended nothing is settled any more: a success is a line in the log, a failure is nothing."""
    stage = Stage(harness, Aborted("shutdown", stuck=True))

    async def work() -> None:
        late = await stage.give_up()
        began = time.monotonic()
        await stage.dispatcher.linger(0.05)
        assert time.monotonic() - began < LINGER_SECONDS
        with caplog.at_level(logging.WARNING, "postroad"):
            late(Raised(ConnectionError("reset")))
            assert caplog.messages == []
            late(Returned(None))
        await stage.dispatcher.finish()

    asyncio.run(work())
    assert [message for message in caplog.messages if "too late to be recorded" in message] == caplog.messages != []
    assert stage.reasons() == [Reason.RELEASED]


async def swallows(release: threading.Event) -> str:
    """Ends soon after it was told to, and calls that a success."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        release.set()
    return "sent"


async def is_deaf(release: threading.Event) -> str:
    """Ends when it likes."""
    while not release.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue
    return "sent"


@pytest.mark.parametrize("colour", ["sync", "swallows", "deaf"])
def test_whatever_the_sender_is_like(open_app: OpenApp, colour: str) -> None:
    """A thread that outlives its timeout, and a task that ends well after its cancellation, soon or late, are heard."""
    post = open_app()
    release = threading.Event()

    def sync(d: Dispatch[Any]) -> str:
        release.wait(60)
        return "sent"

    async def awaited(d: Dispatch[Any]) -> str:
        return await (swallows if colour == "swallows" else is_deaf)(release)

    sender: Sender = sync if colour == "sync" else awaited
    post.sender(MAIL, timeout=0.2, retry=ONCE)(sender)
    with post.running():
        with post.begin() as tx:
            tx.send(MAIL, {}, key="k")
        until(lambda: reasons(post)[:1] == [Reason.MAX_ATTEMPTS], "it is given up")
        release.set()
        until(lambda: reasons(post) == list(OVER), "it is heard of")
    assert not post.dispatches.retry("k", actor="ann")


def test_a_drain_waits_a_moment_for_it(open_app: OpenApp) -> None:
    """A script that drains hears of what ends within a second after all else is done."""
    post = open_app()

    @post.sender(MAIL, timeout=0.1, retry=ONCE)
    def mail(d: Dispatch[Any]) -> None:
        time.sleep(0.4)  # longer than its timeout, on purpose

    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    drained = post.drain()
    assert (drained.dead_letter, drained.stale) == (1, 1)
    assert reasons(post) == list(OVER)


@pytest.mark.parametrize("returns", [True, False])
def test_a_process_that_ends_waits_a_moment_for_it(open_app: OpenApp, returns: bool) -> None:
    """What was cut short, and has been sent after all, is recorded if that is heard within a second; no longer."""
    post = open_app()
    begun, release = threading.Event(), threading.Event()

    @post.sender(MAIL, timeout=60)
    def mail(d: Dispatch[Any]) -> None:
        begun.set()
        release.wait(60)

    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")

    async def serve() -> None:
        stop = asyncio.Event()
        running = asyncio.ensure_future(post.runtime(only=["sends"], grace=SECOND // 20).run(stop))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        stop.set()
        while not reasons(post):
            await asyncio.sleep(0.01)
        if returns:
            release.set()
        await asyncio.wait_for(running, LINGER_SECONDS + 10)

    asyncio.run(serve())
    assert reasons(post) == [Reason.RELEASED, *([Reason.STALE_OK] if returns else [])]
    release.set()
