"""Histories in which something is wrong with reports, delegations or crons, each a good one with one thing changed."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from postroad.model.events import REPORT_NAME, STOP_NAME
from postroad.testing.simulation.errands import FINISHED
from postroad.testing.simulation.history import History
from postroad.testing.simulation.ledger import Answer, ReportCall
from postroad.testing.simulation.ticking import RAN, Ran, is_cron, report_key
from tests.simulation.picking import change, first


def told(h: History) -> ReportCall:
    """A call whose caller was told of its report's entry."""
    return next(call for call in h.ledger.reports if call.entry is not None)


def entry_of(h: History) -> Any:
    """The entry of a report that somebody was told of."""
    call = told(h)
    return first(h.log, stream=call.stream, entry_id=call.key)


def take_it_with_others(h: History) -> None:
    """A report was taken by a run that has taken a message too."""
    row = entry_of(h)
    row.run_id = next(r for r in h.log if r.cause is None and r.kind == "sim.order").run_id


def say_something_else(h: History) -> None:
    """A report says what nobody said."""
    row = entry_of(h)
    row.data = row.data.replace(" said ", " never said ")


def name_another_parent(h: History) -> None:
    """A report is the child of an entry that does not stand in front of it."""
    row = entry_of(h)
    row.data = row.data.replace('"parent":', '"parent":"nobody","was":')


def accept_a_hopeless_one(h: History) -> None:
    """A report was accepted whose source must be refused."""
    told(h).hopeless = True


def answer_late(h: History) -> None:
    """A caller that waits for nothing was answered after a minute."""
    call = next(call for call in h.ledger.reports if call.answer is Answer.OK and call.wait is not None)
    call.until += 60_000_000


def store_what_was_refused(h: History) -> None:
    """A report stands there of which every caller was refused."""
    call = told(h)
    for each in h.ledger.reports:
        if (each.stream, each.key) == (call.stream, call.key):
            each.answer, each.error, each.hopeless = Answer.REFUSED, "SourceRefused", True


def answer_nothing_about_what_is_hopeless(h: History) -> None:
    """A report stands there that had to be refused, and its callers got no answer."""
    call = told(h)
    for each in h.ledger.reports:
        if (each.stream, each.key) == (call.stream, call.key):
            each.answer, each.entry, each.hopeless = Answer.INFO, None, True


def refuse_the_owner(h: History) -> None:
    """A report was refused, and its source was there and its owner's."""
    call = next(call for call in h.ledger.reports if call.owner is not None and call.answer is Answer.OK)
    call.answer, call.error = Answer.REFUSED, "SourceRefused"


def done(h: History) -> Any:
    """A delegation that was done."""
    return first(h.delegations, status="done")


def stop_before_it_ends(h: History) -> None:
    """A crew was stopped, and what it was to do ended otherwise after that."""
    row = done(h)
    h.options = msgspec.structs.replace(h.options, jumps=0)
    stop = {"stream": row.child, "seq": 9_999, "entry_id": "stop", "kind": STOP_NAME, "recorded_at": row.ended_at - 1}
    h.log.append(SimpleNamespace(**{**vars(word_of_it(h)), **stop}))
    h.landed.append(SimpleNamespace(stream=row.child, seq=9_999, position=row.position + 1))


def word_of_it(h: History) -> Any:
    """The entry of the crew that has finished it."""
    key = f'"key":"{done(h).key}"'
    return next(row for row in h.log if row.kind == FINISHED.name and key in row.data)


def ticks(h: History) -> list[Any]:
    """The entries of the times of the cron that has most of them, in order."""
    rows = [row for row in h.log if is_cron(row.stream) and row.entry_id.startswith("evt:")]
    ((busiest, _),) = Counter(row.stream for row in rows).most_common(1)
    return [row for row in rows if row.stream == busiest]


def run_a_time_again(h: History) -> None:
    """The same time came twice."""
    one, other = ticks(h)[:2]
    other.data = one.data


def come_early(h: History) -> None:
    """A time came a second before it was there."""
    tick = ticks(h)[0]
    first(h.rang, stream=tick.stream, event_id=tick.entry_id).at -= 60_000_000


def pass_times_over(h: History) -> None:
    """A time says that others were left out before it."""
    tick = ticks(h)[1]
    tick.data = tick.data.replace('"skipped":0', '"skipped":7')


def forget_what_was_told(h: History) -> None:
    """A run says that it has told a stream of its time, and there is no such report."""
    said = first(h.log, kind=RAN.name)
    ran = msgspec.json.decode(said.data, type=Ran)
    key = report_key(said.stream, ran.at)
    h.log[:] = [row for row in h.log if row.entry_id != key]
    h.inbox[:] = [row for row in h.inbox if row.event_id != key]


def tell_of_what_never_came(h: History) -> None:
    """A stream was told of a time that the cron has not had."""
    cron = next(row.stream for row in h.log if row.kind == RAN.name)
    first(h.log, kind=REPORT_NAME).entry_id = report_key(cron, "2001-01-01T00:00:00+00:00")


BAD_REPORTS: dict[str, Callable[[History], None]] = {
    "R1": take_it_with_others,
    "R2": name_another_parent,
    "R3": lambda h: h.log.remove(entry_of(h)),
    "R4": say_something_else,
    "R5": change(told, entry=99_999),
    "R6": accept_a_hopeless_one,
    "R7": answer_late,
    "D1": lambda h: h.ends.append(h.ends[0]),
    "D2": change(done, error="another"),
    "D3": lambda h: h.log.remove(word_of_it(h)),
    "D4": change(lambda h: h.opened[0], open=99),
    "D5": change(done, depth=9),
    "D6": change(done, status="open"),
    "C1": lambda h: h.beside.append(SimpleNamespace(stream="cron:once/runs", run_id="run")),
    "C2": run_a_time_again,
    "C3": come_early,
    "C4": change(lambda h: next(row for row in h.timers if is_cron(row.stream)), status="fired"),
    "C5": pass_times_over,
    "C6": forget_what_was_told,
}
# More ways to break some of them.
MORE_BAD_REPORTS: list[tuple[str, Callable[[History], None]]] = [
    ("L6", store_what_was_refused),
    ("R4", store_what_was_refused),
    ("L6", answer_nothing_about_what_is_hopeless),
    ("R4", answer_nothing_about_what_is_hopeless),
    ("R6", refuse_the_owner),
    ("D3", stop_before_it_ends),
    ("C6", tell_of_what_never_came),
]
