"""Delegations as a program's handlers have them: started by a turn, ended once, reported to who wanted it."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from postroad import (
    REPORT,
    TASK,
    Delegated,
    Delegation,
    Event,
    GiveUp,
    InvalidInput,
    KeyConflict,
    Kind,
    Postroad,
    Refused,
    RetryLater,
    StreamDeleted,
    Task,
    Turn,
)
from postroad.store import alerts, delegations, stream_views
from postroad.testing import Harness
from tests.engine.conftest import Open

NOTE = Kind("note", Any)
Decide = Callable[[Turn], Awaitable[None]]


class World:
    """An app with a stream type that wants things done and one that does them; a test says what its handlers do."""

    def __init__(self, **turn: Any) -> None:
        self.post = Postroad()
        self.chief: Decide = self.delegate
        self.worker: Decide = self.echo
        self.seen: list[str] = []

        @self.post.turn("chief", **turn)
        async def chief(turn: Turn) -> None:
            await self.chief(turn)

        @self.post.turn("sub", attempts=2)
        async def sub(turn: Turn) -> None:
            self.seen += [event.kind for event in turn.events]
            await self.worker(turn)

    async def delegate(self, turn: Turn) -> None:
        """Have each message done by a stream of its own, under the message's key."""
        for event in turn.events:
            if (told := NOTE.of(event)) is not None:
                turn.delegate(f"sub/{event.key}", told, key=event.key)

    async def echo(self, turn: Turn) -> None:
        """Be done with each task by saying it again."""
        for event in turn.events:
            if (task := TASK.of(event)) is not None:
                turn.finish(task.data, task=event)

    async def nothing(self, turn: Turn) -> None:
        """Leave whatever it is open."""

    def say(self, *keys: str, stream: str = "chief/1") -> None:
        """Publish messages that say their own key."""
        with self.post.begin() as tx:
            for key in keys:
                tx.publish(stream, NOTE, key, key=key)


def told(h: Harness, stream: str = "chief/1") -> list[tuple[str, str, Any, str | None]]:
    """(key, status, result, error) of the ends that stand in a stream's log."""
    ends = [end for entry in h.entries(stream) if (end := Delegated.of(entry)) is not None]
    return [(end.key, end.status, end.result, end.error) for end in ends]


def rows(h: Harness, stream: str = "chief/1") -> dict[str, Delegation]:
    """What a stream has delegated, by key."""
    return {row.key: row for row in h.post.database.read(delegations.of, stream, limit=1_000)}


def raised(h: Harness) -> list[str]:
    return [alert.code for alert in h.post.database.read(alerts.list_)]


def test_the_end_comes_back_as_a_report(harness: Open) -> None:
    """Work on another stream ends with one report that says its key, where it was done, and what came of it."""
    world = World()
    h = harness(world.post)
    world.say("a")
    h.drain()
    kinds = [entry.kind for entry in h.entries("chief/1")]
    assert kinds == ["note", "postroad.report"]
    report = h.entries("chief/1")[1]
    said = REPORT.of(report)
    assert said is not None
    assert (said.source, said.turn_kind, said.role, said.tools) == ("sub/a", "delegation", "assistant", [])
    assert Delegated.of(report) == Delegated(key="a", stream="sub/a", status="done", result="a")
    assert Delegated.of(h.entries("chief/1")[0]) is None
    (task,) = h.entries("sub/a")
    assert TASK.of(task) == Task(parent="chief/1", key="a", data="a", depth=1, timeout=86_400)
    row = rows(h)["a"]
    assert (row.status, row.stream, row.ended_at, row.note) == ("done", "sub/a", h.clock.now, "")
    assert row.deadline == row.created_at + timedelta(days=1)


def test_a_report_under_the_delegation_s_key_takes_nothing_from_it(harness: Open) -> None:
    """What somebody reports under the same key lands beside the delegation's end, not in its place."""
    world = World()
    h = harness(world.post)

    async def delegate(turn: Turn) -> None:
        if NOTE.of(turn.events[0]):
            turn.delegate("sub/1", None, key="job")

    async def finish(turn: Turn) -> None:
        h.post.report("chief/1", "half of it", key="job", wait=0)
        turn.finish("all of it")

    world.chief, world.worker = delegate, finish
    world.say("a")
    h.drain()
    reports = [entry.key for entry in h.entries("chief/1") if REPORT.of(entry) is not None]
    assert reports == ["job", "postroad.delegation:job"]
    assert told(h) == [("job", "done", "all of it", None)]


