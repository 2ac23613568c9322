"""Ordered lanes as a program uses them."""

import asyncio
import threading
from typing import Any

import pytest

from postroad import Dispatch, GiveUp, InvalidInput, Kind, Postroad, Retry, RetryLater
from postroad.model.clock import SECOND
from postroad.testing import Harness
from tests.engine.conftest import Open

MAIL = Kind("mail", dict[str, int])
STEADY = Retry(attempts=3, first=10, cap=100, jitter=False)


def app(**sender: Any) -> tuple[Postroad, list[int]]:
    """An app whose sender keeps the numbers it was given, and fails the ones it is told to fail."""
    post = Postroad()
    sent: list[int] = []
    failing: dict[int, list[Exception]] = sender.pop("failing", {})

    @post.sender(MAIL, retry=STEADY, **sender)
    def mail(d: Dispatch[dict[str, int]]) -> None:
        if failing.get(d.body["n"]):
            raise failing[d.body["n"]].pop()
        sent.append(d.body["n"])

    return post, sent


def send(post: Postroad, *numbers: int, lane: str | None = "chat/1") -> None:
    with post.begin() as tx:
        for number in numbers:
            tx.send(MAIL, {"n": number}, key=f"m{number}", lane=lane)


def opened(harness: Open, post: Postroad) -> Harness:
    return harness(post, senders="run")


def test_a_lane_keeps_its_order_over_retries(harness: Open) -> None:
    """What is behind a failing dispatch waits for it; what is in no lane, or in another one, does not."""
    post, sent = app(failing={1: [RetryLater("no"), RetryLater("no")]})
    h = opened(harness, post)
    send(post, 1, 2, 3)
    send(post, 8, lane="chat/2")
    send(post, 9, lane=None)
    h.drain()
    assert sorted(sent) == [8, 9]
    h.advance(60)
    assert sent[2:] == [1, 2, 3]


@pytest.mark.parametrize(("on_dead", "expected"), [("block", []), ("skip", [2])])
def test_a_dead_letter_in_a_lane(harness: Open, on_dead: Any, expected: list[int]) -> None:
    """It holds up its lane or is passed by, as its sender was declared."""
    post, sent = app(failing={1: [GiveUp("never")]}, on_dead=on_dead)
    h = opened(harness, post)
    send(post, 1, 2)
    h.drain()
    assert sent == expected


def test_a_lane_grows_while_it_is_sent(harness: Open) -> None:
    """What joins an empty lane, or one under way, comes in its turn."""
    post, sent = app()
    h = opened(harness, post)
    for first in range(0, 30, 3):
        send(post, first, first + 1)
        h.drain()
        send(post, first + 2)
    h.drain()
    assert sent == list(range(30))


@pytest.mark.parametrize("lane", ["", 3, "a\0b"])
def test_what_can_be_no_lane_is_refused(lane: Any) -> None:
    """A lane's name is a text that can be stored."""
    post, _ = app()
    with pytest.raises(InvalidInput, match="lane"), post.begin() as tx:
        tx.send(MAIL, {"n": 1}, lane=lane)


async def test_the_next_of_a_lane_goes_at_once(place: dict[str, Any]) -> None:
    """Whatever ends a head, sent, dead or expired, wakes the dispatcher for the next one; no poll is waited for."""
    post, sent = app(timeout=200, on_dead="skip", failing={3: [GiveUp("never")]})
    post.reconfigure(database=place["database"], schema=place.get("schema"))
    post._migrate = True
    async with post.begin() as tx:
        for n in range(8):
            tx.send(MAIL, {"n": n}, lane="a", expires=0 if n == 5 else None)
    stop = asyncio.Event()
    running = asyncio.ensure_future(post.runtime(poll=30 * SECOND).run(stop))
    async with asyncio.timeout(20):
        while len(sent) < 6:
            await asyncio.sleep(0.01)
    stop.set()
    await running
    post.close()
    assert sent == [0, 1, 2, 4, 6, 7]


def test_dispatchers_at_work_on_one_lane(place: dict[str, Any]) -> None:
    """Two apps' loops carry out one lane one by one, whoever of them gets each."""
    apps = [Postroad(place["database"], schema=place.get("schema"), migrate=True) for _ in range(2)]
    sent: list[int] = []
    under_way = threading.Semaphore(1)
    alone: list[bool] = []
    done = threading.Event()

    def mail(d: Dispatch[dict[str, int]]) -> None:
        alone.append(under_way.acquire(blocking=False))
        sent.append(d.body["n"])
        under_way.release()
        if len(sent) == 50:
            done.set()

    for post in apps:
        post.sender(MAIL, retry=STEADY)(mail)
    with apps[0].running(), apps[1].running():
        send(apps[0], *range(25))
        send(apps[1], *range(25, 50))
        assert done.wait(60)
    for post in apps:
        post.close()
    assert all(alone)
    assert sent == list(range(50))
