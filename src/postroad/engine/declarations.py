"""What can be declared, as values, and the checks of what was given."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar

from postroad.engine.tools import Tool
from postroad.model.clock import SECOND, span
from postroad.model.crons import Cron
from postroad.model.delegations import DEPTH_MAX, FAN_OUT_MAX, Task
from postroad.model.dispatches import Alert, Dispatch, Receipt
from postroad.model.errors import InvalidInput, Refused, Span, UnknownKind, shown
from postroad.model.events import OUTCOME_NAME, REPORT_NAME, TASK_NAME, TIMER_FIRED_NAME, Event, Outcome
from postroad.model.ids import check_name
from postroad.model.kinds import Kind
from postroad.model.payload import callable_, whole
from postroad.model.reports import Report
from postroad.model.retry import Retry
from postroad.model.rows import SendPolicy

if TYPE_CHECKING:
    from postroad.engine.turn import Turn
    from postroad.store.reports import OwnerOf

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
OnFailure = Literal["event", "alert"]
OnUnknown = Literal["resend", "park"]
OnDead = Literal["block", "skip"]
WhenInterrupted = Literal["show", "park"]

OUTCOME: Kind[Outcome] = Kind(OUTCOME_NAME, Outcome)
TIMER_FIRED: Kind[Any] = Kind(TIMER_FIRED_NAME, Any)
REPORT: Kind[Report] = Kind(REPORT_NAME, Report)
TASK: Kind[Task] = Kind(TASK_NAME, Task)

CONCURRENCY_MAX = 10_000
RATE_MIN, RATE_MAX = 1 / 86_400, 100_000.0  # once a day is a schedule rather than a rate
KILL_GRACE = 1 * SECOND
LEASE_MARGIN = SECOND // 2
LEASE_ABOVE_TIMEOUT = 5 * SECOND
TURN_LEASE = 30 * SECOND
# No code runs between claim and commit, so whoever is later than that is gone.
RECORDED_LEASE = 5 * SECOND


class Transport(Protocol):
    """Carries a dispatch somewhere. Returns a Receipt, a str or None: all success; anything else is an error."""

    async def send(self, dispatch: Dispatch[Any], /) -> Receipt | str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    """How this app carries out a kind. Lengths of time in microseconds."""

    kind: Kind[Any]
    fn: Callable[[Dispatch[Any]], Any]
    timeout: int
    concurrency: int
    on_unknown: OnUnknown
    policy: SendPolicy
    dedup_window: int | None = None
    concurrency_per_host: int | None = None
    default: bool = False  # by the default transport, until somebody declares another

    @property
    def horizon(self) -> int:
        """The longest time from the first send of a dispatch to the end of its last one."""
        return self.policy.retry.horizon(self.timeout)

    @property
    def on_failure(self) -> OnFailure:
        return self.policy.on_failure

    @property
    def attempts_max(self) -> int | None:
        return self.policy.retry.attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A kind that this app sends and another one carries out."""

    kind: Kind[Any]
    on_failure: OnFailure = "event"
    attempts_max: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """How this app decides for streams of a type. Lengths of time in microseconds."""

    stream_type: str
    fn: Callable[["Turn"], Any] | None
    debounce: int = 0
    debounce_max: int = 0
    concurrency: int = 10
    attempts: int = 5
    timeout: int = 300 * SECOND
    lease: int = TURN_LEASE
    when_interrupted: WhenInterrupted = "show"
    wake_on_report: bool = False
    on_duplicate: Callable[["Turn", str], None] | None = None
    cron: Cron | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How deep and how widely streams of a type may delegate."""

    depth: int = DEPTH_MAX
    fan_out: int = FAN_OUT_MAX


@dataclass(frozen=True, slots=True)
class Filter:
    """A reason why an event of a kind needs no decision."""

    kind: Kind[Any]
    fn: Callable[[Event], str | None]

    def reason(self, event: Event) -> str | None:
        """Why this event needs no decision, or None. InvalidInput for any other answer."""
        if event.kind not in self.kind.names:
            return None
        answer: object = self.fn(event)
        if answer is None or (isinstance(answer, str) and answer):
            return answer
        if inspect.iscoroutine(answer):
            answer.close()
        raise InvalidInput(f"A filter answers with a reason, a text, or None; got {shown(answer)}.", field="filter")


@dataclass(slots=True)
class Registry:
    """All that was declared."""

    senders: dict[str, Sender] = field(default_factory=dict)
    elsewhere: dict[str, Elsewhere] = field(default_factory=dict)
    deciders: dict[str, Decider] = field(default_factory=dict)
    filters: dict[str, list[Filter]] = field(default_factory=dict)
    sinks: list[Callable[[Alert], None]] = field(default_factory=list)
    tools: dict[str, Tool[..., Any]] = field(default_factory=dict)
    limits: dict[str, Limits] = field(default_factory=dict)
    owner_of: "OwnerOf | None" = None

    @property
    def crons(self) -> list[Cron]:
        """The crons among them."""
        return [decider.cron for decider in self.deciders.values() if decider.cron is not None]

    def declared(self, kind: str) -> Sender | Elsewhere:
        """How a kind is carried out; UnknownKind if nobody declared it."""
        found = self.senders.get(kind) or self.elsewhere.get(kind)
        if found is None:
            raise UnknownKind(f"Kind {kind!r}.", kind=kind)
        return found

    def add(self, other: "Registry") -> None:
        """Take over another registry's declarations; a second one of the same thing is refused."""
        for key, sender in other.senders.items():
            put_sender(self.senders, key, sender)
        for name in ("elsewhere", "deciders", "tools", "limits"):
            for key, value in getattr(other, name).items():
                put(getattr(self, name), key, value, name)
        for stream_type, filters in other.filters.items():
            self.filters.setdefault(stream_type, []).extend(filters)
        self.sinks.extend(other.sinks)
        if other.owner_of is not None:
            self.own(other.owner_of)

    def own(self, owner_of: "OwnerOf") -> None:
        """Declare once who says whose a stream is."""
        if self.owner_of is not None:
            raise Refused("stream_owner is declared twice.")
        self.owner_of = owner_of


