"""Tools that turns call: what is recorded, what a turn that is run again gets, and what stops it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pytest

from postroad import (
    GiveUp,
    Handlers,
    InvalidInput,
    Kind,
    OutcomeUnknown,
    Postroad,
    Refused,
    RetryLater,
    Turn,
    TurnStopped,
)
from postroad.model.operations import OperationRow
from postroad.store import alerts, audit, operations, resolving, runs
from postroad.store.audit import Operator
from postroad.testing import Harness
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, int])
REPLY = Kind("reply", dict[str, Any])


@dataclass
class Found:
    """What a search found."""

    number: str
    weight: float


class World:
    """An app with a tool of each class; `calls` are those that really happened, `decide` is its handler."""

    def __init__(self, **turn: Any) -> None:
        self.post = Postroad()
        self.calls: list[tuple[str, str]] = []
        self.decide: Callable[[Turn], Awaitable[None]] = self._nothing
        self.failing: dict[str, list[BaseException]] = {}
        self._declare()

        @self.post.turn("chat", **turn)
        async def chat(turn: Turn) -> None:
            await self.decide(turn)

    def _declare(self) -> None:
        @self.post.tool(effect="read")
        async def find(number: str, most: Annotated[int, msgspec.Meta(ge=1)] = 3) -> list[Found]:
            """Find loads by their number."""
            self._called("find", number)
            return [Found(number, 1.5)]

        @self.post.tool(effect="idempotent")
        async def label(name: str) -> None:
            self._called("label", name)

        @self.post.tool(effect="keyed")
        async def charge(amount: int, *, key: str = "") -> str:
            self._called("charge", key)
            return f"charged {amount}"

        @self.post.tool(effect="unsafe")
        def mail(to: str) -> str:
            self._called("mail", to)
            return "sent"

        self.find, self.label, self.charge, self.mail = find, label, charge, mail

    def _called(self, tool: str, about: str) -> None:
        self.calls.append((tool, about))
        if self.failing.get(tool):
            raise self.failing[tool].pop(0)

    async def _nothing(self, turn: Turn) -> None: ...


def publish(post: Postroad, *keys: str, stream: str = "chat/1") -> None:
    with post.begin() as tx:
        for n, key in enumerate(keys):
            tx.publish(stream, NOTE, {"n": n}, key=key)


def recorded(h: Harness, stream: str = "chat/1") -> list[OperationRow]:
    return list(reversed(h.post.database.read(operations.of_stream, stream)))


def ends(h: Harness, stream: str = "chat/1") -> list[str]:
    return [str(r.end) for r in reversed(h.post.database.read(runs.of_stream, stream))]


def kinds(h: Harness, stream: str = "chat/1") -> list[str]:
    return [e.kind for e in h.entries(stream)]


def test_a_call_is_recorded_and_attached_to_the_reply(harness: Open) -> None:
    """A tool call is one operation of its run, with arguments and result, and belongs to the entry that came of it."""
    world = World()
    h = harness(world.post)

    async def decide(turn: Turn) -> None:
        found = await turn.call(world.find, "17")
        assert found == [Found("17", 1.5)]
        turn.record(REPLY, {"weight": found[0].weight})

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    (row,) = recorded(h)
    assert (row.tool, row.effect, row.status) == ("find", "read", "finished")
    assert msgspec.json.decode(row.arguments) == {"number": "17", "most": 3}
    assert row.entry == h.entries("chat/1")[-1].key
    assert row.run_id == h.post.database.read(runs.of_stream, "chat/1")[0].run_id
    assert kinds(h) == ["note", "reply"]


def test_a_turn_that_is_run_again_gets_recorded_results(harness: Open) -> None:
    """What had finished is not called again, in order; the rest is called, and every run has its own operations."""
    world = World()
    h = harness(world.post)
    fails = [RetryLater("model is down", after=1)]
    seen: list[list[str]] = []

    async def decide(turn: Turn) -> None:
        seen.append([o.tool for o in turn.interrupted])
        await turn.call(world.find, "1")
        await turn.call(world.charge, 5)
        if fails:
            raise fails.pop()
        await turn.call(world.find, "2")
        turn.record(REPLY, {})

    world.decide = decide
    publish(world.post, "a")
    h.advance(10)
    assert [c[0] for c in world.calls] == ["find", "charge", "find"]
    assert seen == [[], ["find", "charge"]]
    assert [(r.tool, r.status) for r in recorded(h)] == [
        ("find", "finished"), ("charge", "finished"), ("find", "reused"), ("charge", "reused"), ("find", "finished"),
    ]  # fmt: skip
    assert ends(h) == ["failed", "committed"]
    first, second = {r.run_id for r in recorded(h)[:2]}, {r.run_id for r in recorded(h)[2:]}
    assert len(first) == len(second) == 1
    assert first != second
    assert [r.entry is not None for r in recorded(h)] == [False, False, True, True, True]


def test_a_keyed_call_keeps_its_key_on_every_attempt(harness: Open) -> None:
    """A keyed tool that failed is called with the same key again: in the same run, and in the next one."""
    world = World()
    h = harness(world.post)
    world.failing["charge"] = [ConnectionError("no answer"), RetryLater("no answer", after=1)]

    async def decide(turn: Turn) -> None:
        try:
            await turn.call(world.charge, 5)
        except ConnectionError:
            await turn.call(world.charge, 5)
        assert await turn.call(world.charge, 6) == "charged 6"

    world.decide = decide
    publish(world.post, "a")
    h.advance(10)
    keys = [key for _, key in world.calls]
    assert len(keys) == 4
    assert len(set(keys[:3])) == 1
    assert keys[3] not in keys[:3]
    assert ends(h) == ["failed", "committed"]


def test_what_was_called_unsafely_is_shown_not_repeated(harness: Open) -> None:
    """A turn that failed after an unsafe call is not run again: its events land, with an entry on what is known."""
    world = World()
    h = harness(world.post)

    async def decide(turn: Turn) -> None:
        await turn.call(world.mail, "bob")
        raise RetryLater("model is down")

    world.decide = decide
    publish(world.post, "a")
    h.advance(3600)
    assert world.calls == [("mail", "bob")]
    assert kinds(h) == ["note", "postroad.interrupted"]
    said = h.entries("chat/1")[-1].data
    assert said["reason"] == "turn.interrupted.effects"
    assert said["events"] == ["a"]
    assert [(o["tool"], o["status"], o["result"]) for o in said["operations"]] == [("mail", "finished", "sent")]
    assert ends(h) == ["stopped"]
    assert [a.code for a in h.post.database.read(alerts.list_)] == ["turn.interrupted"]
    publish(world.post, "b")
    world.decide = world._nothing
    h.drain()
    assert kinds(h)[-1] == "note"


def test_a_parked_turn_waits_for_a_person(harness: Open) -> None:
    """With when_interrupted="park" the stream stands still, its set untouched, until a person resolves it."""
    world = World(when_interrupted="park")
    h = harness(world.post)

    async def decide(turn: Turn) -> None:
        await turn.call(world.mail, "bob")
        raise RetryLater("model is down")

    world.decide = decide
    publish(world.post, "a", "b")
    h.advance(3600)
    assert kinds(h) == []
    assert [a.code for a in h.post.database.read(alerts.list_)] == ["turn.parked"]
    publish(world.post, "c")
    h.advance(3600)
    assert world.calls == [("mail", "bob")]


def test_a_run_that_decides_otherwise_than_one_that_acted_is_stopped(harness: Open) -> None:
    """A keyed call that is none of the recorded ones, in their place, stops the turn before anything happens."""
    world = World()
    h = harness(world.post)
    amounts = iter([5, 6])

    async def decide(turn: Turn) -> None:
        await turn.call(world.charge, next(amounts))
        raise RetryLater("again", after=1)

    world.decide = decide
    publish(world.post, "a")
    h.advance(60)
    assert len(world.calls) == 1
    said = h.entries("chat/1")[-1].data
    assert said["reason"] == "turn.interrupted.mismatch"
    assert [o["arguments"] for o in said["operations"]] == [{"amount": 5}]


def test_a_handler_cannot_swallow_that_it_was_stopped(harness: Open) -> None:
    """What a handler does after it was stopped is not committed, even if it lets nothing of it pass."""
    world = World()
    h = harness(world.post)
    amounts = iter([5, 6])
    told: list[str] = []

    async def decide(turn: Turn) -> None:
        try:
            await turn.call(world.charge, next(amounts))
        except TurnStopped as error:
            told.append(error.reason)
            turn.record(REPLY, {})
            return
        raise RetryLater("again", after=1)

    world.decide = decide
    publish(world.post, "a")
    h.advance(60)
    assert told == ["turn.interrupted.mismatch"]
    assert kinds(h) == ["note", "postroad.interrupted"]


def test_a_run_that_leaves_out_what_was_done_is_stopped(harness: Open) -> None:
    """A decision that knows nothing of what an earlier run has done is not committed."""
    world = World()
    h = harness(world.post)
    first = [True]

    async def decide(turn: Turn) -> None:
        if first:
            first.pop()
            await turn.call(world.charge, 5)
            raise RetryLater("again", after=1)
        turn.record(REPLY, {})

    world.decide = decide
    publish(world.post, "a")
    h.advance(60)
    assert h.entries("chat/1")[-1].data["reason"] == "turn.interrupted.left_out"


def test_reads_may_differ_between_runs(harness: Open) -> None:
    """A run may read something else than the one before it, and still gets the results of what that one did."""
    world = World()
    h = harness(world.post)
    attempts = iter(["1", "2"])

    async def decide(turn: Turn) -> None:
        number = next(attempts)
        await turn.call(world.find, number)
        await turn.call(world.charge, 5)
        if number == "1":
            raise RetryLater("again", after=1)
        turn.record(REPLY, {})

    world.decide = decide
    publish(world.post, "a")
    h.advance(60)
    assert [c[0] for c in world.calls] == ["find", "charge", "find"]
    assert kinds(h) == ["note", "reply"]


def test_at_the_cap_a_set_that_acted_is_shown_whole(harness: Open) -> None:
    """A set whose turn has called a keyed tool is not split into turns with other keys: it ends, visibly."""
    world = World(attempts=2)
    h = harness(world.post)

    async def decide(turn: Turn) -> None:
        await turn.call(world.charge, 5)
        raise RetryLater("poison")

    world.decide = decide
    publish(world.post, "a", "b")
    h.advance(3600)
    assert len(world.calls) == 1
    assert kinds(h) == ["note", "note", "postroad.interrupted"]
    assert h.entries("chat/1")[-1].data["reason"] == "turn.dead.max_attempts"


def test_a_turn_with_reads_alone_is_retried_and_split_as_any_other(harness: Open) -> None:
    """Reads and idempotent calls hinder neither another attempt nor a split."""
    world = World(attempts=2)
    h = harness(world.post)

    async def decide(turn: Turn) -> None:
        await turn.call(world.label, "x")
        if any(e.key == "bad" for e in turn.events):
            raise GiveUp("poison")

    world.decide = decide
    publish(world.post, "a", "bad")
    h.advance(3600)
    assert kinds(h) == ["note", "postroad.failed"]


def test_a_tool_s_exception_is_raised_in_the_handler_and_recorded(harness: Open) -> None:
    """A handler may decide on a tool's failure; the operation says failed, with the error's text."""
    world = World()
    h = harness(world.post)
    world.failing["find"] = [LookupError("no such load")]

    async def decide(turn: Turn) -> None:
        with pytest.raises(LookupError):
            await turn.call(world.find, "1")
        turn.record(REPLY, {"found": 0})

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    (row,) = recorded(h)
    assert (row.status, row.result) == ("failed", "LookupError: no such load")
    assert kinds(h) == ["note", "reply"]


def test_bad_arguments_call_nothing(harness: Open) -> None:
    """Arguments that do not fit are refused before anything is recorded; a model hears of it as text."""
    world = World()
    h = harness(world.post)
    heard: list[str] = []

    async def decide(turn: Turn) -> None:
        wrong: Any = 17
        with pytest.raises(InvalidInput, match="number"):
            await turn.call(world.find, wrong)
        with pytest.raises(InvalidInput):
            await turn.call(world.find, "1", most=0)
        for name, arguments in (("find", "{}"), ("find", "nonsense"), ("find", '{"number":"1","x":1}'), ("fly", "{}")):
            heard.append(await turn.call_json(name, arguments))
        heard.append(await turn.call_json("find", '{"number":"1"}'))
        heard.append(await turn.call_json("mail", '{"to":"bob"}'))

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    assert [said.split(".")[0] for said in heard[:4]] == ["Invalid arguments"] * 3 + ["Unknown tool 'fly'"]
    assert "charge, find, label, mail" in heard[3]
    assert msgspec.json.decode(heard[4]) == [{"number": "1", "weight": 1.5}]
    assert heard[5] == "sent"
    assert [r.tool for r in recorded(h)] == ["find", "mail"]


def test_a_result_that_cannot_be_stored_fails_the_call(harness: Open) -> None:
    """What a tool returns must have a JSON form; else the call has failed, and says why."""
    post = Postroad()
    h_errors: list[str] = []

    @post.tool(effect="read")
    async def broken() -> Any:
        return object()

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        try:
            await turn.call(broken)
        except InvalidInput as error:
            h_errors.append(str(error))

    h = harness(post)
    publish(post, "a")
    h.drain()
    assert "no JSON form" in h_errors[0]
    assert recorded(h)[0].status == "failed"


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_a_slow_tool_is_ended_by_its_timeout(place: dict[str, Any], colour: str) -> None:
    """In real time: a tool that takes longer than its timeout raises TimeoutError, and is recorded as failed."""
    post = Postroad(place["database"], schema=place.get("schema"), migrate=True)
    released = threading.Event()
    seen: list[str] = []

    async def waits() -> None:
        await asyncio.sleep(60)

    def blocks() -> None:
        released.wait(60)

    tool: Any = post.tool(effect="read", timeout=0.1)(waits if colour == "async" else blocks)

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        try:
            await turn.call(tool)
        except TimeoutError as error:
            seen.append(str(error))

    publish(post, "a")
    post.drain()
    released.set()
    assert seen == [f"{tool.name} took longer than 0.1 s"]
    (row,) = post.database.read(operations.of_stream, "chat/1")
    assert row.status == "failed"
    post.close()


def test_a_sync_handler_calls_no_tools(place: dict[str, Any]) -> None:
    """A handler in a thread, with an event loop of its own, is told to be async; nothing is recorded or called."""
    post = Postroad(place["database"], schema=place.get("schema"), migrate=True)
    called: list[str] = []
    refused: list[str] = []

    @post.tool(effect="unsafe")
    async def mail() -> None:
        called.append("mail")

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        try:
            asyncio.run(turn.call(mail))
        except Refused as error:
            refused.append(str(error))

    publish(post, "a")
    post.drain()
    assert len(refused) == 1
    assert "async def" in refused[0]
    assert called == []
    assert post.database.read(operations.of_stream, "chat/1") == []
    post.close()


def test_a_call_after_the_end_of_its_turn_is_refused(harness: Open) -> None:
    """A turn that has ended calls nothing more."""
    world = World()
    h = harness(world.post)
    kept: list[Turn] = []

    async def decide(turn: Turn) -> None:
        kept.append(turn)

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    with pytest.raises(Refused):
        kept[0].call(world.find, "1").send(None)
    assert world.calls == []


def test_tools_come_along_with_their_handlers() -> None:
    """Tools that a registry declares are the app's once it is included; a name is declared once."""
    handlers = Handlers()

    @handlers.tool(effect="read")
    async def look(at: str) -> str:
        return at

    post = Postroad()
    post.include(handlers)
    assert post._registry.tools["look"] is look
    with pytest.raises(Refused, match="declared twice"):

        @post.tool(effect="read")
        async def look(at: str) -> str:
            return at


