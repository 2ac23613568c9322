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


class ReportCall(msgspec.Struct, kw_only=True):
    """One call that reports; `begun` and `ended` as in `Call`, `at` and `until` by the steady clock in microseconds.

    `data` is JSON. `strict`: other content under its key is an error. `wait` in seconds, None for as long as it takes;
    `patience`: after how many it is cancelled. `hopeless`: its source is none that can be accepted. `entry`: of which
    one it was told, by its seq. `lost`: its process has died or ended, or it was cancelled with it.
    """

    stream: str
    key: str
    data: str
    source: str | None = None
    owner: str | None = None
    strict: bool = False
    wait: float | None = 0
    patience: float | None = None
    hopeless: bool = False
    begun: int = 0
    ended: int | None = None
    at: int = 0
    until: int = 0
    answer: Answer = Answer.INFO
    error: str = ""
    entry: int | None = None
    lost: bool = False


class Ledger:
    """All calls, in the order in which they began."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.reports: list[ReportCall] = []
        self._order = 0

    def begin(self, *, verb: str, stream: str, key: str, data: str, **about: Any) -> Call:
        """Write that a call begins; if its client dies, that is all that will be known of it."""
        call = Call(verb=verb, stream=stream, key=key, data=data, begun=self._next(), **about)
        self.calls.append(call)
        return call

    def begin_report(self, call: ReportCall, *, at: int) -> None:
        """Write that a call begins that reports."""
        call.begun, call.at = self._next(), at
        self.reports.append(call)

    def end(self, call: Call | ReportCall, answer: Answer, error: str = "") -> None:
        """Write how it ended."""
        call.answer, call.error, call.ended = answer, error, self._next()

    def accepted(self, verb: str) -> list[Call]:
        """The calls that were answered with success."""
        return [call for call in self.calls if call.verb == verb and call.answer is Answer.OK]

    def attempted(self, verb: str) -> list[Call]:
        """The calls that may have had an effect."""
        return [call for call in self.calls if call.verb == verb and call.answer is not Answer.REFUSED]

    def reported(self) -> list[ReportCall]:
        """The reports that may have had an effect."""
        return [call for call in self.reports if call.answer is not Answer.REFUSED and not call.hopeless]

    def _next(self) -> int:
        self._order += 1
        return self._order
