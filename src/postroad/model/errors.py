"""Every error that Postroad raises. A class's docstring is its message; what it is about are attributes."""

from datetime import timedelta
from typing import Any

Span = float | timedelta
SHOWN_CHARS_MAX = 80
INSIDE = (
    "A function that `write` runs, or a `stream_owner`, works with the connection that it is given: there "
    "post.join(connection) does what post.begin() does elsewhere. What takes no connection, such as post.report or "
    "post.read, is called after the transaction, or by the turn's handler itself."
)


def shown(value: object) -> str:
    """A value as an error's text may show it: bounded, and whatever its repr does."""
    try:
        said = repr(value)
    except Exception:  # a user's __repr__, or an integer of too many digits
        said = f"a value of type {type(value).__name__}"
    return said if len(said) <= SHOWN_CHARS_MAX else said[: SHOWN_CHARS_MAX - 1] + "…"


class PostroadError(Exception):
    """Something went wrong in Postroad."""

    def __init__(self, detail: str = "", **about: Any) -> None:
        self.detail = detail
        self.about = about
        for name, value in about.items():
            setattr(self, name, value)
        super().__init__(detail)

    def __str__(self) -> str:
        said = (type(self).__doc__ or "").strip().split("\n", 1)[0]
        if self.detail and said == f"{type(self).__name__}.":
            return self.detail  # whoever shows an error shows its class first
        return f"{said} {self.detail}".strip()


class Verdict(PostroadError):
    """What a handler says by raising."""

    reason: str

    def __str__(self) -> str:
        return self.reason or (type(self).__doc__ or "")


class RetryLater(Verdict):
    """Try again later."""

    def __init__(self, reason: str = "", *, after: Span | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after


class Unreachable(RetryLater):
    """The destination cannot be reached, and got nothing."""

    def __init__(self, reason: str = "", *, after: Span | None = None, whole_kind: bool = False) -> None:
        super().__init__(reason, after=after)
        self.whole_kind = whole_kind


class GiveUp(Verdict):
    """Trying again will not help."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class OutcomeUnknown(Verdict):
    """It may have happened."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Refused(PostroadError):
    """Refused."""


class InvalidInput(Refused):
    """This value is not accepted."""


class KeyConflict(Refused):
    """This key is taken by other content."""

    key: str


class TimerConflict(Refused):
    """This timer was set before; use rearm_timer to start it again."""

    key: str


class UnknownKind(Refused):
    """Nobody in this app declares this kind: give it a sender, a transport, `kinds` or `elsewhere`."""


class NotInTransaction(Refused):
    """This needs an open transaction of a connection."""


class NestedTransaction(Refused):
    """This was called from inside a transaction, where no other one can be opened."""

    def __init__(self, detail: str = INSIDE, **about: Any) -> None:
        super().__init__(detail, **about)


class StreamDeleted(Refused):
    """This stream was deleted."""

    stream: str


class SourceRefused(Refused):
    """The source of this report is not accepted."""


class DispatchNotFound(Refused):
    """There is no such dispatch."""


class AckNotRequested(Refused):
    """This dispatch asked for no acknowledgement."""


class BadAckToken(Refused):
    """This token acknowledges nothing."""


class AckRefused(Refused):
    """This dispatch can no longer be acknowledged."""


class ConcurrencyConflict(PostroadError):
    """The stream has moved on; read it again and decide again."""

    stream: str


class DuplicateEntry(PostroadError):
    """These entries are in the log already."""

    stream: str
    entry_ids: tuple[str, ...]


class DuplicateKey(PostroadError):
    """A dispatch with this key exists already."""

    keys: tuple[str, ...]


class StaleClaim(PostroadError):
    """The claim is over; somebody else may own this by now. Nothing was changed."""


class TurnStopped(PostroadError):
    """This turn was stopped: it decides nothing more."""

    stream: str
    reason: str


class IllegalEdge(PostroadError):
    """A dispatch cannot go from this status to that one."""


class SchemaMismatch(PostroadError):
    """The database's schema does not fit this version of Postroad."""


class CommitUnknown(PostroadError):
    """The connection broke while COMMIT was under way: look up whether it happened, never run it again blindly."""


class TransactionAborted(PostroadError):
    """The database had aborted this transaction before COMMIT; nothing was written."""


class DatabaseBusy(PostroadError):
    """Another connection held the database's write lock for too long; nothing was written."""


class DatabaseReplaced(PostroadError):
    """The database's file was removed or replaced while it was open; nothing was written."""

    path: str
