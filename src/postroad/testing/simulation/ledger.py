"""What clients know: which of their calls were answered with success, refused, or not answered at all."""

from enum import StrEnum
from typing import Any

import msgspec


class Answer(StrEnum):
    """How a call ended, as its caller saw it. INFO: no answer; it may have happened."""

    OK = "ok"
    REFUSED = "refused"
    INFO = "info"


class Call(msgspec.Struct, kw_only=True):
    """One call of a client. `begun` and `ended` are places in the one order of all beginnings and ends.

    `verb` is publish, send or timer; `block`: calls with the same number are one transaction; `joined`: in the
    client's own transaction, beside a row of its own.
    """

    verb: str
    stream: str
    key: str
    data: str
    block: int = 0
    joined: bool = False
    begun: int
    ended: int | None = None
    answer: Answer = Answer.INFO
    error: str = ""


class Ledger:
    """All calls, in the order in which they began."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._order = 0

    def begin(self, *, verb: str, stream: str, key: str, data: str, **about: Any) -> Call:
        """Write that a call begins; if its client dies, that is all that will be known of it."""
        call = Call(verb=verb, stream=stream, key=key, data=data, begun=self._next(), **about)
        self.calls.append(call)
        return call

    def end(self, call: Call, answer: Answer, error: str = "") -> None:
        """Write how it ended."""
        call.answer, call.error, call.ended = answer, error, self._next()

    def accepted(self, verb: str) -> list[Call]:
        """The calls that were answered with success."""
        return [call for call in self.calls if call.verb == verb and call.answer is Answer.OK]

    def attempted(self, verb: str) -> list[Call]:
        """The calls that may have had an effect."""
        return [call for call in self.calls if call.verb == verb and call.answer is not Answer.REFUSED]

    def _next(self) -> int:
        self._order += 1
        return self._order
