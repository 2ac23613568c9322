"""What must hold of the log and of the inbox. Each check yields what is wrong, in words."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from postroad.store.queues import STREAM_DELETED
from postroad.store.stopping import WITHDRAWN
from postroad.testing.simulation.history import History, grouped
from postroad.testing.simulation.ledger import Answer, Call
from postroad.testing.simulation.workload import NOTED, Noted

_OURS = ("evt:", "out:", "postroad.")


def l1_dense(h: History) -> Iterator[str]:
    """A stream's entries are numbered 1 … n, and its version is n."""
    versions = {row.id: row.version for row in h.streams}
    for stream, rows in h.logs.items():
        if [row.seq for row in rows] != list(range(1, len(rows) + 1)):
            yield f"{stream}: {[row.seq for row in rows]}"
        if versions.get(stream) != len(rows):
            yield f"{stream}: version {versions.get(stream)}, {len(rows)} entries"


def l2_immutable(h: History) -> Iterator[str]:
    """What stood in a log before stands there now, unchanged."""
    now = h.logs
    for stream, rows in (h.before.logs if h.before else {}).items():
        if now.get(stream, [])[: len(rows)] != rows:
            yield f"{stream}: the first {len(rows)} entries have changed"


def l4_all_or_none(h: History) -> Iterator[str]:
    """Of what a client asked for in one transaction, and nobody else asked for, everything is there or nothing."""
    places = present(h)
    times = Counter((call.verb, call.key) for call in h.ledger.calls)
    decided = {step.name for order in h.orders.values() for step in order.steps}
    decided |= {call.key for call in h.ledger.reports}
    for block, calls in grouped(h.ledger.calls, "block").items():
        own = [call for call in calls if times[call.verb, call.key] == 1 and call.key not in decided]
        there = [call.key for call in own if place(call) in places]
        if block and 0 < len(there) < len(own):
            yield f"block {block}: of {[call.key for call in own]} only {there} are there"


def l5_durable(h: History) -> Iterator[str]:
    """Whatever was answered with success is there: events, dispatches, timers, and the client's own rows."""
    places = present(h)
    for call in h.ledger.calls:
        if call.answer is not Answer.OK:
            continue
        if place(call) not in places:
            yield f"{call.verb} {call.key} of {call.stream} was accepted and is gone"
        if call.joined and call.key not in h.written:
            yield f"{call.verb} {call.key}: the row beside it is gone"


def l6_no_garbage(h: History) -> Iterator[str]:
    """There is no event that nobody published, and a client's own row is there only with what it stands beside."""
    asked = {(call.stream, call.key) for call in h.ledger.attempted("publish")}
    asked |= {(step.name, step.kind) for order in h.orders.values() for step in order.steps if step.do == "publish"}
    asked |= {(call.stream, call.key) for call in h.ledger.reported()}
    for stream, name in h.known:
        if not name.startswith(_OURS) and (stream, name) not in asked:
            yield f"{name} of {stream} was never published"
    places = present(h)
    for call in h.ledger.calls:
        if call.joined and call.key in h.written and place(call) not in places:
            yield f"{call.key}: the client's row is there, ours is not"


def present(h: History) -> set[tuple[str, str, str]]:
    """Where the events, dispatches and timers are that there are: verb, stream (none for dispatches) and key."""
    found = {("publish", *place) for place in h.known}
    found |= {("send", "", row.key) for row in h.dispatches}
    return found | {("timer", row.stream, row.key) for row in h.timers}


def place(call: Call) -> tuple[str, str, str]:
    """Where is what a call asked for, if it is there."""
    return call.verb, "" if call.verb == "send" else call.stream, call.key


