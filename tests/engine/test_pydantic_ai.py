"""An agent of Pydantic AI decides for a turn: its calls are operations, its errors verdicts, the log its memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.exceptions import (
    ContentFilterError,
    FallbackExceptionGroup,
    ModelAPIError,
    ModelConnectionError,
    ModelHTTPError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelRequestRejectedError,
    ModelTimeoutError,
    UnexpectedModelBehavior,
)
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel

from postroad import GiveUp, Kind, OutcomeUnknown, Postroad, RetryLater, StaleClaim, Turn
from postroad.agent import pydantic_ai as adapter
from postroad.agent.pydantic_ai import remember, remembered, run, verdict
from postroad.store import operations
from postroad.testing import Harness
from tests.engine.conftest import Open

MESSAGE = Kind("message", str)
REPLY = Kind("reply", str)
STREAM = "chat/1"
Step = ModelResponse | Exception


def says(text: str) -> ModelResponse:
    return ModelResponse(parts=[TextPart(text)])


def calls(*named: tuple[str, dict[str, Any]]) -> ModelResponse:
    return ModelResponse(parts=[ToolCallPart(name, arguments) for name, arguments in named])


class Script:
    """A model that answers or fails as it is told, and remembers what it was asked and offered."""

    def __init__(self, *steps: Step) -> None:
        self._steps = list(steps)
        self.asked: list[list[ModelMessage]] = []
        self.offered: list[list[str]] = []
        self.model = FunctionModel(self._answer)

    def _answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.asked.append(list(messages))
        self.offered.append([tool.name for tool in info.function_tools])
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def told(self) -> list[Any]:
        """What tools returned, as the model saw it in its last request."""
        return [p.content for m in self.asked[-1] for p in m.parts if isinstance(p, ToolReturnPart)]


class App:
    """A chat with a tool of each kind that matters here, whose handler then does what the test wants."""

    def __init__(self, script: Script, **options: Any) -> None:
        self.post = Postroad()
        self.done: list[str] = []
        self.after: Callable[[Turn], None] = lambda _: None
        agent = Agent(script.model)

        @self.post.tool(effect="keyed")
        async def refund(cents: int, key: str = "") -> str:
            """Give money back."""
            self.done.append(f"refund {cents} {key}")
            return "refunded"

        @self.post.tool(effect="read")
        async def track(load: str) -> dict[str, str]:
            """Where a load is."""
            self.done.append(f"track {load}")
            return {"at": "Lyon"}

        @self.post.turn("chat", attempts=3)
        async def chat(turn: Turn) -> None:
            chosen = {"tools": [track]} if options.get("only") else {}
            result = await run(agent, turn, str(turn.events[-1].data), history=remembered(turn), **chosen)
            turn.record(REPLY, result.output)
            remember(turn, result)
            self.after(turn)

    def publish(self, text: str, key: str = "m1") -> None:
        with self.post.begin() as tx:
            tx.publish(STREAM, MESSAGE, text, key=key)

    def fails_once(self) -> None:
        """The first decision comes to nothing after all that it did."""
        failures = iter([RetryLater("later", after=5)])

        def after(_: Turn) -> None:
            for failure in failures:
                raise failure

        self.after = after


def replies(h: Harness) -> list[str]:
    return [text for entry in h.entries(STREAM) if (text := REPLY.of(entry)) is not None]


def recorded(h: Harness) -> list[tuple[str, str]]:
    rows = h.post.database.read(operations.of_stream, STREAM)
    return [(row.tool, str(row.status)) for row in sorted(rows, key=lambda row: row.ordinal)]


async def test_a_call_of_the_model_is_an_operation(harness: Open) -> None:
    """A model sees the app's tools; its call goes through the turn and is recorded, as are its own answers."""
    script = Script(calls(("track", {"load": "7"})), says("It is in Lyon."))
    app = App(script)
    h = harness(app.post)
    app.publish("Where is 7?")
    await h.adrain()

    assert replies(h) == ["It is in Lyon."]
    assert app.done == ["track 7"]
    assert script.offered[0] == ["refund", "track"]
    assert script.told() == ['{"at":"Lyon"}']
    assert recorded(h) == [("model_request", "finished"), ("track", "finished"), ("model_request", "finished")]


