"""One message on its way out: as its sender gets it, as an operator sees it, and what verbs answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from postroad.model.errors import Refused

if TYPE_CHECKING:
    from postroad.engine.app import Postroad

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch(Generic[T]):
    """One message on its way out, as its sender gets it.

    Attributes:
        id: 32 hexadecimal digits.
        key: The idempotency key, the same on every attempt; hand it to the destination.
        attempt: This attempt's number, from 1.
        deadline: When this attempt's timeout is over.
        possible_duplicate: An earlier attempt may have reached the destination.
        raw: The payload's exact JSON text, the same on every attempt, as it was accepted in `version` of its kind.
        ack_token: What the consumer presents to acknowledge it; None if no acknowledgement was asked for.
        headers: Names and values that travel beside the payload, such as a trace's context.
        origin: Where it comes from, as the pairs that `send` was given.
    """

    id: str
    key: str
    kind: str
    to: str
    body: T
    attempt: int
    created_at: datetime
    first_attempt_at: datetime
    deadline: datetime
    possible_duplicate: bool
    post: "Postroad"
    ack_token: str | None = field(default=None, repr=False)  # a repr may end up in a log
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: str = "{}"
    version: int = 1
    expires_at: datetime | None = None
    origin: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the provider said: its reference, and more if it matters."""

    reference: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


class Accepted:
    """What `publish` and `send` return; filled when the block is left.

    Attributes:
        id: The event's key or the dispatch's id.
        created: False if the same was accepted before.
    """

    __slots__ = ("created", "id", "position", "stream")

    id: str
    created: bool

    def __init__(self) -> None:
        self.stream: str | None = None
        self.position: int | None = None

    def fill(self, id: str, created: bool, stream: str | None = None, position: int | None = None) -> None:
        """Say what became of it: for an event also its stream and its place in the inbox."""
        self.id = id
        self.created = created
        self.stream = stream
        self.position = position

    def __repr__(self) -> str:
        return f"Accepted(id={getattr(self, 'id', '?')!r}, created={getattr(self, 'created', '?')!r})"


class Withdrawn:
    """Whether the dispatch was still ours to end; filled when the block is left."""

    __slots__ = ("_done",)

    def __init__(self) -> None:
        self._done: bool | None = None

    @property
    def done(self) -> bool:
        """True: it is ended. False: too late, it was ended before, or there is none with this key."""
        if self._done is None:
            raise Refused("Whether it was withdrawn is known when the block is left.")
        return self._done

    @done.setter
    def done(self, value: bool) -> None:
        self._done = value

    def __bool__(self) -> bool:
        return self.done

    def __repr__(self) -> str:
        return f"Withdrawn(done={'?' if self._done is None else self._done})"


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRow:
    """One message as an operator sees it; `cursor` is its place in a list, from which the next page goes on."""

    id: str
    key: str
    stream: str
    kind: str
    to: str
    status: str
    reason: str
    attempt: int
    max_attempts: int | None
    due_at: datetime | None
    expires_at: datetime | None
    last_error: str | None
    created_at: datetime
    updated_at: datetime
    version: int
    epoch: int
    ack_required: bool
    lane: str | None
    origin: Mapping[str, str]
    cursor: str
    history: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchFilter:
    """Which dispatches are meant: those that fit all that is given.

    Attributes:
        status: One of the six statuses.
        kind: Of exactly this kind.
        to: To exactly this destination.
        key: The key begins with this.
        reason: The reason code of the last change, or its last part, such as `max_attempts`.
        origin: Pairs that are among those that `send` was given.
        since: Created at this time (aware) or later.
        before: Created earlier than this.
    """

    status: str | None = None
    kind: str | None = None
    to: str | None = None
    key: str | None = None
    reason: str | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    since: datetime | None = None
    before: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What an operator's verb came to; true if it did anything.

    Attributes:
        found: How many dispatches were meant.
        done: How many of them it changed; none in a dry run.
        said: One sentence for people.
        refused: Why the others were left as they are: a sentence, and of how many it holds.
        id: Of one dispatch that was named: its id, or that of the new one.
        sample: Of many: some of them, as they stood before.
    """

    found: int
    done: int
    said: str
    refused: Mapping[str, int] = field(default_factory=dict)
    id: str | None = None
    sample: Sequence[DispatchRow] = ()

    def __bool__(self) -> bool:
        return self.done > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something a person must know, raised where another dispatch would loop."""

    severity: str
    code: str
    subject: str
    raised_at: datetime
    detail: str = ""
