"""What must hold of streams that people stop and delete. Each check yields what is wrong, in words."""

from collections import Counter
from collections.abc import Iterator

from postroad.model.events import STOP_NAME, TASK_NAME
from postroad.store.queues import STREAM_DELETED
from postroad.store.stopping import WITHDRAWN
from postroad.testing.simulation.history import History
from postroad.testing.simulation.ledger import Answer


def i8_withdrawn(h: History) -> Iterator[str]:
    """What was withdrawn was published by people or delegated, and before a stop of its stream; the stop stays."""
    stopped = {row.subject for row in h.audit if row.action == "stream.stop"}
    stopped |= {deed.subject for deed in h.deeds if deed.verb == "stop"}
    stops: dict[str, int] = {}
    landed = {(row.stream, row.seq): row.position for row in h.landed}
    for row in h.log:
        if row.kind == STOP_NAME:
            stops[row.stream] = max(stops.get(row.stream, 0), landed[row.stream, row.seq])
    for row in h.inbox:
        if row.kind == STOP_NAME:
            stops[row.stream] = max(stops.get(row.stream, 0), row.position)
    for row in h.inbox:
        ours = row.kind.startswith("postroad.") and row.kind != TASK_NAME
        if row.reason == WITHDRAWN and (ours or row.position > stops.get(row.stream, 0)):
            yield f"{row.event_id} of {row.stream} was withdrawn by no stop that came after it"
    yield from (f"{stream} was stopped by nobody" for stream in stops.keys() - stopped)


def t8_delete(h: History) -> Iterator[str]:
    """A deleted stream stays as it was: no entry, event, timer or run comes of it; what waited ends with a reason."""
    gone = {row.stream: row for row in h.deleted}
    for row in h.inbox:
        if row.reason == STREAM_DELETED and row.stream not in gone:
            yield f"{row.event_id} died of the deletion of {row.stream}, which is there"
    touched = {call.block for call in h.ledger.calls if call.stream in gone}
    for call in h.ledger.calls:
        if call.error == "StreamDeleted" and call.block not in touched:
            yield f"{call.verb} {call.key} of {call.stream} was refused, and nobody has deleted anything of its block"
    if not gone:
        return
    runs = Counter(run.stream for run in h.runs)
    for stream, row in gone.items():
        if len(h.logs.get(stream, [])) > row.version:
            yield f"{stream} had {row.version} entries when it was deleted, now {len(h.logs[stream])}"
        if runs[stream] > row.runs:
            yield f"{stream} had {row.runs} runs when it was deleted, now {runs[stream]}"
    for row in h.inbox:
        if row.stream in gone and row.position > gone[row.stream].position:
            yield f"{row.event_id} came to {row.stream} after its deletion"
    for row in h.timers:
        if row.stream in gone and row.status == "armed":
            yield f"timer {row.key} of {row.stream} is armed after its deletion"
    marked = {row.id for row in h.streams if row.deleted_at is not None}
    yield from (f"{stream} is there again" for stream in gone.keys() - marked)
    asked = {deed.subject for deed in h.deeds if deed.verb in ("delete", "stream.delete")}
    yield from (f"{stream} was deleted by nobody" for stream in marked - asked)
    told = [deed for deed in h.deeds if deed.verb.endswith("delete") and deed.answer is Answer.OK and deed.subject]
    yield from (f"{deed.subject} was deleted and is there" for deed in told if deed.subject not in gone)
