"""A turn as its handler sees it: the exact set of events, the log, and the verbs of a transaction."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from postroad.engine.arguments import Context, payload
from postroad.engine.declarations import Limits
from postroad.engine.delegations import Delegating
from postroad.engine.endings import noop_entries, refused_tasks
from postroad.engine.folding import Folding
from postroad.engine.operating import Operating
from postroad.engine.partials import Voice, words
from postroad.engine.tools import Tool
from postroad.engine.transaction import Transaction
from postroad.model import ids
from postroad.model.clock import moment
from postroad.model.delegations import TIMEOUT_SECONDS, Delegation
from postroad.model.dispatches import Accepted
from postroad.model.errors import InvalidInput, Span, shown
from postroad.model.events import Entry, Event
from postroad.model.folds import Fold
from postroad.model.kinds import Kind
from postroad.model.operations import Operation
from postroad.model.payload import encode, text, whole
from postroad.model.rows import InboxEvent, NewEntry, TurnClaim, TurnCommit
from postroad.store import windows
from postroad.store.database import Database

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
LOG_WINDOW_MAX = 10_000


class Turn(Transaction):
    """The processing of an exact set of events of one stream. What it recorded commits when the handler returns.

    Attributes:
        id: The same for the same set of events, on every attempt.
        stream: The stream's name; `subject` is the part after the first slash.
        events: The events to decide on, oldest first.
        attempt: This attempt's number, from 1.
        now: When this attempt was claimed.
        post: The app.
        tools: The app's tools, by name.
        interrupted: What earlier runs of this turn have called, oldest first; empty on its first run.
        stopping: True once the runtime wants the turn to end: the process is to end, the claim is lost, or the
            deadline has passed. After its end a turn's verbs are refused.
    """

    def __init__(
        self, context: Context, claim: TurnClaim, waiting: Sequence[InboxEvent], *, now: int, post: "Postroad",
        database: Database, folding: Folding, operating: Operating, tools: Mapping[str, Tool[..., Any]],
        ending: Callable[[], bool], voice: Voice, limits: Limits,
    ) -> None:  # fmt: skip
        super().__init__(context)
        self._claim = claim
        self._database = database
        self._folding = folding
        self._ordinal = 0
        self.id = claim.turn_id
        self.stream = claim.stream
        self.events: Sequence[Event] = [event_of(claim.stream, e) for e in waiting]
        self.attempt = claim.attempt
        self.now: datetime = moment(now)
        self.interrupted: Sequence[Operation] = tuple(row.shown() for row in operating.earlier)
        self.tools = tools
        self._operating = operating
        self._delegating = Delegating(self.stream, self.events, database, limits)
        self._ending = ending
        self._voice = voice
        self.post = post

    @property
    def stopping(self) -> bool:
        return self._over or self._ending()

    @property
    def subject(self) -> str:
        """What the stream is about: the part of its name after the first slash."""
        return ids.subject(self.stream)

    def log(self, *, last: int = 200) -> Sequence[Entry]:
        """The stream's `last` entries, oldest first, as of this turn's claim.

        More than `last` if more has come since the previous turn decided, which is never left out; at most 10,000.
        """
        least = whole(last, "last", least=0, most=LOG_WINDOW_MAX)
        return self._database.read(
            windows.window, self.stream, version=self._claim.version, last=least, most=LOG_WINDOW_MAX
        )

    def fold(self, fold: Fold[S]) -> S:
        """The fold's state over the stream's whole log as of this turn's claim."""
        if not isinstance(fold, Fold):
            raise InvalidInput(f"fold must be a Fold, got {shown(fold)}.", field="fold")
        return self._folding.at(self.stream, fold, self._claim.version)

    def record(self, kind: Kind[T] | str, data: T) -> None:
        """Append an entry to this stream's log."""
        name, version, encoded = payload(kind, data)
        self._open_records().entries.append(self._entry(name, version, encoded))

    def partial(self, text: str) -> None:
        """Show what this turn says, piece by piece, to whoever watches its stream, until its entries take its place.

        The text is added to what was said before. Nothing is waited for, and any thread may call this: a model's
        pieces go in as they come. It is not durable, and watchers get it some 0.2 s later. Beyond 256 KiB the text
        ends with "…", and what follows is dropped.

        Raises:
            InvalidInput: This is no text that can be stored.
            Refused: The turn is over.
        """
        said = words(text)
        self._open_records()  # refuses after the turn's end
        self._voice.say(said)

    def delegate(
        self, stream: str, task: Any, *, key: str | None = None, timeout: Span = TIMEOUT_SECONDS
    ) -> Accepted:  # fmt: skip
        """Start work on another stream, which gets `task` as an event of kind TASK; its end comes back as a report.

        The report is the only one: the work is done or failed (`finish` in that stream, or its turn went dead), was
        cancelled (the stream was stopped or deleted), or timed out. `Delegated.of(event)` reads it. Delegating the
        same once more under the same key changes nothing, also after the end.

        Args:
            stream: Whose work it is; it need not exist.
            task: What there is to do: anything that can be a payload.
            key: This stream's name for it; None: it derives from the turn.
            timeout: How long it may take, a day unless given.

        Raises:
            InvalidInput: The stream is not `type/id`, or the key, the task or the timeout cannot be stored.
            Refused: It is this stream itself, too many delegations are open, or they are too deep (`post.delegation`).
            KeyConflict: This stream has delegated something else under the key.
            StreamDeleted: The stream was deleted: at once if this turn deletes it, or if the same was delegated before,
                else at the commit.
        """
        records, child = self._open_records(), self._living(ids.check_stream(stream))
        given = None if key is None else ids.check_event_key(key)
        checked = self._delegating.check(child, task, timeout, given)
        event, made = self._delegating.make(child, self._default_key() if given is None else given, checked)
        accepted = Accepted()
        records.publishes.append((event, accepted))
        if made is not None:
            records.delegated.append(made)
        return accepted

    def finish(self, result: Any = None, *, error: str | None = None, task: Event | Delegation | None = None) -> None:
        """End what was delegated to this stream, with its result or with an error, when this turn commits.

        If it has ended meanwhile (timed out, for one) that end stands, and nothing else happens.

        Args:
            result: What whoever delegated it gets: anything that can be a payload.
            error: Why there is no result.
            task: Which task, as its TASK event or as `tasks` lists it; needed if several are open.

        Raises:
            InvalidInput: A value cannot be stored, or this is no task of the stream.
            Refused: Nothing was delegated to this stream, several tasks are open, or it was finished before in this
                turn.
        """
        self._open_records().finished.append(self._delegating.finish(result, error, task))

    def tasks(self) -> Sequence[Delegation]:
        """What this stream is asked to do and has not finished, oldest first; at most 1,000."""
        return self._delegating.tasks()

    def delegations(self) -> Sequence[Delegation]:
        """What this stream has delegated before this turn and is not over, by key; at most 1,000."""
        return self._delegating.open()

    async def call(self, tool: Tool[P, Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a tool: its start is recorded before, its end after. In an async handler only.

        A turn that is run again gets the recorded results of the same calls, in order, without calling again. A
        keyed tool is handed its key. What the tool raises is raised here too.

        Raises:
            InvalidInput: The arguments don't fit the tool's types; nothing was called.
            TurnStopped: The turn has ended: this call does not repeat what an earlier run had begun to do, or a
                person asked that it stop. Let it pass; nothing that the handler still does is committed.
            OutcomeUnknown: After a person's "continue": nobody knows whether this unsafe call happened.
        """
        if not isinstance(tool, Tool):
            raise InvalidInput(f"tool must be what @post.tool has declared, got {shown(tool)}.", field="tool")
        return cast(R, await self._called(tool, tool.bind(args, kwargs)))

    async def call_json(self, name: str, arguments: str) -> str:
        """Call a tool as a model asked for it: by name, with JSON. The result as text, as JSON unless it is a str.

        An unknown tool, and arguments that don't fit, come back as text that tells the model what is wrong. Everything
        else as in `call`.
        """
        tool = self.tools.get(text(name, "name"))
        if tool is None:
            return f"Unknown tool {shown(name)}. There are: {', '.join(sorted(self.tools)) or 'none'}."
        try:
            fitting = tool.parse(arguments)
        except InvalidInput as error:
            return f"Invalid arguments. {error.detail}"
        result = await self._called(tool, fitting)
        return result if isinstance(result, str) else encode(result, "result")

    async def _called(self, tool: Tool[..., Any], arguments: str) -> Any:
        self._open_records()  # refuses after the turn's end
        return await self._operating.call(tool, arguments)

    def _entry(self, kind: str, version: int, data: str) -> NewEntry:
        ordinal = len(self._records.entries)
        return NewEntry(
            entry_id=ids.entry_id(self.id, ordinal), kind=kind, version=version, data=data,
            run_id=self._claim.run_id, cause=self.id,
        )  # fmt: skip

    def _timer_stream(self, stream: str | None) -> str:
        return self.stream if stream is None else ids.check_stream(stream)

    def _default_key(self, otherwise: str | None = None) -> str:
        self._ordinal += 1
        return ids.key_in_turn(self.id, self._ordinal)

    def commit_at(self, decided_at: int, noops: Mapping[str, str] | None = None) -> TurnCommit:
        """What this turn writes, for a decision taken at `decided_at`; `noops`: reasons by event id."""
        records = self._records
        return TurnCommit(
            claim=self._claim,
            consumed=self._claim.events,
            entries=[*noop_entries(self._claim, noops or {}), *records.entries],
            dispatches=[s.row(self.stream, decided_at) for s in records.sends],
            timers=[t.row(decided_at) for t in records.timers],
            publishes=[event for event, _ in records.publishes],
            reports=records.reports,
            delegated=records.delegated,
            finished=[*refused_tasks(self._claim.events, noops or {}), *records.finished],
            acks=records.acks,
            withdrawals=[key for key, _ in records.withdrawals],
            deletions=records.deletions,
            operated=self._operating.called,
            stoppable=True,
        )


def event_of(stream: str, event: InboxEvent) -> Event:
    """An event as handlers see it."""
    return Event(
        stream=stream, key=event.event_id, kind=event.kind, raw=event.data, version=event.version,
        received=event.received_at,
    )  # fmt: skip
