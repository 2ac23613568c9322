"""What must hold of turns that call tools. Each check yields what is wrong, in words."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from postroad.model.events import INTERRUPTED, NOOP
from postroad.model.ids import turn_id
from postroad.model.operations import CallStatus, OperationRow, history
from postroad.testing.simulation.history import History, Rows, grouped
from postroad.testing.simulation.minding import RESOLVE
from postroad.testing.simulation.toolbox import BOOK, PAY
from postroad.testing.simulation.workload import NOTED, Noted

_ACTS = ("keyed", "unsafe")
_KEEPS_ITS_SET = frozenset({"interrupted", "released", "conflict"})
_KNOWN = (CallStatus.FINISHED, CallStatus.REUSED)


class _Named(msgspec.Struct, frozen=True):
    """Of a call's arguments the one that tells it from the others."""

    name: str


class _Said(msgspec.Struct, frozen=True):
    """Of an entry about an event, or about a turn that failed or was stopped, what is looked at here."""

    event: str = ""
    operations: list[dict[str, Any]] = []


def t4_fixed_input(h: History) -> Iterator[str]:
    """What a turn consumes is what its claim returned, and a turn that is tried again keeps that."""
    runs = {run.run_id: run for run in h.runs}
    entries = grouped(h.log, "run_id")
    for one in h.handled:
        run = runs.get(one.run)
        if run is None or (run.stream, run.turn_id) != (one.stream, one.turn):
            yield f"{one} called its handler, and is no run of that turn"
        elif run.end_reason == "committed":
            rows = entries.get(one.run, [])
            consumed = [row.entry_id for row in rows if row.cause is None]
            needless = {_said(row).event for row in rows if row.kind == NOOP}
            decided = tuple(event for event in consumed if event not in needless)
            if turn_id(one.stream, consumed) != one.turn or decided != one.events:
                yield f"turn {one.turn} of {one.stream} has decided on {one.events}, and consumed {consumed}"
    for stream, those in grouped([runs[id] for id in h.began], "stream").items():
        for run, later in pairwise(those):
            if run.turn_id != later.turn_id and (later.attempt > 1 or run.end_reason in _KEEPS_ITS_SET):
                yield f"{stream}: attempt {later.attempt} is another turn than the run before it, {run.end_reason}"


def t5_unsafe_replay(h: History) -> Iterator[str]:
    """What is unsafe happens once, and no code of a turn runs after it has begun, unless an operator said so."""
    if not h.operations and not h.happened:
        return
    unsafe = {row.run_id for row in h.operations if row.effect == "unsafe"}
    allowed = _resolved(h, "retry") + _resolved(h, "continue")
    for turn, those in grouped([one for one in h.handled if one.turn in h.calls], "turn").items():
        again = [one.run for one in those[:-1] if one.run in unsafe]
        if len(again) > allowed[turn]:
            yield f"turn {turn} ran after {again} had called what is unsafe, allowed {allowed[turn]} times"
    yield from _too_often(h, Counter((each.who.turn, each.name) for each in h.happened if each.tool == PAY), "happened")
    repeated = Counter((row.run_id, _name(row)) for row in h.operations if row.effect == "unsafe" and row.repeats)
    begun = Counter((row.run_id, _name(row)) for row in h.operations if row.effect == "unsafe")
    for (run, name), times in Counter((each.who.run, each.name) for each in h.happened if each.tool == PAY).items():
        if times > begun[run, name] - repeated[run, name]:
            yield f"{name} happened {times} times in run {run}, which repeats {repeated[run, name]} of its calls"


def _too_often(h: History, counted: Counter[tuple[str, str]], did: str) -> Iterator[str]:
    """What a turn did more often than its orders want, counted by turn and name; an operator's retry is once more."""
    wanted = {call.name: call.times for order in h.orders.values() for call in order.calls}
    retried = _resolved(h, "retry")
    for (turn, name), times in counted.items():
        most = wanted.get(name.rstrip("'"), 0) * (1 + retried[turn])
        if times > most:
            yield f"{name} {did} {times} times in turn {turn}, at most {most} were wanted"


def _resolved(h: History, how: str) -> Counter[str]:
    """How often an operator has resolved a turn in this way."""
    rows = [row for row in h.audit if row.action == RESOLVE + how]
    return Counter(msgspec.json.decode(row.before)["turn"] for row in rows)


def t7_orphan(h: History) -> Iterator[str]:
    """A call is of one run of its turn, and attached to what that run committed, if it did; and it was recorded."""
    runs = {run.run_id: run for run in h.runs}
    entries = {(row.stream, row.entry_id): row for row in h.log} if h.operations else {}
    for row in h.operations:
        run = runs.get(row.run_id)
        if run is None or (run.stream, run.turn_id) != (row.stream, row.turn_id):
            yield f"{_told(row)} is of no run of its turn"
        elif (row.entry is not None) != (run.end_reason == "committed"):
            yield f"{_told(row)} is attached to {row.entry}, its run is {run.end_reason}"
        if row.entry is not None:
            reply = entries.get((row.stream, row.entry))
            if reply is None or reply.run_id != row.run_id:
                yield f"{_told(row)} is attached to {row.entry}, which is not its run's"
    recorded = Counter((row.run_id, row.tool, _name(row)) for row in h.operations if row.status != CallStatus.REUSED)
    for about, times in Counter((each.who.run, each.tool, each.name) for each in h.happened).items():
        if times > recorded[about]:
            yield f"{about} happened {times} times, and was recorded {recorded[about]} times"