def test_a_task_may_take_several_turns(harness: Open) -> None:
    """A turn that does not finish its task leaves it open; any later turn of the stream finishes it."""
    world = World()
    h = harness(world.post)
    open_tasks: list[list[str]] = []

    async def slowly(turn: Turn) -> None:
        open_tasks.append([task.key for task in turn.tasks()])
        if any(TASK.of(event) for event in turn.events):
            turn.set_timer("later", after=600)
        else:
            turn.finish({"took": 600})

    world.worker = slowly
    world.say("a")
    h.drain()
    assert (told(h), rows(h)["a"].status) == ([], "open")
    h.advance(600)
    assert told(h) == [("a", "done", {"took": 600}, None)]
    assert open_tasks == [["a"], ["a"]]


def test_a_task_that_fails_says_why(harness: Open) -> None:
    """`finish(error=…)` ends it as failed."""
    world = World()
    h = harness(world.post)

    async def fail(turn: Turn) -> None:
        turn.finish(error="no such customer")

    world.worker = fail
    world.say("a")
    h.drain()
    assert told(h) == [("a", "failed", None, "no such customer")]


@pytest.mark.parametrize("error", [GiveUp("cannot be read"), RetryLater("the model is down", after=1)])
def test_a_task_that_goes_dead_has_failed(harness: Open, error: Exception) -> None:
    """A task whose turn is given up ends as failed in the same commit, with the error."""
    world = World()
    h = harness(world.post)

    async def fail(turn: Turn) -> None:
        raise error

    world.worker = fail
    world.say("a")
    h.advance(60)
    ((key, status, result, why),) = told(h)
    assert (key, status, result) == ("a", "failed", None)
    assert str(error) in (why or "")
    assert why is not None
    assert why.startswith("turn.dead.")
    assert raised(h) == ["turn.dead"]


def test_a_task_whose_turn_is_not_run_again_has_failed(harness: Open) -> None:
    """A turn that acted and is shown instead of repeated, or decides what was decided before, fails its task."""
    world = World()
    mails: list[str] = []

    @world.post.tool(effect="unsafe")
    async def mail(to: str) -> None:
        mails.append(to)

    world.post.elsewhere("sms")
    h = harness(world.post)

    async def act(turn: Turn) -> None:
        await turn.call(mail, turn.subject)
        raise RetryLater("the model is down")

    world.worker = act
    world.say("a")
    h.advance(60)

    async def repeat(turn: Turn) -> None:
        turn.send("sms", {}, key="the same")

    world.worker = repeat
    world.say("b")
    h.drain()
    world.say("c")
    h.drain()
    assert mails == ["a"]
    assert [(key, status, why) for key, status, _, why in told(h)] == [
        ("a", "failed", "turn.interrupted.effects: the model is down"),
        ("c", "failed", "dispatch key 'the same' exists already"),
    ]
    assert rows(h)["b"].status == "open"


def test_only_what_the_commit_says_counts(harness: Open) -> None:
    """A turn that finishes its task and then fails has finished nothing."""
    world = World()
    h = harness(world.post)
    fails = iter([RetryLater("again")])

    async def decide(turn: Turn) -> None:
        turn.finish(turn.attempt)
        for error in fails:
            raise error

    world.worker = decide
    world.say("a")
    h.advance(60)
    assert told(h) == [("a", "done", 2, None)]


def test_the_deadline_ends_it(harness: Open) -> None:
    """What is not finished in time is timed out by then, never early; a late result adds nothing and is noted."""
    world = World()
    h = harness(world.post)

    async def briefly(turn: Turn) -> None:
        if NOTE.of(turn.events[0]):
            turn.delegate("sub/a", "hurry", key="a", timeout=100)

    world.chief, world.worker = briefly, world.nothing
    world.say("go")
    h.advance(99)
    assert (told(h), rows(h)["a"].status) == ([], "open")
    h.advance(1)
    assert told(h) == [("a", "timed_out", None, "it was not finished in time")]

    async def late(turn: Turn) -> None:
        turn.finish("here it is")

    world.worker = late
    with h.post.begin() as tx:
        tx.publish("sub/a", NOTE, "late", key="late")
    h.drain()
    assert [key for key, *_ in told(h)] == ["a"]
    row = rows(h)["a"]
    assert (row.status, row.note) == ("timed_out", "done came too late")
    assert raised(h) == []