def test_models_get_a_schema_without_the_key() -> None:
    """A tool's schema is a plain object of its arguments; what the runtime hands over is not among them."""
    world = World()
    assert world.find.schema == {
        "type": "object",
        "properties": {"number": {"type": "string"}, "most": {"type": "integer", "minimum": 1, "default": 3}},
        "required": ["number"],
        "additionalProperties": False,
    }
    assert list(world.charge.schema["properties"]) == ["amount"]
    assert world.find.description == "Find loads by their number."


@pytest.mark.parametrize("effect", ["sideways", "", None])
def test_an_effect_must_be_one_of_four(effect: Any) -> None:
    """What is not one of the four classes is refused when it is declared."""
    with pytest.raises(InvalidInput, match="effect"):
        Postroad().tool(effect=effect)


def test_what_a_model_could_not_call_is_refused_when_declared() -> None:
    """Arguments without types or names, and a keyed tool without a key, are refused at once."""
    post = Postroad()

    def untyped(a) -> None: ...  # type: ignore[no-untyped-def]
    def starred(*a: int) -> None: ...
    def keyless(a: int) -> None: ...
    def foreign(a: World) -> None: ...

    for fn, effect in ((untyped, "read"), (starred, "read"), (keyless, "keyed"), (foreign, "read")):
        declare: Any = post.tool(effect=effect)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            declare(fn)


