"""What must hold of reports. Each check yields what is wrong, in words."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from postroad.model.clock import SECOND
from postroad.model.events import REPORT_NAME
from postroad.model.ids import stream_type
from postroad.model.reports import Report
from postroad.store.queues import STREAM_DELETED
from postroad.testing.simulation.history import History, grouped
from postroad.testing.simulation.ledger import Answer, ReportCall
from postroad.testing.simulation.workload import WOKEN

ANSWERED_WITHIN = 2.0  # seconds beyond what a caller is willing to wait, in a healthy process


def r1_apart(h: History) -> Iterator[str]:
    """No run has taken a report together with anything else, and no handler sees one that is not woken by them."""
    for run, rows in grouped([row for row in h.log if row.cause is None], "run_id").items():
        if len({row.kind == REPORT_NAME for row in rows}) > 1:
            yield f"run {run} has taken reports and other events: {[row.entry_id for row in rows]}"
    known = h.known
    for one in h.handled:
        if stream_type(one.stream) not in WOKEN:
            seen = [key for key in one.events if (row := known.get((one.stream, key))) and row.kind == REPORT_NAME]
            if seen:
                yield f"a handler of {one.stream} was woken by {seen}"


def r2_in_line(h: History) -> Iterator[str]:
    """Each report names the entry in front of it as its parent."""
    for stream, rows in h.logs.items():
        if rows and rows[0].kind == REPORT_NAME and _said(rows[0]).parent is not None:
            yield f"{stream}: the first entry has a parent"
        for before, row in pairwise(rows):
            if row.kind == REPORT_NAME and _said(row).parent != before.entry_id:
                yield f"{stream}: entry {row.seq} is the child of {_said(row).parent}, behind {before.entry_id}"


def r3_accepted_lands(h: History) -> Iterator[str]:
    """What was accepted waits or has landed; only the deletion of its stream ends it otherwise, and no stop does."""
    for call in h.ledger.reports:
        row = h.known.get((call.stream, call.key))
        if call.answer is Answer.OK and (row is None or row.kind != REPORT_NAME):
            yield f"report {call.key} to {call.stream} was accepted and is gone"
    for row in h.inbox:
        if row.kind == REPORT_NAME and row.reason not in (None, STREAM_DELETED):
            yield f"report {row.event_id} of {row.stream} was ended: {row.reason}"


def r4_first_words_stand(h: History) -> Iterator[str]:
    """A report says what one of its callers said: none that was or must be refused, or began when one was accepted."""
    calls = grouped(h.ledger.reports, "stream", "key")
    for place, row in h.known.items():
        if row.kind != REPORT_NAME or place not in calls:
            continue
        said = _said(row)
        words = msgspec.json.encode(said.data).decode(), said.source
        ends = [call.ended for call in calls[place] if call.answer is Answer.OK and call.ended is not None]
        first = min(ends, default=None)
        for call in calls[place]:
            if _may_have_landed(call) and _words(call) == words and (first is None or call.begun < first):
                break
        else:
            yield f"report {place} says {words}, which nobody said in time"


def r5_answers_are_true(h: History) -> Iterator[str]:
    """Who was told of an entry was told of the one that there is, and so is whoever comes after that."""
    places = {(row.stream, row.entry_id): row.seq for row in h.log}
    for place, calls in grouped(h.ledger.reports, "stream", "key").items():
        told = [call for call in calls if call.entry is not None]
        yield from (
            f"report {place}: a caller was told of entry {call.entry}, it is {places.get(place)}"
            for call in told
            if call.entry != places.get(place)
        )
        known = min((call.ended for call in told if call.ended is not None), default=None)
        for call in calls:
            if known is not None and call.begun > known and call.answer is Answer.OK and call.entry is None:
                yield f"report {place}: a caller was told of no entry after another one was told of it"


def r6_refused_with_cause(h: History) -> Iterator[str]:
    """A source that is not there, or another's, is refused, and none that is; so are taken keys and deleted streams."""
    for call in h.ledger.reports:
        if call.hopeless and (call.answer is Answer.OK or call.error == "KeyConflict"):
            yield f"report {call.key} was accepted from {call.source} of {call.owner}"
        if call.error.startswith("unexpected"):
            yield f"report {call.key}: {call.error}"
        if call.answer is Answer.REFUSED and not _has_cause(h, call):
            yield f"report {call.key} to {call.stream} was refused without a cause: {call.error}"


def _has_cause(h: History, call: ReportCall) -> bool:
    match call.error:
        case "SourceRefused":
            return call.hopeless or call.source in h.gone
        case "StreamDeleted":
            return call.stream in h.gone
    row = h.known.get((call.stream, call.key))
    if row is None or row.kind != REPORT_NAME:
        return row is not None
    said = _said(row)
    return call.strict and _words(call) != (msgspec.json.encode(said.data).decode(), said.source)


def r7_answered_in_time(h: History) -> Iterator[str]:
    """Whoever waits in a healthy process is answered when its time is over; at the end nobody waits."""
    options = h.options
    healthy = not (options.latency or options.gathers or options.pauses)
    for call in h.ledger.reports:
        if h.end and call.ended is None and not call.lost:
            yield f"report {call.key} to {call.stream} still waits for an answer"
        patience = [seconds for seconds in (call.wait, call.patience) if seconds is not None]
        if healthy and call.until and patience:
            late = (call.until - call.at) / SECOND - min(patience)
            if late > ANSWERED_WITHIN:
                yield f"report {call.key} was answered {late:.1f} s after its caller wanted to be gone"


def _may_have_landed(call: ReportCall) -> bool:
    return call.answer is not Answer.REFUSED and not call.hopeless


def _words(call: ReportCall) -> tuple[str, str | None]:
    return call.data, call.source


def _said(row: Any) -> Report:
    return msgspec.json.decode(row.data, type=Report)