def l7_real_time(h: History) -> Iterator[str]:
    """Of two events of a stream, reports among them, the one accepted before the other was offered comes first."""
    seqs = {(row.stream, row.entry_id): row.seq for row in h.log}
    calls = grouped([*h.ledger.attempted("publish"), *h.ledger.reported()], "stream", "key")
    spans: dict[str, list[tuple[int, int | None, int]]] = {}
    for (stream, key), those in calls.items():
        ends = [call.ended for call in those if call.answer is Answer.OK and call.ended is not None]
        if (stream, key) in seqs:
            span = (min(call.begun for call in those), min(ends, default=None), seqs[stream, key])
            spans.setdefault(stream, []).append(span)
    for stream, found in spans.items():
        for _, ended, seq in found:
            late = [other for begun, _, other in found if ended is not None and ended < begun and other < seq]
            if late:
                yield f"{stream}: entries {late} were offered after entry {seq} was accepted"


def l8_unique(h: History) -> Iterator[str]:
    """An entry's id occurs once in its stream."""
    counts = Counter((row.stream, row.entry_id) for row in h.log)
    yield from (f"{stream}: {name} {times} times" for (stream, name), times in counts.items() if times > 1)


def l10_fold(h: History) -> Iterator[str]:
    """A fold that was carried on counts what a fold from the start counts: the entries before this turn's."""
    for stream, rows in h.logs.items():
        begins = {run: those[0].seq - 1 for run, those in grouped(rows, "run_id").items()}
        for row in rows:
            if row.kind == NOTED.name:
                noted = msgspec.json.decode(row.data, type=Noted)
                if noted.before != begins[row.run_id]:
                    yield f"{stream}: entry {row.seq} counted {noted.before}, there were {begins[row.run_id]}"


def i1_conservation(h: History) -> Iterator[str]:
    """At the end no event waits: each is in the log, or dead with a reason that log and alerts show."""
    waiting = [row for row in h.inbox if row.reason is None]
    if h.end and waiting:
        yield f"{[(row.stream, row.event_id) for row in waiting]} still wait"
    told = {row.subject for row in h.alerts if row.code == "turn.dead"}
    failed = [row for row in h.log if row.kind == "postroad.failed"]
    named = {(row.stream, name) for row in failed for name in msgspec.json.decode(row.data)["events"]}
    for row in h.inbox:
        if row.reason in (WITHDRAWN, STREAM_DELETED):  # by somebody who knows: see I8 and T8
            continue
        if row.reason is not None and (row.stream not in told or (row.stream, row.event_id) not in named):
            yield f"{row.event_id} of {row.stream} died unseen ({row.reason})"


def i2_once(h: History) -> Iterator[str]:
    """An event waits or has landed, never both, and landed from one place in the inbox."""
    landed = {(row.stream, row.entry_id) for row in h.log}
    for row in h.inbox:
        if (row.stream, row.event_id) in landed:
            yield f"{row.event_id} of {row.stream} is in inbox and log"
    positions = Counter([row.position for row in h.landed] + [row.position for row in h.inbox])
    yield from (f"position {place} was used {times} times" for place, times in positions.items() if times > 1)


def i3_order(h: History) -> Iterator[str]:
    """A stream's events landed in the order in which they were accepted."""
    for stream, rows in grouped(h.landed, "stream").items():
        for one, other in pairwise(rows):
            if one.position > other.position:
                yield f"{stream}: position {one.position} is entry {one.seq}, {other.position} entry {other.seq}"


def i4_dedupe_honest(h: History) -> Iterator[str]:
    """An id holds what its first publisher said; whoever was accepted under it said the same."""
    known = h.known
    for call in h.ledger.accepted("publish"):
        row = known.get((call.stream, call.key))
        if row is not None and msgspec.json.decode(row.data) != msgspec.json.decode(call.data):
            yield f"{call.key} of {call.stream} was accepted with other content"
    for call in h.ledger.calls:
        if call.error.startswith("unexpected"):
            yield f"call {call.begun} {call.verb} {call.key}: {call.error}"


def i6_no_stranding(h: History) -> Iterator[str]:
    """An event that is not at the inbox's front has its stream's queues row, through which it is found."""
    rows = {row.stream for row in h.queues}
    for row in h.inbox:
        if row.reason is None and not row.front and row.stream not in rows:
            yield f"{row.event_id} of {row.stream} is neither at the front nor in a queue"
    if h.end and h.queues:
        yield f"queues rows are left at the end: {[row.stream for row in h.queues]}"