BY = Operator(actor="ops", reason="looked it up")


def parked_by_mail(harness: Open, world: World) -> Harness:
    """A stream whose turn called an unsafe tool that failed, and is parked; the handler records what it hears."""
    h = harness(world.post)
    world.failing["mail"] = [ConnectionError("no answer")]

    async def decide(turn: Turn) -> None:
        before = [(o.tool, o.status) for o in turn.interrupted]
        try:
            said = await turn.call(world.mail, "bob")
        except OutcomeUnknown as error:
            said = str(error)
        except ConnectionError:
            raise RetryLater("model is down") from None
        turn.record(REPLY, {"said": said, "before": before})

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    return h


def resolve(h: Harness, how: Any) -> resolving.Resolution:
    done: resolving.Resolution = h.post.database.transact(resolving.resolve, "chat/1", how, by=BY)
    h.drain()
    return done


def test_a_function_that_is_no_tool_is_refused(harness: Open) -> None:
    """Calling what was never declared says so, and nothing of it happens."""
    world = World()
    h = harness(world.post)
    said: list[str] = []

    async def decide(turn: Turn) -> None:
        anything: Any = said.append
        with pytest.raises(InvalidInput, match="tool has declared") as refused:
            await turn.call(anything, "x")
        said.append(refused.value.about["field"])

    world.decide = decide
    publish(world.post, "a")
    h.drain()
    assert said == ["tool"]
    assert recorded(h) == []


