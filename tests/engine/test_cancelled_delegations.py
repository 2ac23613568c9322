"""Delegations that a person cancels: what becomes of the work, and of everything else on the stream that does it."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from postroad import TASK, InvalidInput, RetryLater, Turn
from postroad.store import audit, stream_views
from postroad.testing import Harness
from tests.engine.conftest import Open
from tests.engine.test_delegations import NOTE, World, raised, rows, told

WHY = "it was cancelled: not needed"


def cancel(h: Harness, key: str = "a", stream: str = "chief/1") -> Any:
    return h.post.delegations.cancel(stream, key, actor="ann", reason="not needed")


def gathered(world: World) -> None:
    """Have all that is wanted done by one stream."""

    async def delegate(turn: Turn) -> None:
        for event in turn.events:
            if NOTE.of(event) is not None:
                turn.delegate("sub/1", event.key, key=event.key)

    world.chief = delegate


def dead(h: Harness, stream: str) -> list[tuple[str, str | None]]:
    return [(event.kind, event.reason) for event in h.post.database.read(stream_views.dead, stream, limit=9)]


def kinds(h: Harness, stream: str) -> list[str]:
    return [entry.kind for entry in h.entries(stream)]


def test_work_that_nobody_has_begun_is_withdrawn(harness: Open) -> None:
    """The task ends as a message does whose stream is stopped, without an alert; what stands beside it is done."""
    world = World()
    gathered(world)
    h = harness(world.post)

    async def busy(turn: Turn) -> None:
        if turn.attempt == 1:
            raise RetryLater("one thing after the other", after=600)

    world.worker = busy
    world.say("first", stream="sub/1")
    h.drain()
    world.say("a", "b")
    h.drain()
    assert cancel(h).done
    h.drain()
    assert told(h) == [("a", "cancelled", None, WHY)]
    world.worker = world.echo
    h.advance(600)
    assert told(h) == [("a", "cancelled", None, WHY), ("b", "done", "b", None)]
    assert dead(h, "sub/1") == [("postroad.task", "turn.withdrawn")]
    noop = next(entry for entry in h.entries("sub/1") if entry.kind == "postroad.noop")
    assert noop.data["reason"] == "'a' of chief/1 was cancelled"
    assert kinds(h, "sub/1") == ["note", "postroad.task", "postroad.stop", "postroad.noop"]
    assert raised(h) == []


def test_a_turn_that_runs_for_it_is_ended(harness: Open) -> None:
    """It may call nothing more and records nothing; the log says what it did, and the next task is done."""
    world = World()
    h = harness(world.post)
    mails: list[str] = []

    @world.post.tool(effect="unsafe")
    async def mail(to: str) -> None:
        mails.append(to)

    async def at_work(turn: Turn) -> None:
        await turn.call(mail, "ann")
        cancel(h)
        turn.finish("all of it")
        await turn.call(mail, "bob")

    world.worker = at_work
    world.say("a")
    h.drain()
    assert mails == ["ann"]
    assert told(h) == [("a", "cancelled", None, WHY)]
    assert kinds(h, "sub/a") == ["postroad.task", "postroad.interrupted", "postroad.stop", "postroad.noop"]
    shown = h.entries("sub/a")[1].data
    assert (shown["reason"], [one["tool"] for one in shown["operations"]]) == ("turn.stopped", ["mail"])
    assert (rows(h)["a"].note, raised(h)) == ("", [])
    world.worker = world.echo
    with world.post.begin() as tx:
        tx.publish("sub/a", NOTE, "still there", key="n")
    h.drain()
    assert kinds(h, "sub/a")[-1] == "note"


def test_a_turn_that_only_decides_is_refused(harness: Open) -> None:
    """What it finishes comes too late by a moment, and nothing it recorded is there."""
    world = World()
    h = harness(world.post)

    async def at_work(turn: Turn) -> None:
        turn.record(NOTE, "written")
        turn.finish("all of it")
        cancel(h)

    world.worker = at_work
    world.say("a")
    h.drain()
    assert told(h) == [("a", "cancelled", None, WHY)]
    assert "note" not in kinds(h, "sub/a")


@pytest.mark.parametrize("way", ["backs off", "is parked"])
def test_a_turn_that_waits_for_another_attempt_is_ended(harness: Open, way: str) -> None:
    """It is neither waited for nor left to a person: its handler is not called again, and its stream is free."""
    world = World()
    calls = itertools.count(1)

    @world.post.tool(effect="unsafe")
    async def mail(to: str) -> None:
        pass

    @world.post.turn("desk", when_interrupted="park")
    async def desk(turn: Turn) -> None:
        next(calls)
        if way == "is parked":
            await turn.call(mail, "ann")
        raise RetryLater("the model is down", after=3_000)

    async def delegate(turn: Turn) -> None:
        if NOTE.of(turn.events[0]) is not None:
            turn.delegate("desk/1", None, key="a")

    world.chief = delegate
    h = harness(world.post)
    world.say("a")
    h.drain()
    cancel(h)
    h.drain()
    assert next(calls) == 2
    assert kinds(h, "desk/1") == ["postroad.task", "postroad.interrupted", "postroad.stop", "postroad.noop"]
    assert h.post.database.read(stream_views.queue, "desk/1") is None
    assert told(h) == [("a", "cancelled", None, WHY)]


def test_a_turn_that_has_begun_with_more_goes_on(harness: Open) -> None:
    """Ending it would take from others what they wait for: it decides on all, and its word on the task is too late."""
    world = World()
    gathered(world)
    h = harness(world.post)

    async def both(turn: Turn) -> None:
        if TASK.of(turn.events[0]):
            cancel(h)
        await world.echo(turn)

    world.worker = both
    world.say("a", "b")
    h.drain()
    assert told(h) == [("a", "cancelled", None, WHY), ("b", "done", "b", None)]
    assert rows(h)["a"].note == "done came too late"
    assert "postroad.interrupted" not in kinds(h, "sub/1")


def test_a_task_that_was_left_open_is_listed_no_more(harness: Open) -> None:
    """A later turn of the stream does not have it among its tasks; whoever wanted it hears one end."""
    world = World()
    h = harness(world.post)
    listed: list[int] = []

    async def later(turn: Turn) -> None:
        listed.append(len(turn.tasks()))
        if TASK.of(turn.events[0]):
            turn.set_timer("later", after=600)

    world.worker = later
    world.say("a")
    h.drain()
    cancel(h)
    h.advance(600)
    assert listed == [1, 0]
    assert told(h) == [("a", "cancelled", None, WHY)]


def test_the_end_that_there_is_stands(harness: Open) -> None:
    """Cancelled after its end, or once more, it says what it has ended as, and nobody is told anything."""
    world = World()
    h = harness(world.post)
    world.say("a")
    h.drain()
    answers = [cancel(h, key) for key in ("a", "b")]
    assert [(one.done, one.status, one.refused) for one in answers] == [
        (False, "done", "it has ended before: done"), (False, "", "there is no such delegation"),
    ]  # fmt: skip
    world.worker = world.nothing
    world.say("c")
    h.drain()
    first, second = asyncio.run(twice(h, "c"))
    assert (first.done, second.done, second.status) == (True, False, "cancelled")
    h.drain()
    assert [(key, status) for key, status, *_ in told(h)] == [("a", "done"), ("c", "cancelled")]
    found = h.post.database.read(audit.list_)
    assert [(row.action, row.subject, row.actor, row.reason) for row in found] == [
        ("delegation.cancel", "chief/1", "ann", "not needed")
    ]


async def twice(h: Harness, key: str) -> list[Any]:
    return [await h.post.delegations.acancel("chief/1", key, actor="ann", reason="not needed") for _ in range(2)]


def test_a_derived_key_is_a_key(harness: Open) -> None:
    """A delegation whose key was left out is cancelled under the one that it was given."""
    world = World()
    h = harness(world.post)

    async def delegate(turn: Turn) -> None:
        if NOTE.of(turn.events[0]) is not None:
            turn.delegate("sub/1", None)

    world.chief, world.worker = delegate, world.nothing
    world.say("a")
    h.drain()
    (row,) = h.post.delegations.list(status="open", stream="chief/1", to="sub/1")
    assert cancel(h, row.key).done
    assert asyncio.run(h.post.delegations.alist(status="cancelled"))[0].key == row.key
    assert h.post.delegations.list(after=(row.parent, row.key)) == []


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (lambda d: d.cancel("chief", "a", actor="ann"), "stream"),
        (lambda d: d.cancel("chief/1", "", actor="ann"), "key"),
        (lambda d: d.cancel("chief/1", "a", actor=""), "actor"),
        (lambda d: d.list(status="over"), "status"),
        (lambda d: d.list(to="sub"), "stream"),
        (lambda d: d.list(limit=0), "limit"),
        (lambda d: d.list(after=("chief/1", "")), "after"),
    ],
)
def test_what_cannot_be_is_refused(harness: Open, wrong: Callable[[Any], object], field: str) -> None:
    """A name or a number that cannot be is named."""
    h = harness(World().post)
    with pytest.raises(InvalidInput) as refused:
        wrong(h.post.delegations)
    assert refused.value.about["field"] == field
