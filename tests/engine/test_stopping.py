"""Stopping a stream: what waits is withdrawn, what runs ends, what had effects is shown."""

import asyncio
from typing import Any

import pytest

from postroad import InvalidInput, Kind, Postroad, RetryLater, StreamDeleted, Turn
from postroad.store import alerts, runs, stream_views
from postroad.testing import Harness
from tests.engine.conftest import Open
from tests.engine.test_tools import World, ends, kinds, publish, recorded

NOTE = Kind("note", dict[str, int])


def stop(post: Postroad, stream: str = "chat/1") -> None:
    with post.begin() as tx:
        tx.stop_stream(stream)


def dead(h: Harness, stream: str = "chat/1") -> list[tuple[str, str | None]]:
    return [(e.event_id, e.reason) for e in reversed(h.post.database.read(stream_views.dead, stream, limit=50))]


def test_what_waits_is_withdrawn_and_what_comes_later_is_not(harness: Open) -> None:
    """Messages before the stop go dead as withdrawn, without an alert; messages after it are decided."""
    world = World()
    h = harness(world.post)
    publish(world.post, "a", "b")
    stop(world.post)
    publish(world.post, "c")
    seen: list[list[str]] = []

    async def decide(turn: Turn) -> None:
        seen.append([e.key for e in turn.events])

    world.decide = decide
    h.drain()
    assert seen == [["c"]]
    assert dead(h) == [("a", "turn.withdrawn"), ("b", "turn.withdrawn")]
    assert kinds(h) == ["postroad.stop", "postroad.noop", "note"]
    assert h.post.database.read(alerts.list_) == []


def test_a_running_turn_commits_nothing_and_shows_what_it_did(harness: Open) -> None:
    """A turn that is stopped while it runs ends with an entry on what it called; nothing it recorded is there."""
    world = World()
    h = harness(world.post)

    async def decide(turn: Turn) -> None:
        if turn.events[0].key != "a":
            return
        await turn.call(world.charge, 5)
        turn.record(NOTE, {"n": 1})
        stop(world.post)

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    publish(world.post, "b")
    h.drain()
    log = h.entries("chat/1")
    assert [e.kind for e in log] == ["note", "postroad.interrupted", "postroad.stop", "postroad.noop", "note"]
    assert log[1].data["reason"] == "turn.stopped"
    assert [o["tool"] for o in log[1].data["operations"]] == ["charge"]
    assert sorted(ends(h)) == ["committed", "committed", "stopped"]
    assert h.post.database.read(alerts.list_) == []


def test_a_stopped_turn_calls_nothing_more(harness: Open) -> None:
    """The next call of a turn that was stopped is refused before anything of it happens."""
    world = World()
    h = harness(world.post)

    async def decide(turn: Turn) -> None:
        if turn.events[0].key == "a":
            stop(world.post)
            await turn.call(world.mail, "bob")

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    assert world.calls == []
    assert recorded(h) == []
    assert kinds(h)[:2] == ["note", "postroad.interrupted"]


def test_a_turn_that_backs_off_is_ended_at_once(harness: Open) -> None:
    """A stopped turn that waits for its next attempt is not waited for, and its handler is not called."""
    world = World()
    h = harness(world.post)
    calls: list[int] = []

    async def decide(turn: Turn) -> None:
        calls.append(turn.attempt)
        await turn.call(world.charge, 5)
        raise RetryLater("model is down", after=600)

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    stop(world.post)
    h.drain()
    assert calls == [1]
    assert kinds(h)[:2] == ["note", "postroad.interrupted"]
    assert h.post.database.read(stream_views.queue, "chat/1") is None


def test_a_parked_turn_is_shown_when_it_is_stopped(harness: Open) -> None:
    """Stopping a parked stream needs no other word: the set is shown with what it did, and the stream is free."""
    world = World(when_interrupted="park")
    h = harness(world.post)

    async def decide(turn: Turn) -> None:
        await turn.call(world.mail, "bob")
        raise RetryLater("model is down")

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    stop(world.post)
    h.drain()
    assert kinds(h)[:2] == ["note", "postroad.interrupted"]
    assert world.calls == [("mail", "bob")]
    assert h.post.database.read(stream_views.queue, "chat/1") is None


def test_stopping_reaches_far_behind_a_batch(harness: Open) -> None:
    """All that waits before the stop is withdrawn, more than one turn would have taken too."""
    world = World()
    h = harness(world.post)
    publish(world.post, *(f"m{n}" for n in range(250)))
    stop(world.post)
    publish(world.post, "last")
    h.drain()
    assert len(h.post.database.read(stream_views.dead, "chat/1", limit=1_000)) == 250
    assert [e.key for e in h.entries("chat/1") if e.kind == "note"] == ["last"]


def test_timers_and_outcomes_stay(harness: Open) -> None:
    """What the runtime itself has to say is not withdrawn."""
    post = Postroad()
    seen: list[str] = []

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        seen.extend(e.kind for e in turn.events)

    h = harness(post)
    with post.begin() as tx:
        tx.set_timer("t", after=0, stream="chat/1")
    publish(post, "a")
    with post.begin() as tx:
        tx.set_timer("u", after=5, stream="chat/1")
    stop(post)
    h.advance(10)
    assert seen.count("postroad.timer_fired") == 2
    assert "note" not in seen


def test_stopping_what_is_idle_changes_nothing_else(harness: Open) -> None:
    """A stream with nothing under way gets an entry that it was stopped, and goes on as ever."""
    world = World()
    h = harness(world.post)
    stop(world.post)
    h.drain()
    publish(world.post, "a")
    h.drain()
    assert kinds(h) == ["postroad.stop", "postroad.noop", "note"]


def test_a_bad_or_deleted_stream_is_refused(harness: Open) -> None:
    """A stream's name is checked at the verb; a deleted stream when the block is left."""
    world = World()
    harness(world.post)
    bad: Any = "chat"
    with pytest.raises(InvalidInput), world.post.begin() as tx:
        tx.stop_stream(bad)
    with world.post.begin() as tx:
        tx.delete_stream("chat/9")
    with pytest.raises(StreamDeleted), world.post.begin() as tx:
        tx.stop_stream("chat/9")


async def test_a_turn_under_way_is_ended_within_a_moment(place: dict[str, Any]) -> None:
    """In real time: a handler that waits for a model is cancelled soon after its stream was stopped."""
    post = Postroad(place["database"], schema=place.get("schema"), migrate=True)
    began, ended = asyncio.Event(), asyncio.Event()

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        if turn.events[0].kind != "note":
            return
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()
            raise

    async with post.running():
        async with post.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": 1}, key="a")
        await asyncio.wait_for(began.wait(), 10)
        async with post.begin() as tx:
            tx.stop_stream("chat/1")
        await asyncio.wait_for(ended.wait(), 10)
    (run,) = [r for r in post.database.read(runs.of_stream, "chat/1") if r.attempt == 1 and str(r.end) == "stopped"]
    assert run.error is not None
    post.close()