def test_a_task_is_not_begun_after_its_deadline(harness: Open) -> None:
    """A stream that comes to a task too late does not begin what nobody waits for any more; its log says so."""
    world = World()
    h = harness(world.post)

    async def briefly(turn: Turn) -> None:
        if NOTE.of(turn.events[0]):
            turn.delegate("sub/a", "hurry", key="a", timeout=100)

    async def busy(turn: Turn) -> None:
        if turn.attempt == 1:
            raise RetryLater("busy", after=3_600)

    world.chief, world.worker = briefly, busy
    world.say("before it", stream="sub/a")
    h.drain()
    world.say("go")
    h.advance(7_200)
    assert world.seen == ["note", "note"]
    noop = h.entries("sub/a")[-1]
    assert (noop.kind, noop.data["reason"]) == ("postroad.noop", "its time was over before it began")
    assert [(key, status) for key, status, *_ in told(h)] == [("a", "timed_out")]
    assert rows(h)["a"].note == ""


def test_what_was_stopped_is_cancelled(harness: Open) -> None:
    """Stopping the stream that works ends what it works at and what waits there; what comes after it is done."""
    world = World()
    h = harness(world.post)

    async def delegate(turn: Turn) -> None:
        for event in turn.events:
            if NOTE.of(event) is not None:
                turn.delegate("sub/1", event.key, key=event.key)

    world.chief, world.worker = delegate, world.nothing
    world.say("at work")
    h.drain()
    assert rows(h)["at work"].status == "open"
    world.worker = world.echo
    with h.post.begin() as tx:
        tx.stop_stream("sub/1")
    world.say("after it")
    h.drain()
    assert told(h) == [
        ("at work", "cancelled", None, "its stream was stopped"),
        ("after it", "done", "after it", None),
    ]


def test_a_waiting_task_is_withdrawn_with_its_stream(harness: Open) -> None:
    """A stop takes a task that nobody has begun as it takes messages, and whoever wanted it hears that."""
    world = World()
    h = harness(world.post)

    async def both(turn: Turn) -> None:
        for event in turn.events:
            if NOTE.of(event) is not None:
                turn.delegate("sub/1", event.key, key=event.key)
                turn.stop_stream("sub/1")

    world.chief = both
    world.say("a")
    h.drain()
    assert world.seen == []
    assert told(h) == [("a", "cancelled", None, "its stream was stopped")]
    dead = h.post.database.read(stream_views.dead, "sub/1", limit=9)
    assert [(event.kind, event.reason) for event in dead] == [("postroad.task", "turn.withdrawn")]


def test_a_running_task_is_cancelled_when_its_stream_is_stopped(harness: Open) -> None:
    """A stop that comes while the task's turn runs ends the turn, and the delegation as cancelled."""
    world = World()
    h = harness(world.post)

    async def stopped(turn: Turn) -> None:
        with h.post.begin() as tx:
            tx.stop_stream(turn.stream)
        turn.finish("too late")

    world.worker = stopped
    world.say("a")
    h.drain()
    ((key, status, result, _),) = told(h)
    assert (key, status, result) == ("a", "cancelled", None)


def test_deleting_the_stream_cancels_what_it_was_to_do(harness: Open) -> None:
    """A deletion ends what its stream works at in the same transaction."""
    world = World()
    h = harness(world.post)
    world.worker = world.nothing
    world.say("a", "b")
    h.drain()
    with h.post.begin() as tx:
        tx.delete_stream("sub/a")
    assert rows(h)["a"].status == "cancelled"
    assert h.post.streams.delete("sub/b", actor="ann", reason="asked to")
    h.drain()
    assert told(h) == [
        ("a", "cancelled", None, "its stream was deleted"),
        ("b", "cancelled", None, "its stream was deleted"),
    ]


