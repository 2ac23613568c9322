"""Pydantic AI: an agent decides for a turn, its tools are the turn's operations, and the log is its memory.

Within a turn each request to the model is recorded like a call of a tool that reads. A turn that is run again gets the
model's recorded answers, and so comes to the same calls, whose results are recorded too: it goes on where it was.
"""

import hashlib
from collections.abc import AsyncIterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from pydantic_ai import RunContext
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.capabilities.abstract import WrapModelRequestHandler
from pydantic_ai.exceptions import (
    ContentFilterError,
    FallbackExceptionGroup,
    ModelAPIError,
    ModelHTTPError,
    ModelQuotaExceededError,
    ModelRequestRejectedError,
    ModelRetry,
    ToolFailed,
)
from pydantic_ai.messages import (
    AgentStreamEvent,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    UserContent,
)
from pydantic_ai.models import ModelRequestContext
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.toolsets import AbstractToolset, ToolsetTool
from pydantic_core import SchemaValidator, core_schema

from postroad.engine.tools import Tool
from postroad.engine.turn import Turn
from postroad.model.clock import SECOND
from postroad.model.errors import GiveUp, InvalidInput, OutcomeUnknown, RetryLater, Verdict
from postroad.model.kinds import Kind
from postroad.model.payload import PAYLOAD_BYTES_MAX

Output = TypeVar("Output")
MESSAGES: Kind[list[Any]] = Kind("pydantic_ai.messages", list[Any])

PASSING = frozenset({408, 409, 425, 429})
MODEL_TIMEOUT = 3_600 * SECOND  # the turn's deadline comes first
ANSWER_BYTES_MAX = PAYLOAD_BYTES_MAX - 1_024
_PASSING_FIELDS = frozenset({"timestamp"})
_OBJECT = SchemaValidator(core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema()))


async def run(
    agent: AbstractAgent[Any, Output],
    turn: Turn,
    prompt: str | Sequence[UserContent] | None = None,
    *,
    history: Sequence[ModelMessage] = (),
    tools: Sequence[Tool[..., Any]] | None = None,
    deps: Any = None,
    partials: bool = False,
    **options: Any,
) -> AgentRunResult[Output]:
    """Run an agent within a turn; whatever else `agent.run` takes may be given too.

    Args:
        agent: Its own tools work, but nothing is recorded of them: they run again when the turn does.
        history: The messages so far, see `remembered`.
        tools: Which of the app's tools the model may call; all of them unless given.
        deps: What the agent's functions get as `ctx.deps`; the turn itself unless given.
        partials: Whether what the model says goes to `turn.partial` at once; the model must be able to stream.

    Raises:
        RetryLater: The model's provider is overloaded, limits the rate or cannot be reached: the turn is run again,
            after what the provider said.
        GiveUp: The provider refuses this request: a content filter, or an error that will not pass.
        TurnStopped, StaleClaim: As for `turn.call`.
    """
    if partials:
        options["event_stream_handler"] = _Partials(turn)
    offered = list(turn.tools.values() if tools is None else tools)
    capabilities = [*(options.pop("capabilities", None) or ()), _InTurn(turn, offered)]
    try:
        return await agent.run(
            prompt, message_history=list(history) or None, deps=turn if deps is None else deps,
            capabilities=capabilities, **options,
        )  # fmt: skip
    except (ModelAPIError, ContentFilterError, FallbackExceptionGroup) as error:
        said = verdict(error)
        if said is None:
            raise
        raise said from error


def remember(turn: Turn, result: AgentRunResult[Any]) -> None:
    """Record what was said in a run, the prompt too, for `remembered`; one entry of at most 256 KiB."""
    turn.record(MESSAGES, ModelMessagesTypeAdapter.dump_python(result.new_messages(), mode="json"))


def remembered(turn: Turn, *, last: int = 200) -> list[ModelMessage]:
    """What `remember` has recorded among the stream's last entries, oldest first; whole runs only."""
    found = [said for entry in turn.log(last=last) if (said := MESSAGES.of(entry)) is not None]
    return [message for said in found for message in ModelMessagesTypeAdapter.validate_python(said)]


def verdict(error: BaseException) -> Verdict | None:
    """What a model's error means for the turn; None: nothing that is known, so it is a bug like any other.

    Of a group, whose models have all failed, one that may pass decides.
    """
    match error:
        case FallbackExceptionGroup():
            found = [verdict(each) for each in error.exceptions]
            later = [each for each in found if isinstance(each, RetryLater)]
            return min(later, key=_pause) if later else next((each for each in found if each is not None), None)
        case ContentFilterError() | ModelQuotaExceededError() | ModelRequestRejectedError():
            return GiveUp(str(error))
        case ModelHTTPError(status_code=status) if status < 500 and status not in PASSING:
            return GiveUp(str(error))
        case ModelAPIError():
            return RetryLater(str(error), after=error.retry_after)
        case _:
            return None


