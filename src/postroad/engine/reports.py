"""Reports: durable before anybody waits for them, and whoever gives up waiting changes nothing."""

import asyncio
from contextvars import ContextVar
from typing import Any, Literal

from msgspec.structs import replace

from postroad.engine.declarations import Decider, one_of
from postroad.engine.wakeups import Wakeups
from postroad.engine.watching import Hub
from postroad.model import reports
from postroad.model.clock import SECOND, span
from postroad.model.errors import InvalidInput, Refused, Span
from postroad.model.events import REPORT_NAME, Entry
from postroad.model.ids import check_event_key, check_stream
from postroad.model.payload import encode, text
from postroad.model.rows import TurnClaim
from postroad.store.database import Database
from postroad.store.groups import Name, Verb
from postroad.store.reports import NewReport, OwnerOf, accept
from postroad.store.watching import Asked

OnConflict = Literal["keep", "error"]
# Set while code of a turn runs: what it waited for could not land before it has ended.
IN_TURN: ContextVar[bool] = ContextVar("postroad_in_turn", default=False)


def lands(claim: TurnClaim, decider: Decider) -> bool:
    """Whether a claimed set is one of reports that wake nobody."""
    return not decider.wake_on_report and all(event.kind == REPORT_NAME for event in claim.events)


def written(
    stream: str, data: Any, *, key: str, source: str | None, owner: str | None, on_conflict: OnConflict
) -> NewReport:
    """A report as it was given, held against what can be stored; raises as `Postroad.report`."""
    origin = None if source is None else check_stream(source, "source")
    keep = one_of(on_conflict, ("keep", "error"), "on_conflict") == "keep"
    event = reports.event(check_stream(stream), check_event_key(key), encode(data), source=origin)
    whose = None if owner is None else text(owner, "owner")
    if whose is not None and origin is None:
        raise InvalidInput("owner says whose the source has to be: give source, too.", field="owner")
    return NewReport(event=replace(event, keep=keep), source=origin, owner=whose)


def _names(report: NewReport) -> list[Name]:
    return [("event", report.event.stream, report.event.event_id)]


ACCEPT = Verb(run=accept, names=_names)


class Reporting:
    """How an app's reports are accepted and waited for."""

    def __init__(self, database: Database, wakeups: Wakeups, hub: Hub, owner_of: OwnerOf | None) -> None:
        self._database = database
        self._wakeups = wakeups
        self._hub = hub
        self._owner_of = owner_of

    def report(self, report: NewReport, wait: Span | None) -> Entry | None:
        """Accept it, then wait in this thread."""
        length, report = _length(wait), replace(report, tells=not self._wakeups.relayed)
        if report.source is None or self._owner_of is None:
            entry = self._database.group(ACCEPT, report)
        else:
            (entry,) = self._database.transact(accept, [report], owner_of=self._owner_of)
        if entry is not None:
            return entry
        self._wakeups.announce(("turns",))
        if length == 0:
            return None
        try:
            news = self._hub.wait(_end_of(report), seconds=None if length is None else length / SECOND)
        except Refused:  # the app was closed: nobody waits any more, and it lands all the same
            return None
        return news.entries[0] if news is not None and news.entries else None

    async def areport(self, report: NewReport, wait: Span | None) -> Entry | None:
        """Accept it, whatever becomes of the caller, then wait."""
        length, report = _length(wait), replace(report, tells=not self._wakeups.relayed)
        entry = await self._accept(report)
        if entry is not None or length == 0:
            return entry
        try:
            async with asyncio.timeout(None if length is None else length / SECOND):
                news = await self._hub.news(_end_of(report))
        except (TimeoutError, Refused):
            return None
        return news.entries[0] if news.entries else None

    async def _accept(self, report: NewReport) -> Entry | None:
        try:
            if report.source is None or self._owner_of is None:
                entry = await self._database.agroup(ACCEPT, report)
            else:
                (entry,) = await self._database.atransact(accept, [report], owner_of=self._owner_of)
        except asyncio.CancelledError:  # which came once the transaction was over
            self._wakeups.announce(("turns",))
            raise
        if entry is None:
            self._wakeups.announce(("turns",))
        return entry


def _end_of(report: NewReport) -> Asked:
    return Asked(report.event.stream, event=report.event.event_id)


def _length(wait: Span | None) -> int | None:
    """How long to wait, in microseconds; None: until it has ended."""
    given = None if wait is None else span(wait, "wait")
    return 0 if IN_TURN.get() else given