def put(table: dict[str, T], key: str, value: T, what: str) -> None:
    """Declare something once."""
    if key in table:
        raise Refused(f"{what} for {key!r} is declared twice.")
    table[key] = value


def put_sender(senders: dict[str, Sender], name: str, sender: Sender) -> None:
    """Declare a sender once. One by the default transport gives way to any other, whichever came first."""
    if sender.default:
        senders.setdefault(name, sender)
    elif name in senders and not senders[name].default:
        raise Refused(f"A sender for {name!r} is declared twice.")
    else:
        senders[name] = sender


def known_kind(kind: Kind[Any] | str) -> Kind[Any]:
    if not isinstance(kind, Kind | str):
        raise InvalidInput(
            f"kind must be a Kind or its name, as in `@post.sender(MAIL)`, got {shown(kind)}.", field="kind"
        )
    return kind if isinstance(kind, Kind) else Kind(kind, Any)


def check_retry(retry: Retry) -> Retry:
    if not isinstance(retry, Retry):
        raise InvalidInput(f"retry must be a Retry, such as Retry.QUICK, got {shown(retry)}.", field="retry")
    return retry


def check_stream_type(name: str) -> str:
    if callable(name):
        raise InvalidInput(
            f"stream_type must be a name, as in `@post.turn('chat')`, got {shown(name)}.", field="stream_type"
        )
    if "/" in check_name(name, "stream_type"):
        raise InvalidInput(f"stream_type is what stands before the slash, got {name!r}.", field="stream_type")
    return name


def count(value: int, field: str, most: int = CONCURRENCY_MAX) -> int:
    return whole(value, field, most=most)


def rate_of(value: float | None, field: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not RATE_MIN <= value <= RATE_MAX:
        raise InvalidInput(
            f"{field} must be attempts per second, from {RATE_MIN:g} to {RATE_MAX:g}, got {shown(value)}.", field=field
        )
    return float(value)


def positive(value: Span, field: str) -> int:
    length = span(value, field)
    if length == 0:
        raise InvalidInput(f"{field} must be above 0.", field=field)
    return length


def one_of(value: T, allowed: Sequence[T], field: str) -> T:
    if value not in allowed:
        raise InvalidInput(f"{field} must be one of {list(allowed)}, got {shown(value)}.", field=field)
    return value


def lease_of(lease: Span | None, timeout: int) -> int:
    if lease is None:
        return timeout + LEASE_ABOVE_TIMEOUT
    length = positive(lease, "lease")
    least = timeout + KILL_GRACE + LEASE_MARGIN
    if length <= least:
        raise InvalidInput(
            f"lease must be longer than timeout + {(KILL_GRACE + LEASE_MARGIN) / SECOND} s "
            f"({least / SECOND} s), got {length / SECOND} s.",
            field="lease",
        )
    return length


def names_of(senders: Iterable[Sender]) -> list[str]:
    """The names, former ones included, under which rows of these senders may wait."""
    return [name for sender in senders for name in sender.kind.names]


def is_async(fn: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    # Of the function itself first: a functools.partial is looked into only there.
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def runnable(fn: Callable[..., Any], field: str) -> None:
    """Refuse what cannot be called, and generators: calling one runs nothing of it."""
    callable_(fn, field)
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise InvalidInput(f"{field} must not `yield`: nothing of {shown(fn)} would run.", field=field)


def plain(fn: Callable[..., Any], field: str) -> None:
    """Refuse what is called without anybody to await it, if it is async or cannot be called."""
    runnable(fn, field)
    if is_async(fn):
        said = f"{field} must be a plain `def`, got the async {shown(fn)}: nothing awaits it."
        raise InvalidInput(said + " What must wait belongs into a sender or a turn.", field=field)
