"""What the verbs of a transaction are given, held against what can be stored, and made into what is recorded."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Literal, Protocol, TypeVar

from postroad.engine.records import Content, Sending, When
from postroad.model.acks import Keyring
from postroad.model.clock import micros, span
from postroad.model.dispatches import Accepted
from postroad.model.entropy import Entropy
from postroad.model.errors import InvalidInput, Span, shown
from postroad.model.gates import host_of
from postroad.model.ids import RESERVED_PREFIXES, check_name
from postroad.model.kinds import Kind
from postroad.model.payload import content_hash, encode, text
from postroad.store.statements import as_json

T = TypeVar("T")
NO_ORIGIN: Mapping[str, str] = {}


class Declared(Protocol):
    """What a transaction needs to know of a kind that is sent."""

    @property
    def on_failure(self) -> Literal["event", "alert"]: ...
    @property
    def attempts_max(self) -> int | None: ...


class Context(Protocol):
    """What a transaction needs of its app."""

    entropy: Entropy

    @property
    def relayed(self) -> bool:
        """Whether this process tells others what it has committed, so that the transaction need not."""

    @property
    def keyring(self) -> Keyring:
        """The server's keys."""

    def declared(self, kind: str) -> Declared:
        """How this app carries out a kind; UnknownKind if nobody declared it."""


def sending(
    context: Context,
    kind: Kind[T] | str,
    body: T | None,
    *,
    to: str,
    key: str | None,
    at: datetime | None,
    after: Span | None,
    expires: Span | datetime | None,
    lane: str | None,
    ack: bool,
    on_conflict: str,
    origin: Mapping[str, str],
    default_key: Callable[[str], str],
) -> Sending:
    """A dispatch as `Transaction.send` records it; raises as that does.

    Without a `key` it gets `default_key('')`, where '' means its id. What is refused takes none: in a turn keys are
    numbered, and what is sent afterwards must have the same one on every attempt.
    """
    if _flag(ack, "ack"):
        context.keyring.require()
    content = _content(kind, body, to)
    declared = context.declared(content.kind)
    return Sending(
        id=context.entropy.token(),
        content=content,
        on_failure=declared.on_failure,
        max_attempts=declared.attempts_max,
        when=when(at, after),
        expires=_expiry(expires),
        origin=_pairs(origin),
        keep=_keeps(on_conflict),
        lane=None if lane is None else text(lane, "lane"),
        ack=ack,
        accepted=Accepted(),
        key=default_key("") if key is None else text(key, "key"),
    )


def when(at: datetime | None, after: Span | None) -> When:
    """A time that was given as such, or as a length of time; not both."""
    if at is not None and after is not None:
        raise InvalidInput("Give `at` or `after`, not both.", field="at")
    return When(
        at=None if at is None else micros(at, "at"),
        after=0 if after is None else span(after, "after"),
        given=at is not None or after is not None,
    )


def _expiry(expires: Span | datetime | None) -> When | None:
    if expires is None:
        return None
    if isinstance(expires, datetime):
        return When(at=micros(expires, "expires"), after=0, given=True)
    return When(at=None, after=span(expires, "expires"), given=True)


def _pairs(origin: Mapping[str, str]) -> str:
    if origin is NO_ORIGIN:
        return "{}"
    if not isinstance(origin, Mapping) or not all(isinstance(part, str) for pair in origin.items() for part in pair):
        raise InvalidInput(f"origin must be a mapping of text to text, got {type(origin).__name__}.", field="origin")
    return encode(dict(origin), "origin", bytes_max=4096)


def _flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{field} must be True or False, got {shown(value)}.", field=field)
    return value


def _keeps(on_conflict: object) -> bool:
    if on_conflict not in ("error", "keep"):
        raise InvalidInput(f"on_conflict must be 'error' or 'keep', got {shown(on_conflict)}.", field="on_conflict")
    return on_conflict == "keep"


def _content(kind: Kind[T] | str, body: T | None, to: str) -> Content:
    """What a dispatch says and to whom; no body is `{}`."""
    bodiless = body is None and not (isinstance(kind, Kind) and kind.takes_none())
    name, version, encoded = payload(kind, {} if bodiless else body, "body")
    destination = text(to, "to", bytes_max=2048, empty=to == "")
    digest = content_hash(name, encoded, as_json(destination))
    return Content(
        kind=name, version=version, destination=destination, body=encoded, digest=digest, host=host_of(destination)
    )


def payload(kind: Kind[T] | str, data: object, field: str = "data") -> tuple[str, int, str]:
    """A kind's name and version, and the payload's text held against its type; built-in kinds are refused."""
    name = kind.name if isinstance(kind, Kind) else check_name(kind, "kind")
    if name.startswith(RESERVED_PREFIXES):
        raise InvalidInput(f"kind must not begin with {' or '.join(RESERVED_PREFIXES)}; these are ours.", field="kind")
    if isinstance(kind, Kind):
        return name, kind.version, kind.encode(data, field)
    return name, 1, encode(data, field)
