"""What must hold of delegations. Each check yields what is wrong, in words."""

from collections.abc import Iterator
from typing import Any

import msgspec

from postroad.model.delegations import Delegated, DelegationStatus, Task
from postroad.model.events import INTERRUPTED, REPORT_NAME, STOP_NAME, TASK_NAME
from postroad.model.ids import DELEGATED_PREFIX, delegated_id, task_id
from postroad.testing.simulation.errands import DEEPER, DEPTH, FAN_OUT, FINISHED, FINISHES, Errand, Finished
from postroad.testing.simulation.history import History, grouped

_Place = tuple[str, str]


class _Said(msgspec.Struct, frozen=True):
    """What a report says that is a delegation's end."""

    data: Delegated


class _Over(msgspec.Struct, frozen=True):
    """Of an entry on a turn that failed or was stopped, what is looked at here."""

    events: list[str] = []


def d1_one_end(h: History) -> Iterator[str]:
    """A delegation ends once, and that end stands."""
    ends = grouped(h.ends, "stream", "key")
    for row in h.delegations:
        those = ends.get((row.stream, row.key), [])
        if [(each.was, each.status) for each in those] != ([("open", row.status)] if row.status != "open" else []):
            yield f"{row.key} of {row.stream} is {row.status}, it became {[each.status for each in those]}"


def d2_told_once(h: History) -> Iterator[str]:
    """Of each end one report tells the stream that wanted it, unless that was deleted; of what is open none does."""
    rows = {(row.stream, delegated_id(row.key)): row for row in h.delegations}
    for place, row in rows.items():
        report = h.known.get(place)
        if report is None:
            if row.status != "open" and row.stream not in h.gone:
                yield f"{row.key} of {row.stream} is {row.status}, and no report says so"
            continue
        said = msgspec.json.decode(report.data, type=_Said).data
        if (said.key, said.stream, said.status, said.error) != (row.key, row.child, row.status, row.error):
            yield f"{row.key} of {row.stream} is {row.status} ({row.error}), its report says {said}"
        if (said.result == {"of": row.key}) != (row.status == "done"):
            yield f"{row.key} of {row.stream} is {row.status}, with the result {said.result}"
    for place, report in h.known.items():
        if report.kind == REPORT_NAME and place[1].startswith(DELEGATED_PREFIX) and place not in rows:
            yield f"{place} tells of the end of nothing"


def d3_explained(h: History) -> Iterator[str]:
    """How it ended is what happened to its task; and what ends a task is never without that."""
    if not h.delegations:
        return
    finished, over, stops = _finished(h), _over(h), _stops(h)
    firsts = _firsts(h)
    waiting = {row.stream: row.position for row in h.inbox if row.kind == STOP_NAME}  # the last one, in their order
    for row in h.delegations:
        place, task = (row.stream, row.key), (row.child, task_id(row.stream, row.key))
        seen = [at for position, at in stops.get(row.child, ()) if row.position < position]
        causes = {
            DelegationStatus.DONE: "done" in finished.get(place, ()),
            DelegationStatus.FAILED: "failed" in finished.get(place, ()) or task in over,
            DelegationStatus.CANCELLED: bool(seen) or row.child in h.gone,
            DelegationStatus.TIMED_OUT: row.ended_at is not None and row.ended_at >= row.deadline_at,
        }
        if row.status != "open":
            asked = row.status == "cancelled" and row.position < waiting.get(row.child, 0)
            if not h.options.jumps and firsts.get(place, row.ended_at) < row.ended_at:
                yield f"{row.key} of {row.stream} is {row.status}, and a crew had finished it before"
            if not h.options.jumps and min(seen, default=row.ended_at) < row.ended_at:
                yield f"{row.key} of {row.stream} is {row.status}, and a stop had withdrawn it before"
            if not causes[row.status] and not asked:
                yield f"{row.key} of {row.stream} is {row.status} ({row.error}), of which there is no cause"
        elif why := [str(status) for status, cause in causes.items() if cause]:
            yield f"{row.key} of {row.stream} is open, and was {why}"


def d4_bounded(h: History) -> Iterator[str]:
    """A stream never has more delegations open, nor is any deeper, than it may."""
    for row in h.opened:
        if row.open > FAN_OUT or not 1 <= row.depth <= DEPTH:
            yield f"{row.stream} delegated {row.key} as number {row.open} of those open, {row.depth} deep"


def d5_task_and_row(h: History) -> Iterator[str]:
    """What was delegated is there as a task of the stream that does it, and the other way round."""
    rows = {(row.child, task_id(row.stream, row.key)): row for row in h.delegations}
    tasks = {place: row for place, row in h.known.items() if row.kind == TASK_NAME}
    yield from (f"the task of {rows[place].key} is missing in {place[0]}" for place in rows.keys() - tasks.keys())
    for place, event in tasks.items():
        task = msgspec.json.decode(event.data, type=Task)
        row = rows.get(place)
        if row is None or (task.parent, task.key, task.depth) != (row.stream, row.key, row.depth):
            yield f"{place[0]} has the task {task.key} of {task.parent}, which nobody has delegated so"
            continue
        errand = msgspec.convert(task.data, Errand)
        if row.status == "done" and errand.how not in FINISHES and not errand.deeper:
            yield f"{row.key} of {row.stream} is done, its errand was {errand}"


def d6_all_end(h: History) -> Iterator[str]:
    """At the end none is open."""
    left = [row for row in h.delegations if row.status == "open"]
    if h.end and left:
        yield f"{[(row.stream, row.key) for row in left]} are open"


def _finished(h: History) -> dict[_Place, list[str]]:
    """How crews have finished tasks, by delegation."""
    found: dict[_Place, list[str]] = {}
    for row in h.log:
        if row.kind == FINISHED.name:
            said = msgspec.json.decode(row.data, type=Finished)
            found.setdefault((said.parent, said.key), []).append(said.status)
    return found


def _firsts(h: History) -> dict[_Place, int]:
    """When crews have finished tasks for the first time, by delegation."""
    found: dict[_Place, int] = {}
    for row in h.log:
        if row.kind == FINISHED.name:
            said = msgspec.json.decode(row.data, type=Finished)
            place = said.parent, said.key
            found[place] = min(row.recorded_at, found.get(place, row.recorded_at))
    return found


def _over(h: History) -> set[_Place]:
    """The events whose turns failed for good, or must not run again."""
    rows = [row for row in h.log if row.kind in ("postroad.failed", INTERRUPTED)]
    return {(row.stream, event) for row in rows for event in msgspec.json.decode(row.data, type=_Over).events}


def _stops(h: History) -> dict[str, list[tuple[int, int]]]:
    """Where the stops stand that each stream has seen to, and when it did."""
    places = {(row.stream, row.seq): row.position for row in h.landed}
    found: dict[str, list[tuple[int, int]]] = {}
    for row in h.log:
        if row.kind == STOP_NAME:
            found.setdefault(row.stream, []).append((places[row.stream, row.seq], row.recorded_at))
    return found


def is_deeper(row: Any) -> bool:
    """Whether a crew has passed this on, and no order has asked for it."""
    return bool(row.key.endswith(DEEPER))