def t9_one_key(h: History) -> Iterator[str]:
    """What is done again for one call carries its key; a tool is handed the key that is recorded."""
    keyed = [row for row in h.operations if row.effect == "keyed"]
    keys = {(row.turn_id, _name(row), row.key) for row in keyed}
    yield from _too_often(h, Counter((turn, name) for turn, name, _ in keys), "had several keys:")
    by_place = {(row.turn_id, row.ordinal): row for row in keyed}
    for row in keyed:
        if row.key is None or (row.repeats and by_place[row.turn_id, row.repeats].key != row.key):
            yield f"{_told(row)} has the key {row.key}, and repeats a call with another"
    for each in h.happened:
        if each.tool == BOOK and (each.who.turn, each.name, each.key) not in keys:
            yield f"{each.name} was done with the key {each.key}, which is not recorded"


def t10_reused_in_order(h: History) -> Iterator[str]:
    """A known result is handed out and not asked for again: each call gets that of the next one like it."""
    for turn, rows in h.calls.items():
        known = {row.ordinal: row for row in rows}
        for row in rows:
            earlier = known.get(row.repeats)
            result = earlier.result if earlier is not None and earlier.status in _KNOWN else None
            if (row.result if row.status == CallStatus.REUSED else None) != result:
                yield f"{_told(row)} is {row.status}, and what it repeats is {earlier and earlier.status}"
        runs = grouped(rows, "run_id")
        before: Rows = []
        for those in runs.values():
            if before and not all(row.resolved == "retry" for row in those):
                yield from _out_of_order(history(map(_row, before)), those, turn)
            before = before + those
    yield from _wrongly_given(h)


def _out_of_order(left: list[OperationRow], calls: Rows, turn: str) -> Iterator[str]:
    """What a run repeats of the earlier calls that were left, but not as the next one that is like it."""
    for row in calls:
        same = next((place for place, one in enumerate(left) if _call(one) == _call(row)), None)
        acting = next((place for place, one in enumerate(left) if one.acts), len(left))
        expected = None if same is None or same > acting else left[same].ordinal
        if row.repeats != expected:
            yield f"{_told(row)} of turn {turn} repeats call {row.repeats}, the next like it is {expected}"
            return
        if expected is None and row.effect in _ACTS and acting < len(left):
            yield f"{_told(row)} of turn {turn} acts before {_told(left[acting])} is repeated"
        if same is not None and expected is not None:
            left = left[same + 1 :]


def _wrongly_given(h: History) -> Iterator[str]:
    """What a handler got of its calls, if that is not what is recorded of them, in the order of the calls."""
    recorded = {run: [row.result for row in rows if row.status in _KNOWN] for run, rows in _by_run(h).items()}
    for row in h.log if recorded else ():
        if row.kind == NOTED.name and row.run_id in recorded:
            got, place = msgspec.json.decode(row.data, type=Noted), 0
            together = h.orders[row.stream, got.event].together if got.got else False
            for result in got.got:
                found = recorded[row.run_id]
                encoded = msgspec.json.encode(result).decode()
                if encoded not in found[0 if together else place :]:
                    yield f"run {row.run_id} got {got.got}, recorded are {found}"
                    break
                place = found.index(encoded, 0 if together else place) + 1


def t11_effects_shown(h: History) -> Iterator[str]:
    """At the end, whatever acted is in a reply's calls, in an entry on a turn that ended without one, or repeated."""
    if not h.end or not h.operations:
        return
    shown = {
        (row.cause, each["tool"], each["arguments"]["name"])
        for row in h.log
        if row.kind in (INTERRUPTED, "postroad.failed")
        for each in _said(row).operations
    }
    for turn, rows in h.calls.items():
        repeated = {row.repeats for row in rows}
        for row in rows:
            told = row.entry is not None or (turn, row.tool, _name(row)) in shown
            forgotten = row.stream in h.gone or row.resolved == "retry" or row.ordinal in repeated
            if row.effect in _ACTS and not told and not forgotten and not _superseded(row, rows):
                yield f"{_told(row)} of {row.stream} acted, and nothing in the log says so"


def _superseded(row: Any, rows: Rows) -> bool:
    """Whether it is another attempt at what has another row: they have one key."""
    return row.key is not None and any(one.key == row.key and one.ordinal > row.ordinal for one in rows)


def t12_under_its_claim(h: History) -> Iterator[str]:
    """Nothing is written of a call under a claim that is over."""
    for late in h.late:
        yield f"the {late.did} of {late.tool} was recorded for run {late.run_id}, which had ended"


def _by_run(h: History) -> dict[str, Rows]:
    found: dict[str, Rows] = grouped(h.operations, "run_id")
    return found


def _said(row: Any) -> _Said:
    return msgspec.json.decode(row.data, type=_Said)


def _name(row: Any) -> str:
    return msgspec.json.decode(row.arguments, type=_Named).name


def _told(row: Any) -> str:
    return f"{row.tool} {_name(row)} (call {row.ordinal})"


def _call(row: Any) -> tuple[str, str]:
    return row.tool, _name(row)


def _row(row: Any) -> OperationRow:
    return OperationRow(**{name: getattr(row, name) for name in OperationRow.__struct_fields__})
