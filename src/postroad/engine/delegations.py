"""What a turn delegates to other streams, how it ends what was delegated to its own, and what operators do about it."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from postroad.engine.declarations import TASK, Limits, one_of, positive
from postroad.model import ids
from postroad.model.clock import SECOND
from postroad.model.delegations import (
    Cancellation,
    Delegation,
    DelegationEnd,
    DelegationStatus,
    NewDelegation,
    Standing,
    Task,
)
from postroad.model.errors import InvalidInput, KeyConflict, Refused, Span, shown
from postroad.model.events import TASK_NAME, Event
from postroad.model.payload import encode, safe_error, text, whole
from postroad.model.rows import NewEvent
from postroad.store import audit, delegation_views, delegations
from postroad.store.database import Database
from postroad.store.delegation_views import Wanted

LISTED_MAX = 1_000
ASKED_MAX = 10_000
_Place = tuple[str, str]


class Delegating:
    """The delegations of one run of a turn.

    Only a turn of a stream delegates for it, and turns of a stream come one after the other: what is open when the
    handler looks can only have become fewer when it commits. So the bounds are held at the verb.
    """

    def __init__(self, stream: str, events: Sequence[Event], database: Database, limits: Limits) -> None:
        self._stream = stream
        self._tasks = [task for event in events if (task := TASK.of(event)) is not None]
        self._database = database
        self._limits = limits
        self._standing: Standing | None = None
        self._made: dict[str, NewEvent] = {}
        self._ended: set[_Place] = set()

    def check(self, child: str, task: Any, timeout: Span, key: str | None) -> tuple[str, int, int]:
        """The task's JSON, its depth and its time (microseconds), if it may be delegated.

        Raises:
            InvalidInput: A value cannot be stored.
            Refused: It is the stream itself, or beyond the bounds.
        """
        if child == self._stream:
            raise Refused("A stream does not delegate to itself; publish to it instead.")
        encoded, length = encode(task, "task"), positive(timeout, "timeout")
        standing = self._stands()
        depth = 1 + max([standing.depth, *(each.depth for each in self._tasks)])
        if depth > self._limits.depth:
            raise Refused(f"{self._stream} is {depth - 1} delegations deep; no more than {self._limits.depth} may be.")
        if self._is_full(key):
            raise Refused(f"{self._stream} has {self._limits.fan_out} delegations open; no more may be.")
        return encoded, depth, length

    def make(self, child: str, key: str, checked: tuple[str, int, int]) -> tuple[NewEvent, NewDelegation | None]:
        """The event that starts it, and the row to write; None: this turn has delegated the same before.

        Raises:
            KeyConflict: This stream has delegated something else under the key.
            StreamDeleted: It has delegated this before, to a stream that was deleted.
        """
        task, depth, length = checked
        said = Task(
            parent=self._stream, key=key, data=msgspec.Raw(task.encode()), depth=depth, timeout=length / SECOND
        )  # fmt: skip
        event = NewEvent(
            stream=child, event_id=ids.task_id(self._stream, key), kind=TASK_NAME,
            data=msgspec.json.encode(said).decode(),
        )  # fmt: skip
        if (first := self._made.get(key)) is not None:
            if first != event:
                raise KeyConflict(f"This turn has delegated something else under {key!r}.", key=key)
            return event, None
        self._database.read(delegations.check_same, self._stream, key, event)
        self._made[key] = event
        made = NewDelegation(
            stream=self._stream, key=key, child=child, event_id=event.event_id, depth=depth, timeout=length
        )  # fmt: skip
        return event, made

    def finish(self, result: Any, error: str | None, task: Event | Delegation | None) -> DelegationEnd:
        """How a task of this stream ends.

        Raises:
            InvalidInput: A value cannot be stored, or this is no task of the stream.
            Refused: There is none, several are open, or this turn has finished it before.
        """
        if error is not None and result is not None:
            raise InvalidInput("Give a result or an error, not both.", field="error")
        if error is not None and not (isinstance(error, str) and error.strip()):
            raise InvalidInput(f"error must be a text that says why, got {shown(error)}.", field="error")
        encoded = encode(result, "result")
        stream, key = place = self._only() if task is None else self._place(task)
        if place in self._ended:
            raise Refused(f"This turn has finished {key!r} of {stream} before.")
        self._ended.add(place)
        status = DelegationStatus.DONE if error is None else DelegationStatus.FAILED
        said = None if error is None else safe_error(error)
        return DelegationEnd(stream=stream, key=key, status=status, result=encoded, error=said)

    def open(self) -> list[Delegation]:
        """What this stream has delegated and has not ended, by key."""
        return self._database.read(delegations.of, self._stream, open_only=True, limit=LISTED_MAX)

    def tasks(self) -> list[Delegation]:
        """What this stream is asked to do and has not finished, oldest first."""
        return self._database.read(delegations.open_of, self._stream, limit=LISTED_MAX)

    def _stands(self) -> Standing:
        if self._standing is None:
            self._standing = self._database.read(delegations.standing, self._stream, most=self._limits.fan_out)
        return self._standing

    def _is_full(self, key: str | None) -> bool:
        """Whether there is no room for a new one. One under a known key is none: the first stands, open or ended."""
        most, count = self._limits.fan_out, self._stands().open
        if count + len(self._made) < most or key in self._made or (key is not None and self._is_known(key)):
            return False
        return count + sum(not self._is_known(made) for made in self._made) >= most

    def _is_known(self, key: str) -> bool:
        return self._database.read(delegations.known, self._stream, key) is not None

    def _place(self, task: object) -> _Place:
        if isinstance(task, Delegation) and task.stream == self._stream:
            return task.parent, task.key
        if isinstance(task, Event) and task.stream == self._stream and (told := TASK.of(task)) is not None:
            return told.parent, told.key
        raise InvalidInput(
            f"task must be a task of {self._stream}, as its TASK event, got {shown(task)}.", field="task"
        )

    def _only(self) -> _Place:
        """The task that is meant when none is named: the open one, or else the one whose end it comes too late for."""
        rows = self._database.read(delegations.open_of, self._stream, limit=2 + len(self._ended))
        places = [place for row in rows if (place := (row.parent, row.key)) not in self._ended]
        if len(places) > 1:
            raise Refused(f"{self._stream} has several tasks open: say which one by `task`, its TASK event.")
        if places:
            return places[0]
        if self._ended:
            raise Refused(f"This turn has finished all that was delegated to {self._stream}.")
        last = self._database.read(delegations.last_of, self._stream)
        if last is None:
            raise Refused(f"Nothing was delegated to {self._stream}.")
        return last.parent, last.key


class Delegations:
    """What an operator may look at and do in delegations, of all streams. What changes anything is audited.

    `alist` and `acancel` are `list` and `cancel` for async code.
    """

    def __init__(self, database: Callable[[], Database], wake: Callable[[], None]) -> None:
        self._database = database
        self._wake = wake

    def list(
        self, *, status: str | None = None, stream: str | None = None, to: str | None = None, limit: int = 50,
        after: tuple[str, str] | None = None,
    ) -> Sequence[Delegation]:  # fmt: skip
        """Delegations by the streams that want them, and keys.

        Args:
            status: "open", or one that they have ended as.
            stream: Only what this stream has delegated.
            to: Only what was delegated to this stream.
            limit: At most so many, up to 10,000.
            after: Only those behind the one of this stream and key.
        """
        given = wanted(status, stream, to, after)
        return self._database().read(delegation_views.list_, given, limit=whole(limit, "limit", most=ASKED_MAX))

    async def alist(
        self, *, status: str | None = None, stream: str | None = None, to: str | None = None, limit: int = 50,
        after: tuple[str, str] | None = None,
    ) -> Sequence[Delegation]:  # fmt: skip
        """Delegations by the streams that want them, and keys: as `list`."""
        given, most = wanted(status, stream, to, after), whole(limit, "limit", most=ASKED_MAX)
        return await self._database().aread(delegation_views.list_, given, limit=most)

    def cancel(self, stream: str, key: str, *, actor: str, reason: str = "") -> Cancellation:
        """End the delegation that a stream has under this key, as cancelled; it is told so by a report.

        The task is withdrawn if it waits, and a turn that has begun with nothing else ends, as if its stream were
        stopped. Whatever else that stream has to do goes on. If the delegation has ended before, that end stands and
        the answer says so.
        """
        place, by = (ids.check_stream(stream), text(key, "key")), audit.operator(actor, reason)
        done = self._database().transact(delegations.cancel_by, *place, by=by)
        self._wake()
        return done

    async def acancel(self, stream: str, key: str, *, actor: str, reason: str = "") -> Cancellation:
        """End one delegation as cancelled: as `cancel`."""
        place, by = (ids.check_stream(stream), text(key, "key")), audit.operator(actor, reason)
        done = await self._database().atransact(delegations.cancel_by, *place, by=by)
        self._wake()
        return done


def wanted(status: str | None, stream: str | None, to: str | None, after: tuple[str, str] | None) -> Wanted:
    """Which delegations are meant; InvalidInput for a name that cannot be."""
    return Wanted(
        status=None if status is None else one_of(status, tuple(each.value for each in DelegationStatus), "status"),
        stream=None if stream is None else ids.check_stream(stream),
        child=None if to is None else ids.check_stream(to),
        after=None if after is None else (ids.check_stream(after[0]), text(after[1], "after")),
    )