async def test_a_turn_that_is_run_again_goes_on_where_it_was(harness: Open) -> None:
    """Neither the model nor a tool is asked again for what an earlier run of the turn has recorded."""
    script = Script(calls(("refund", {"cents": 500})), calls(("track", {"load": "7"})), says("Done."))
    app = App(script)
    app.fails_once()
    h = harness(app.post)
    app.publish("Give me my money back.")
    await h.adrain()
    assert replies(h) == []
    await h.aadvance(60)

    assert replies(h) == ["Done."]
    assert len(script.asked) == 3
    assert [what.split()[0] for what in app.done] == ["refund", "track"]
    assert [status for _, status in recorded(h)] == ["finished"] * 5 + ["reused"] * 5


async def test_a_model_that_fails_is_asked_only_for_the_rest(harness: Open) -> None:
    """After an outage in the middle no tool is called again, and only the open question is asked anew."""
    away = ModelHTTPError(503, "model")
    script = Script(calls(("refund", {"cents": 500})), away, says("Done."))
    app = App(script)
    h = harness(app.post)
    app.publish("Give me my money back.")
    await h.adrain()
    await h.aadvance(60)

    assert replies(h) == ["Done."]
    assert len(app.done) == 1
    assert script.told() == ["refunded"]


async def test_what_differs_is_asked_anew(harness: Open) -> None:
    """A recorded answer is one to the same messages: when the history has changed, the model is asked."""
    script = Script(says("First."), says("Second."))
    app = App(script)
    app.fails_once()
    h = harness(app.post)
    app.publish("Hello")
    await h.adrain()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "_PASSING_FIELDS", frozenset())  # as if a message had changed
        await h.aadvance(60)

    assert replies(h) == ["Second."]


async def test_calls_of_one_answer_are_made_one_after_the_other(harness: Open) -> None:
    """Of several calls in one answer each ends before the next begins, in the order of the answer."""
    script = Script(calls(*(("visit", {"place": n}) for n in range(5))), says("Seen."))
    post, agent, steps = Postroad(), Agent(script.model), list[str]()

    @post.tool(effect="read")
    async def visit(place: int) -> None:
        steps.append(f"to {place}")
        await asyncio.sleep(0)
        steps.append(f"from {place}")

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        await run(agent, turn, "Visit them.")

    h = harness(post)
    with post.begin() as tx:
        tx.publish(STREAM, MESSAGE, "go", key="m1")
    await h.adrain()

    assert steps == [step for n in range(5) for step in (f"to {n}", f"from {n}")]


@pytest.mark.parametrize("wrong", [{"load": 7}, {}, {"load": "7", "more": 1}], ids=["type", "missing", "unknown"])
async def test_wrong_arguments_go_back_to_the_model(harness: Open, wrong: dict[str, Any]) -> None:
    """Arguments that don't fit are told to the model, which may try again; no operation comes of them."""
    script = Script(calls(("track", wrong)), calls(("track", {"load": "7"})), says("In Lyon."))
    app = App(script)
    h = harness(app.post)
    app.publish("Where is 7?")
    await h.adrain()

    assert replies(h) == ["In Lyon."]
    assert [tool for tool, _ in recorded(h)] == ["model_request", "model_request", "track", "model_request"]
    assert "Arguments of track" in str(script.asked[1][-1])


async def test_the_log_is_the_memory(harness: Open) -> None:
    """What one turn remembered is the history of the next: prompt, calls, results and reply."""
    script = Script(calls(("track", {"load": "7"})), says("In Lyon."), says("As I said, in Lyon."))
    app = App(script)
    h = harness(app.post)
    app.publish("Where is 7?")
    await h.adrain()
    app.publish("Really?", "m2")
    await h.adrain()

    assert replies(h) == ["In Lyon.", "As I said, in Lyon."]
    prompts = [p.content for m in script.asked[-1] for p in m.parts if isinstance(p, UserPromptPart)]
    assert prompts == ["Where is 7?", "Really?"]
    assert script.told() == ['{"at":"Lyon"}']


async def test_only_some_tools_are_offered(harness: Open) -> None:
    """With `tools` the model sees these and no others."""
    script = Script(says("Hello."))
    app = App(script, only=True)
    h = harness(app.post)
    app.publish("Hello")
    await h.adrain()

    assert script.offered == [["track"]]


