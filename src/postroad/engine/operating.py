"""The tool calls of one run: recorded before and after, and matched with what earlier runs of the turn did."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from postroad.engine.calls import Abort, Aborted, Calls, Raised, Returned, TimedOut, run_call
from postroad.engine.declarations import is_async
from postroad.engine.tools import Tool
from postroad.model import ids
from postroad.model.clock import SECOND
from postroad.model.errors import CommitUnknown, InvalidInput, OutcomeUnknown, Refused, TurnStopped
from postroad.model.failpoints import failpoint
from postroad.model.operations import CallStatus, Operation, OperationRow, forbids_rerun, history
from postroad.model.payload import canonical, encode, safe_error
from postroad.model.rows import Hold, TurnClaim
from postroad.store import operations
from postroad.store.database import Database
from postroad.store.groups import Verb

R = TypeVar("R")
MISMATCH = "turn.interrupted.mismatch"
LEFT_OUT = "turn.interrupted.left_out"
EFFECTS = "turn.interrupted.effects"


class Patience(Protocol):
    """Does something again as long as the database is away and the claim is ours."""

    async def __call__(self, work: Callable[[], Awaitable[R]], /) -> R: ...


class Operating:
    """What a run's handler calls its tools through.

    A run that repeats earlier ones gets their recorded results, in order. A call that is none of theirs may read;
    it may act only once everything that they did is repeated. Otherwise the run stops: it has decided otherwise
    than a run that acted already.
    """

    def __init__(
        self, claim: TurnClaim, rows: Sequence[OperationRow], *, database: Database, calls: Calls, abort: Abort,
        patiently: Patience,
    ) -> None:  # fmt: skip
        self._claim = claim
        self._database = database
        self._calls = calls
        self._abort = abort
        self._patiently = patiently
        self._left = history(rows)
        self._ordinal = max((row.ordinal for row in rows), default=0)
        self._open_keys: dict[tuple[str, str], list[str]] = {}
        self._own: dict[int, OperationRow] = {}
        self.earlier: tuple[OperationRow, ...] = tuple(self._left)
        self.stopped: TurnStopped | None = None

    @property
    def called(self) -> bool:
        """Whether this run has recorded a call."""
        return bool(self._own)

    @property
    def acted(self) -> bool:
        """Whether this run or one before it may have changed the world in a way that must not be forgotten."""
        return any(row.acts for row in (*self.earlier, *self._own.values()))

    @property
    def discarded(self) -> bool:
        """Whether a person decided that the turn ends with what it did."""
        return any(row.resolved == "discard" for row in self.earlier)

    @property
    def barred(self) -> bool:
        """Whether the turn must not be run again by itself."""
        return forbids_rerun((*self.earlier, *self._own.values()))

    def shown(self) -> list[Operation]:
        """All that is known of what this turn's runs have called."""
        own = {row.repeats for row in self._own.values()}
        return [row.shown() for row in (*(r for r in self.earlier if r.ordinal not in own), *self._own.values())]

    def check_complete(self) -> None:
        """At the handler's end: TurnStopped if it left out what an earlier run had begun to do."""
        if self.stopped is not None:
            raise self.stopped
        left = next((row for row in self._left if row.acts), None)
        if left is not None:
            raise self._stop(LEFT_OUT, f"an earlier run had called {left.tool}, this one did not")

    async def call(self, tool: Tool[..., Any], arguments: str) -> Any:
        """Call a tool with arguments that fit it, or answer with the recorded result of the same call.

        Raises:
            Refused: This is another event loop than the turn's.
            TurnStopped: The run has decided otherwise than one that acted, or a person asked that it end.
            StaleClaim: The run's claim is over.
            OutcomeUnknown: It repeats an unsafe call of which nobody knows whether it happened.
        """
        if asyncio.get_running_loop() is not self._abort.get_loop():
            raise Refused("Tools are called in the event loop of the turn: make the handler an `async def`.")
        row, found = self._next(tool, arguments)
        failpoint("tool.before_start")
        await self._start(row)
        failpoint("tool.started")
        if found is not None and row.status == CallStatus.REUSED:
            return tool.result(row.result or "null")
        if found is not None and found.effect == "unsafe":
            raise OutcomeUnknown(f"It is not known whether {tool.name} happened; it was not done again.")
        return await self._run(tool, row)

    async def _start(self, row: OperationRow) -> None:
        """Record that a call begins. It counts before its record is answered, which a deadline may not wait for."""
        self._own[row.ordinal] = row
        try:
            await self._record(operations.START, operations.Start(hold=self._hold, row=row))
        except Exception as error:
            if isinstance(error, CommitUnknown):
                self._keep_key(row)
            else:
                del self._own[row.ordinal]  # nothing was written
            raise

    def _next(self, tool: Tool[..., Any], arguments: str) -> tuple[OperationRow, OperationRow | None]:
        """The row of the call that begins, and the earlier one that it repeats."""
        if self.stopped is not None:
            raise self.stopped
        found = self._match(tool, arguments)
        self._ordinal += 1
        known = found is not None and found.finished
        row = OperationRow(
            turn_id=self._claim.turn_id,
            ordinal=self._ordinal,
            run_id=self._claim.run_id,
            stream=self._claim.stream,
            tool=tool.name,
            version=tool.version,
            effect=tool.effect,
            arguments=arguments,
            status=CallStatus.REUSED if known else CallStatus.STARTED,
            result=found.result if found is not None and known else None,
            key=self._key(tool, arguments, found),
            repeats=None if found is None else found.ordinal,
        )
        return row, found

    def _match(self, tool: Tool[..., Any], arguments: str) -> OperationRow | None:
        for place, row in enumerate(self._left):
            if row.is_call(tool.name, tool.version, arguments):
                del self._left[: place + 1]
                return row
            if row.acts:
                if tool.effect in ("keyed", "unsafe"):
                    raise self._stop(MISMATCH, f"an earlier run had called {row.tool}, this one calls {tool.name}")
                return None
        return None

    def _key(self, tool: Tool[..., Any], arguments: str, found: OperationRow | None) -> str | None:
        """A call that is made once more in this run, because it seemed to fail, keeps its key: it may have happened."""
        if tool.effect != "keyed":
            return None
        said = canonical(arguments)
        if found is not None and found.key is not None:
            return found.key
        kept = self._open_keys.get((tool.name, said))
        return kept.pop(0) if kept else ids.operation_key(self._claim.turn_id, self._ordinal, tool.name, said)

    def _keep_key(self, row: OperationRow) -> None:
        if row.key is not None:
            self._open_keys.setdefault((row.tool, canonical(row.arguments)), []).append(row.key)

    async def _run(self, tool: Tool[..., Any], row: OperationRow) -> Any:
        outcome = await self._outcome(tool, row)
        failpoint("tool.returned")
        failed = isinstance(outcome, BaseException)
        end = operations.Finish(
            hold=self._hold,
            turn_id=row.turn_id,
            ordinal=row.ordinal,
            status=CallStatus.FAILED if failed else CallStatus.FINISHED,
            result=safe_error(outcome) if failed else str(outcome),
        )
        try:
            await self._record(operations.FINISH, end)
        except Exception:
            self._keep_key(row)
            raise
        self._own[row.ordinal] = replace(row, status=end.status, result=end.result)
        failpoint("tool.recorded")
        if isinstance(outcome, BaseException):
            self._keep_key(row)
            raise outcome
        return tool.result(outcome)

    async def _outcome(self, tool: Tool[..., Any], row: OperationRow) -> str | BaseException:
        """What the tool returns, as JSON, or what it raises. What has no JSON form fails the call."""
        values = tool.values(row.arguments, row.key)
        match await run_call(self._calls, _calling(tool), values, timeout=tool.timeout, abort=self._abort):
            case Returned(value):
                return _stored(value)
            case Raised(error):
                return error
            case TimedOut(_):
                return TimeoutError(f"{tool.name} took longer than {tool.timeout / SECOND:g} s")
            case Aborted(why):
                raise TurnStopped(why, stream=self._claim.stream, reason="turn.aborted")

    async def _record(self, verb: Verb[Any, None], item: operations.Start | operations.Finish) -> None:
        """Write it; when COMMIT was not answered once more, which changes nothing if it had happened."""
        write = partial(self._database.agroup, verb, item)
        try:
            try:
                await self._patiently(write)
            except CommitUnknown:
                await self._patiently(write)
        except TurnStopped as error:
            self.stopped = error
            raise

    def _stop(self, reason: str, said: str) -> TurnStopped:
        self.stopped = TurnStopped(said, stream=self._claim.stream, reason=reason)
        return self.stopped

    @property
    def _hold(self) -> Hold:
        return Hold(self._claim.stream, self._claim.token)


def _calling(tool: Tool[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    if is_async(tool.fn):

        @wraps(tool.fn)
        async def awaited(values: Mapping[str, Any]) -> Any:
            return await tool.fn(**values)

        return awaited

    @wraps(tool.fn)
    def called(values: Mapping[str, Any]) -> Any:
        return tool.fn(**values)

    return called


def _stored(value: object) -> str | InvalidInput:
    """A result as JSON, or why it cannot be stored: the tool has then done its work, and nobody can repeat that."""
    try:
        return encode(value, "result")
    except InvalidInput as error:
        return error