def test_a_stream_may_finish_and_delete_itself(harness: Open) -> None:
    """What a turn finishes is done, although the turn deletes its stream."""
    world = World()
    h = harness(world.post)

    async def leave(turn: Turn) -> None:
        turn.finish("all of it")
        turn.delete_stream(turn.stream)

    world.worker = leave
    world.say("a")
    h.drain()
    assert told(h) == [("a", "done", "all of it", None)]


def test_delegating_to_a_deleted_stream_is_refused(harness: Open) -> None:
    """At the commit if it is deleted, at the verb if this turn deletes it; nothing is written."""
    world = World()
    h = harness(world.post)
    with h.post.begin() as tx:
        tx.delete_stream("sub/a")
    world.say("a")
    h.advance(3_600)
    assert (told(h), rows(h)) == ([], {})
    failed = next(entry for entry in h.entries("chief/1") if entry.kind == "postroad.failed")
    assert "deleted" in failed.data["error"]
    seen: list[type[BaseException]] = []

    async def both_ways(turn: Turn) -> None:
        turn.delete_stream("sub/x")
        with pytest.raises(StreamDeleted):
            turn.delegate("sub/x", None)
        turn.delegate("sub/y", None)
        with pytest.raises(Refused) as refused:
            turn.delete_stream("sub/y")
        seen.append(refused.type)

    world.chief = both_ways
    world.say("b")
    h.drain()
    assert seen == [Refused]


def test_the_report_for_a_deleted_stream_is_dropped(harness: Open) -> None:
    """The end of what a deleted stream had wanted hinders nobody, and its row says that nobody was told."""
    world = World()
    h = harness(world.post)
    world.worker = world.nothing
    world.say("a")
    h.drain()
    with h.post.begin() as tx:
        tx.delete_stream("chief/1")

    async def finish(turn: Turn) -> None:
        turn.finish("done")

    world.worker = finish
    with h.post.begin() as tx:
        tx.publish("sub/a", NOTE, "go", key="go")
    h.drain()
    row = rows(h)["a"]
    assert (row.status, row.note) == ("done", delegations.DROPPED)
    assert raised(h) == ["report.dropped"]


def test_the_same_once_more_changes_nothing(harness: Open) -> None:
    """Delegating the same under the same key stands as the first one, while it is open and after its end."""
    world = World()
    h = harness(world.post)

    async def again(turn: Turn) -> None:
        if NOTE.of(turn.events[0]) is not None:
            first, second = (turn.delegate("sub/1", {"n": 1}, key="k") for _ in range(2))
            assert first is not second

    world.chief = again
    world.say("a")
    h.drain()
    world.say("b")
    h.drain()
    assert told(h) == [("k", "done", {"n": 1}, None)]
    assert len(rows(h)) == 1


@pytest.mark.parametrize(("stream", "task"), [("sub/1", {"n": 2}), ("sub/2", {"n": 1})])
def test_another_task_under_the_same_key_is_a_conflict(harness: Open, stream: str, task: Any) -> None:
    """Other content, or another stream, is refused at the verb, in the same turn and later: a handler goes on."""
    world = World()
    h = harness(world.post)
    refused: list[str] = []

    async def decide(turn: Turn) -> None:
        message = NOTE.of(turn.events[0])
        if message == "a":
            turn.delegate("sub/1", {"n": 1}, key="k")
            with pytest.raises(KeyConflict) as conflict:
                turn.delegate(stream, task, key="k")
            refused.append(conflict.value.key)
        elif message == "b":
            with pytest.raises(KeyConflict, match=r"chief/1 has delegated .* before.*another key") as conflict:
                turn.delegate(stream, task, key="k")
            refused.append(conflict.value.key)
            turn.delegate(stream, task, key="k2")

    world.chief = decide
    world.say("a")
    h.drain()
    world.say("b")
    h.drain()
    assert refused == ["k", "k"]
    assert sorted(key for key, *_ in told(h)) == ["k", "k2"]