async def test_every_tool_fits_a_model(harness: Open) -> None:
    """A tool's schema is one that Pydantic AI's own test model can call by: a key is not part of it."""
    app = App(Script())
    post, agent = app.post, Agent(TestModel())

    @post.turn("all")
    async def decide(turn: Turn) -> None:
        turn.record(REPLY, (await run(agent, turn, "call all of them")).output)

    h = harness(post)
    with post.begin() as tx:
        tx.publish("all/1", MESSAGE, "go")
    await h.adrain()

    assert [what.split()[0] for what in app.done] == ["refund", "track"]
    assert [e.kind for e in h.entries("all/1")] == ["message", "reply"]


async def test_an_answer_too_large_to_record_is_asked_for_again(harness: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be recorded does not fail the turn; it costs another request when that is run again."""
    monkeypatch.setattr(adapter, "ANSWER_BYTES_MAX", 10)
    script = Script(says("First."), says("Second."))
    app = App(script)
    app.fails_once()
    h = harness(app.post)
    app.publish("Hello")
    await h.adrain()
    await h.aadvance(60)

    assert replies(h) == ["Second."]


@pytest.mark.parametrize("error", [StaleClaim("chat/1"), ValueError("a bug")], ids=["claim", "bug"])
async def test_what_ends_the_turn_ends_the_run(
    harness: Open, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A lost claim and a bug in a tool come out of the run as they are; the model is not asked again."""

    async def ends(self: Turn, name: str, arguments: str) -> str:
        raise error

    raised: list[BaseException] = []
    script = Script(calls(("track", {"load": "7"})), says("never"))
    app = App(script)
    monkeypatch.setattr(Turn, "call_json", ends)

    @app.post.turn("watched")
    async def watched(turn: Turn) -> None:
        try:
            await run(Agent(script.model), turn, "Where is 7?")
        except Exception as found:
            raised.append(found)
            raise GiveUp("seen") from None

    h = harness(app.post)
    with app.post.begin() as tx:
        tx.publish("watched/1", MESSAGE, "go")
    await h.adrain()

    assert raised == [error]
    assert len(script.asked) == 1


async def test_a_call_that_nobody_knows_of_is_told_to_the_model(harness: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a person's "continue" the model hears that an unsafe call may have happened, and decides."""

    async def unknown(self: Turn, name: str, arguments: str) -> str:
        raise OutcomeUnknown("It is not known whether track happened.")

    monkeypatch.setattr(Turn, "call_json", unknown)
    script = Script(calls(("track", {"load": "7"})), says("I cannot tell."))
    app = App(script)
    h = harness(app.post)
    app.publish("Where is 7?")
    await h.adrain()

    assert replies(h) == ["I cannot tell."]
    assert "not known whether" in str(script.told())


async def test_a_rate_limit_waits_as_long_as_the_provider_says(harness: Open) -> None:
    """After a 429 with Retry-After the turn is run again, and not before that."""
    limited = ModelHTTPError.for_category(
        ModelRateLimitError, status_code=429, model_name="model", headers={"Retry-After": "100"}
    )
    script = Script(limited, says("Hello."))
    app = App(script)
    h = harness(app.post)
    app.publish("Hello")
    await h.adrain()
    await h.aadvance(99)
    assert len(script.asked) == 1
    await h.aadvance(20)

    assert replies(h) == ["Hello."]


async def test_a_refusal_ends_the_message_visibly(harness: Open) -> None:
    """What the provider refuses for good is not asked again: the message goes dead, with the reason in the log."""
    script = Script(ModelHTTPError(400, "model", {"error": "too long"}))
    app = App(script)
    h = harness(app.post)
    app.publish("Hello")
    await h.aadvance(1_000)

    (failed,) = [e.data for e in h.entries(STREAM) if e.kind == "postroad.failed"]
    assert failed["reason"] == "turn.dead.permanent"
    assert "too long" in failed["error"]


async def test_a_content_filter_ends_the_message_visibly(harness: Open) -> None:
    """A response that the provider filtered is a refusal too."""
    script = Script(ModelResponse(parts=[], finish_reason="content_filter"))
    app = App(script)
    h = harness(app.post)
    app.publish("Hello")
    await h.aadvance(1_000)

    assert [e.data["reason"] for e in h.entries(STREAM) if e.kind == "postroad.failed"] == ["turn.dead.permanent"]


def http(status: int, **headers: str) -> ModelHTTPError:
    return ModelHTTPError(status, "model", headers={k.replace("_", "-"): v for k, v in headers.items()})


def of(category: Any, status: int) -> ModelHTTPError:
    return ModelHTTPError.for_category(category, status_code=status, model_name="model")


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (http(429, retry_after="7"), 7),
        (http(429), None),
        (http(408), None),
        (http(500), None),
        (http(529, retry_after="2"), 2),
        (ModelTimeoutError("model", "timed out"), None),
        (ModelConnectionError("model", "refused"), None),
        (ModelAPIError("model", "stream broke"), None),
        (FallbackExceptionGroup("all failed", [http(400), http(503, retry_after="9"), http(429, retry_after="5")]), 5),
    ],
    ids=["429", "429 bare", "408", "500", "529", "timeout", "connection", "api", "group"],
)  # fmt: skip
def test_what_may_pass_is_tried_later(error: Exception, after: float | None) -> None:
    """A rate limit, an overloaded or unreachable provider: again, after what the provider said."""
    said = verdict(error)
    assert isinstance(said, RetryLater)
    assert said.after == after