def test_continue_hands_over_what_is_known(harness: Open) -> None:
    """After "continue" the turn is run again; of an unsafe call that never ended it hears that nobody knows."""
    world = World(when_interrupted="park")
    h = parked_by_mail(harness, world)
    assert resolve(h, "continue").done
    assert world.calls == [("mail", "bob")]
    said = h.entries("chat/1")[-1].data
    assert said["before"] == [["mail", "failed"]]
    assert "not known" in said["said"]


def test_retry_forgets_what_was_called(harness: Open) -> None:
    """After "retry" the turn is run as if it had called nothing, and calls again."""
    world = World(when_interrupted="park")
    h = parked_by_mail(harness, world)
    assert resolve(h, "retry").done
    assert world.calls == [("mail", "bob")] * 2
    assert h.entries("chat/1")[-1].data == {"said": "sent", "before": []}


def test_discard_shows_what_was_done_and_moves_on(harness: Open) -> None:
    """After "discard" the set's events land with an entry that lists the calls, and the stream is free."""
    world = World(when_interrupted="park")
    h = parked_by_mail(harness, world)
    assert resolve(h, "discard").done
    assert kinds(h) == ["note", "postroad.interrupted"]
    assert [o["tool"] for o in h.entries("chat/1")[-1].data["operations"]] == ["mail"]
    publish(world.post, "b")
    world.decide = world._nothing
    h.drain()
    assert kinds(h)[-1] == "note"


def test_what_is_not_parked_is_not_resolved(harness: Open) -> None:
    """A stream that runs, waits or is unknown is left as it is, with a sentence."""
    world = World()
    h = harness(world.post)
    assert resolve(h, "retry").refused == "The stream is not parked (it is free)."
    assert [a.action for a in h.post.database.read(audit.list_)] == []


def test_every_resolution_is_audited(harness: Open) -> None:
    """Who resolved a stream, why and how stands in the audit, with what it was before."""
    world = World(when_interrupted="park")
    h = parked_by_mail(harness, world)
    resolve(h, "continue")
    (row,) = h.post.database.read(audit.list_)
    assert (row.action, row.subject, row.actor) == ("stream.resolve.continue", "chat/1", "ops")
    assert msgspec.json.decode(row.before)["state"] == "parked"