def test_no_more_than_the_fan_out(harness: Open) -> None:
    """The one above is refused at the verb, counting what earlier turns left open; a known key is no new one."""
    world = World()
    world.post.delegation("chief", fan_out=3)
    h = harness(world.post)
    said: list[str] = []

    async def widely(turn: Turn) -> None:
        message = NOTE.of(turn.events[0])
        if message == "first":
            for n in range(2):
                turn.delegate("sub/1", n, key=f"{n}")
        elif message == "second":
            turn.delegate("sub/1", 0, key="0")
            turn.delegate("sub/1", 2, key="2")
            turn.delegate("sub/1", 2, key="2")
            turn.delegate("sub/1", 1, key="1")
            with pytest.raises(Refused) as refused:
                turn.delegate("sub/1", 3)
            said.append(str(refused.value))
            assert [row.key for row in turn.delegations()] == ["0", "1"]

    world.chief, world.worker = widely, world.nothing
    world.say("first")
    h.drain()
    world.say("second")
    h.drain()
    assert said == ["chief/1 has 3 delegations open; no more may be."]
    assert sorted(rows(h)) == ["0", "1", "2"]


def test_room_comes_back_with_the_ends(harness: Open) -> None:
    """What has ended counts no more."""
    world = World()
    world.post.delegation("chief", fan_out=1)
    h = harness(world.post)
    for key in ("a", "b", "c"):
        world.say(key)
        h.drain()
    assert [key for key, *_ in told(h)] == ["a", "b", "c"]


def test_no_deeper_than_the_depth(harness: Open) -> None:
    """A stream that was delegated to may delegate in turn, down to the depth; the next level is refused."""
    world = World()
    h = harness(world.post)
    said: list[str] = []

    async def deeper(turn: Turn) -> None:
        for event in turn.events:
            if (task := TASK.of(event)) is not None:
                try:
                    turn.delegate(f"sub/{task.depth + 1}", None, key="k")
                except Refused as refused:
                    said.append(str(refused))
                    turn.finish(task.depth)

    async def start(turn: Turn) -> None:
        if NOTE.of(turn.events[0]) is not None:
            turn.delegate("sub/1", None, key="k")

    world.chief, world.worker = start, deeper
    world.say("a")
    h.drain()
    assert said == ["sub/5 is 5 delegations deep; no more than 5 may be."]
    assert told(h, "sub/4") == [("k", "done", 5, None)]
    assert sorted(rows(h, f"sub/{n}")["k"].depth for n in range(1, 5)) == [2, 3, 4, 5]


def test_a_parent_that_asks_for_it_is_woken(harness: Open) -> None:
    """With `wake_on_report` the end is an event to decide on; without it it lands and runs nothing."""
    woken: list[Delegated] = []
    for wakes in (False, True):
        world = World(wake_on_report=wakes)
        h = harness(world.post, seed=int(wakes))

        async def decide(turn: Turn, world: World = world) -> None:
            woken.extend(end for event in turn.events if (end := Delegated.of(event)) is not None)
            await world.delegate(turn)

        world.chief = decide
        world.say(f"{wakes}")
        h.drain()
    assert [(end.key, end.status) for end in woken] == [("True", "done")]


def test_fifty_that_finish_while_the_parent_is_in_a_long_turn(harness: Open) -> None:
    """All fifty land behind the turn that was under way, in the order in which they ended, none twice."""
    post = Postroad()
    begun, ended = asyncio.Event(), list[str]()
    holder: list[Harness] = []

    @post.turn("chief", timeout=900, lease=900)
    async def chief(turn: Turn) -> None:
        message = NOTE.of(turn.events[0])
        if message == "go":
            for n in range(50):
                turn.delegate(f"sub/{n}", n, key=f"k{n}")
            turn.publish(turn.stream, NOTE, "long", key="long")
        elif message == "long":
            begun.set()
            while any(row.status == "open" for row in rows(holder[0]).values()):
                await asyncio.sleep(0)
            holder[0].clock.advance(600)
            turn.record("reply", {"after": 600})

    @post.turn("sub", concurrency=50)
    async def sub(turn: Turn) -> None:
        await begun.wait()
        turn.finish(turn.subject)
        ended.append(f"k{turn.subject}")

    h = harness(post)
    holder.append(h)
    with post.begin() as tx:
        tx.publish("chief/1", NOTE, "go", key="go")
    h.drain()
    entries = h.entries("chief/1")
    assert [entry.kind for entry in entries[:3]] == ["note", "note", "reply"]
    assert [entry.kind for entry in entries[3:]] == ["postroad.report"] * 50
    assert len(ended) == 50
    assert sorted(key for key, *_ in told(h)) == sorted(f"k{n}" for n in range(50))
    assert [result for _, _, result, _ in told(h)] == [key.removeprefix("k") for key, *_ in told(h)]
    received = [entry.received_at for entry in entries[3:]]
    assert received == sorted(received)
    assert raised(h) == []