@pytest.mark.parametrize(
    "error",
    [
        http(400),
        http(401),
        http(404),
        http(422),
        of(ModelQuotaExceededError, 429),
        of(ModelRequestRejectedError, 400),
        ModelRequestRejectedError("model", "INVALID_ARGUMENT"),
        ContentFilterError("filtered"),
        FallbackExceptionGroup("all failed", [http(400), http(401)]),
    ],
    ids=["400", "401", "404", "422", "quota", "rejected", "rejected, no http", "filter", "group"],
)
def test_what_will_not_pass_is_given_up(error: Exception) -> None:
    """A refused request, a filtered response, an exhausted quota: the same again would be refused again."""
    assert isinstance(verdict(error), GiveUp)


@pytest.mark.parametrize(
    "error", [UnexpectedModelBehavior("odd"), ValueError("a bug"), FallbackExceptionGroup("odd", [ValueError("a bug")])]
)
def test_anything_else_is_a_bug(error: Exception) -> None:
    """What is not known to be the provider's doing gets no verdict."""
    assert verdict(error) is None


async def test_what_the_model_says_is_handed_on_as_it_comes(harness: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `partials` each piece of text goes to the turn's watchers; one from the record comes whole."""
    pieces: list[str] = []
    say = Turn.partial

    def hear(turn: Turn, text: str) -> None:
        pieces.append(text)
        say(turn, text)

    monkeypatch.setattr(Turn, "partial", hear)

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        for piece in ("It is ", "in ", "Lyon."):
            yield piece

    post = Postroad()
    agent = Agent(FunctionModel(stream_function=stream))
    failures = iter([RetryLater("later", after=5)])

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        result = await run(agent, turn, "Where is 7?", partials=True)
        turn.record(REPLY, result.output)
        for failure in failures:
            raise failure

    h = harness(post)
    with post.begin() as tx:
        tx.publish(STREAM, MESSAGE, "go", key="m1")
    await h.adrain()
    await h.aadvance(60)

    assert pieces == ["It is ", "in ", "Lyon.", "It is in Lyon."]
    assert replies(h) == ["It is in Lyon."]


def messages_of(request: Sequence[ModelMessage]) -> list[str]:
    return [type(message).__name__ for message in request]


async def test_own_tools_and_dependencies_of_an_agent_stay(harness: Open) -> None:
    """An agent keeps its own tools and may have its own dependencies; without any these are the turn."""
    script = Script(calls(("own", {})), says("Done."), calls(("own", {})), says("Done."))
    agent = Agent(script.model)
    got: list[Any] = []

    @agent.tool
    def own(ctx: RunContext[Any]) -> str:
        got.append(ctx.deps)
        return "yes"

    post = Postroad()

    @post.turn("chat")
    async def chat(turn: Turn) -> None:
        await run(agent, turn, "go")
        await run(agent, turn, "go", deps="mine")
        assert got == [turn, "mine"]
        turn.record(REPLY, "seen")

    h = harness(post)
    with post.begin() as tx:
        tx.publish(STREAM, MESSAGE, "go", key="m1")
    await h.adrain()

    assert replies(h) == ["seen"]
    assert messages_of(script.asked[0]) == [ModelRequest.__name__]