def _pause(later: RetryLater) -> float:
    return later.after if isinstance(later.after, int | float) else 0


class _InTurn(AbstractCapability[Any]):
    """What makes a run of an agent part of a turn: the app's tools, and the record of the model's answers."""

    def __init__(self, turn: Turn, tools: Sequence[Tool[..., Any]]) -> None:
        self._turn = turn
        self._tools = tools
        self._requests = 0

    def get_toolset(self) -> AbstractToolset[Any]:
        return _Operations(self._turn, self._tools)

    async def wrap_model_request(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, handler: WrapModelRequestHandler
    ) -> ModelResponse:
        """Ask the model, or answer with what it has said to the same messages in an earlier run of this turn."""
        answer: ModelResponse | None = None

        async def model_request(request: int, asked: str) -> str | None:
            nonlocal answer
            answer = await handler(request_context)
            return _written(answer)

        self._requests += 1
        tool = Tool(model_request, effect="read", version=1, timeout=MODEL_TIMEOUT)
        written = await self._turn.call(tool, self._requests, _digest(request_context))
        if answer is not None:
            return answer
        return await handler(request_context) if written is None else _read(written)


class _Operations(AbstractToolset[Any]):
    """The app's tools as a model may call them, one after the other: an operation has its place in the turn."""

    def __init__(self, turn: Turn, tools: Sequence[Tool[..., Any]]) -> None:
        self._turn = turn
        self._tools = {tool.name: tool for tool in tools}

    @property
    def id(self) -> str:
        """The same in each agent."""
        return "postroad"

    async def get_tools(self, ctx: RunContext[Any]) -> dict[str, ToolsetTool[Any]]:
        return {
            name: ToolsetTool(
                toolset=self,
                tool_def=ToolDefinition(
                    name=name, description=tool.description or None, parameters_json_schema=dict(tool.schema),
                    sequential=True,
                ),
                max_retries=ctx.max_retries,
                args_validator=_OBJECT,
            )
            for name, tool in self._tools.items()
        }  # fmt: skip

    async def call_tool(
        self, name: str, tool_args: dict[str, Any], ctx: RunContext[Any], tool: ToolsetTool[Any]
    ) -> str:
        arguments = msgspec.json.encode(tool_args).decode()
        try:
            self._tools[name].parse(arguments)
        except InvalidInput as error:
            raise ModelRetry(error.detail) from None
        try:
            return await self._turn.call_json(name, arguments)
        except OutcomeUnknown as error:
            raise ToolFailed(str(error)) from None


class _Partials:
    """Hands on what a model says, as it comes."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    async def __call__(self, ctx: RunContext[Any], events: AsyncIterable[AgentStreamEvent]) -> None:
        async for event in events:
            for text in _texts(event):
                self._turn.partial(text)


def _texts(event: AgentStreamEvent) -> Iterator[str]:
    match event:
        case PartStartEvent(part=TextPart(content=text)) | PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
            if text:
                yield text
        case _:
            pass


def _written(answer: ModelResponse) -> str | None:
    """An answer as it is recorded; None: it is too large for that, and the model is asked again."""
    written = ModelMessagesTypeAdapter.dump_json([answer]).decode()
    return written if len(msgspec.json.encode(written)) <= ANSWER_BYTES_MAX else None


def _read(written: str) -> ModelResponse:
    (answer,) = ModelMessagesTypeAdapter.validate_json(written)
    assert isinstance(answer, ModelResponse)
    return answer


def _digest(request: ModelRequestContext) -> str:
    """The same for requests that say the same: instructions, and the parts of messages but for when they were said."""
    told = [part.content for part in request.model_request_parameters.instruction_parts or ()]
    plain = ModelMessagesTypeAdapter.dump_python(request.messages, mode="json")
    said = [_lasting(message["parts"]) for message in plain]
    return hashlib.sha256(msgspec.json.encode([told, said], order="sorted")).hexdigest()


def _lasting(value: Any) -> Any:
    match value:
        case dict():
            return {name: _lasting(part) for name, part in value.items() if name not in _PASSING_FIELDS}
        case list():
            return [_lasting(part) for part in value]
        case _:
            return value