def test_several_open_tasks_have_to_be_told_apart(harness: Open) -> None:
    """Of several tasks `finish` must say which; each is finished once in a turn, by its event or as it is listed."""
    world = World()
    h = harness(world.post)
    said: list[str] = []

    async def delegate(turn: Turn) -> None:
        for event in turn.events:
            if NOTE.of(event) is not None:
                turn.delegate("sub/1", event.key, key=event.key)

    async def decide(turn: Turn) -> None:
        first, second = turn.tasks()
        with pytest.raises(Refused) as several:
            turn.finish("which?")
        turn.finish("one", task=turn.events[0])
        with pytest.raises(Refused) as twice:
            turn.finish("one", task=first)
        said.extend([str(several.value), str(twice.value)])
        turn.finish("two")
        assert second.key == "b"

    world.chief, world.worker = delegate, decide
    world.say("a", "b")
    h.drain()
    assert told(h) == [("a", "done", "one", None), ("b", "done", "two", None)]
    assert "several tasks open" in said[0]
    assert "finished 'a' of chief/1 before" in said[1]


def test_what_is_no_task_is_refused(harness: Open) -> None:
    """What nobody delegated cannot be finished; values that cannot be stored name their field."""
    world = World()
    h = harness(world.post)
    fields: list[str] = []

    async def decide(turn: Turn) -> None:
        with pytest.raises(Refused, match="Nothing was delegated to chief/1"):
            turn.finish("x")
        attempts: list[Callable[[], object]] = [
            lambda: turn.finish("x", task=turn.events[0]),
            lambda: turn.finish("x", task=Event(stream="sub/1", key="k", kind="postroad.task", raw="{}")),
            lambda: turn.finish("x", error="both"),
            lambda: turn.finish(error=""),
            lambda: turn.finish(error=3),  # type: ignore[arg-type]
            lambda: turn.finish(float("nan")),
            lambda: turn.delegate("sub", None),
            lambda: turn.delegate("sub/1", float("nan")),
            lambda: turn.delegate("sub/1", None, key="postroad.x"),
            lambda: turn.delegate("sub/1", None, timeout=0),
        ]
        for attempt in attempts:
            with pytest.raises(InvalidInput) as refused:
                attempt()
            fields.append(refused.value.about["field"])
        with pytest.raises(Refused, match="does not delegate to itself"):
            turn.delegate(turn.stream, None)

    world.chief = decide
    world.say("a")
    h.drain()
    assert fields == ["task", "task", "error", "error", "error", "result", "stream", "task", "key", "timeout"]
    assert rows(h) == {}


def test_a_task_that_a_filter_answers_has_failed(harness: Open) -> None:
    """Nobody works at it: whoever wanted it hears the reason, instead of waiting for the deadline."""
    world = World()

    @world.post.filter("sub", TASK)
    def refuse(event: Event) -> str | None:
        return "closed on Sundays"

    h = harness(world.post)
    world.say("a")
    h.drain()
    assert world.seen == []
    assert told(h) == [("a", "failed", None, "closed on Sundays")]


def test_bounds_are_declared_once_and_are_numbers() -> None:
    """Bounds that make no sense are refused, and so is a second word on the same type."""
    post = Postroad()
    for given in ({"depth": 0}, {"fan_out": 0}, {"depth": True}, {"fan_out": "many"}):
        with pytest.raises(InvalidInput):
            post.delegation("chief", **given)  # type: ignore[arg-type]
    post.delegation("chief", depth=2)
    with pytest.raises(Refused):
        post.delegation("chief", depth=3)
