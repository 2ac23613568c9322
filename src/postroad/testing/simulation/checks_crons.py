"""What must hold of crons. Each check yields what is wrong, in words."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from postroad.model.clock import SECOND
from postroad.model.crons import ON_TIME, TIMER, Fire, read
from postroad.model.events import NOOP, REPORT_NAME
from postroad.model.ids import timer_event_id
from postroad.testing.simulation.history import History, grouped
from postroad.testing.simulation.ticking import PERIOD, RAN, Ran, is_cron, policies, policy_of, report_key


class _Fired(NamedTuple):
    """A time of a cron that came: what its event says, when that was received, and what became of it.

    `run`: which has taken it, None while it waits. `left_out`: it was not run.
    """

    stream: str
    generation: int
    fire: Fire
    at: int
    received: int
    event: str
    run: Any
    left_out: bool


class _Named(msgspec.Struct, frozen=True):
    """Of an entry about events, those."""

    event: str = ""
    events: list[str] = []


def c1_one_at_a_time(h: History) -> Iterator[str]:
    """No run of a cron begins before the one in front of it has ended."""
    yield from (f"{row.stream}: run {row.run_id} began beside another" for row in h.beside)


def c2_once(h: History) -> Iterator[str]:
    """Each time comes at most once, in order, and none that the schedule does not have."""
    for stream, fires in _fires(h).items():
        times = Counter(each.fire.scheduled_at for each in fires)
        yield from (f"{stream}: {at} came {n} times" for at, n in times.items() if n > 1)
        for each in fires:
            if each.at % PERIOD:
                yield f"{stream}: {each.fire.scheduled_at} is no time of its schedule"
        for one, other in pairwise(fires):
            if other.at <= one.at or other.generation != one.generation + 1:
                yield f"{stream}: {other.fire.scheduled_at} came after {one.fire.scheduled_at}"


def c3_not_early(h: History) -> Iterator[str]:
    """No time comes before it is there."""
    rang = {(row.stream, row.event_id): row.at for row in h.rang}
    for stream, fires in _fires(h).items():
        for each in fires:
            early = each.at - rang[stream, each.event]
            if early > 0:
                yield f"{stream}: {each.fire.scheduled_at} came {early} µs early"


def c4_always_armed(h: History) -> Iterator[str]:
    """A cron's next time is armed, or its event waits, always one of both; at the end each cron has run on."""
    waiting = {(row.stream, row.event_id) for row in h.inbox if row.reason is None}
    rows = [row for row in h.timers if is_cron(row.stream)]
    for row in rows:
        waits = (row.stream, timer_event_id(TIMER, row.generation)) in waiting
        if (row.status == "armed") == waits:
            yield f"{row.stream}: its timer is {row.status}, and its event {'waits' if waits else 'does not wait'}"
    if h.end and (missing := {*policies(h.options)} - {policy_of(row.stream) for row in rows}):
        yield f"the crons {sorted(missing)} were never armed"


def c5_missed_by_policy(h: History) -> Iterator[str]:
    """The next time follows from the last one and from the policy, however late or long a run is; none gets lost."""
    for fires in _fires(h).values():
        for one, other in pairwise(fires):
            yield from _wrong_next(h, one, other)
        if not h.options.jumps:  # by a clock that goes back it may have been right to leave it out
            for each in fires:
                yield from _wrongly_treated(h, each)


def c6_told(h: History) -> Iterator[str]:
    """What a run says to have told a stream of is there, and nothing of a time that never came or was left out."""
    if not h.options.crons:
        return
    for row in h.log:
        if row.kind == RAN.name:
            said = msgspec.json.decode(row.data, type=Ran)
            if said.told and (said.told, report_key(row.stream, said.at)) not in h.known:
                yield f"{row.stream} has told {said.told} of {said.at}, and no report says so"
    fires = {report_key(each.stream, each.fire.scheduled_at): each for those in _fires(h).values() for each in those}
    for (stream, key), row in h.known.items():
        if row.kind == REPORT_NAME and is_cron(key):
            fire = fires.get(key)
            # By a clock that went back one that had begun may have been left out after that.
            if fire is None or (fire.left_out and not h.options.jumps):
                yield f"{stream} was told of {key}, which {'never came' if fire is None else 'was left out'}"


def _wrong_next(h: History, one: _Fired, other: _Fired) -> Iterator[str]:
    said = f"{one.stream}: after {one.fire.scheduled_at} came {other.fire.scheduled_at}"
    left = (other.at - one.at) // PERIOD - 1
    if other.fire.previous != one.fire.scheduled_at or other.fire.skipped != left:
        yield f"{said}, it says {other.fire.skipped} after {other.fire.previous}"
    if left and policy_of(one.stream) == "all":
        yield f"{said}, and {left} were lost"
    if one.run is None or h.options.jumps or policy_of(one.stream) == "all":
        return
    if left and other.at > one.run.ended_at:
        yield f"{said}, {left} before it were left out, and its turn was over before it was due"
    if other.at + PERIOD <= one.run.started_at:
        yield f"{said}, which was not the latest"


def _wrongly_treated(h: History, each: _Fired) -> Iterator[str]:
    policy, said = policy_of(each.stream), f"{each.stream}: {each.fire.scheduled_at}"
    most = {"skip": ON_TIME, "once": PERIOD - 1}.get(policy)
    if each.left_out and (most is None or each.run.ended_at - each.at <= most):
        yield f"{said} was left out, {(each.run.ended_at - each.at) // SECOND} s late"
    if each.left_out or most is None:
        return
    runs = {run.run_id: run for run in h.runs}
    for one in h.handled:
        if one.stream == each.stream and each.event in one.events:
            run = runs[one.run]
            again = any(other.turn_id == run.turn_id and other.started_at < run.started_at for other in h.runs)
            late = (each.received if again else run.started_at) - each.at
            if late > most:
                yield f"{said} was run, {late // SECOND} s late"


def _fires(h: History) -> dict[str, list[_Fired]]:
    """The times of each cron that came, in order."""
    if not h.options.crons:
        return {}
    found: dict[str, list[_Fired]] = {}
    runs = {run.run_id: run for run in h.runs}
    waiting = grouped([row for row in h.inbox if is_cron(row.stream)], "stream")
    for stream in dict.fromkeys([*filter(is_cron, h.logs), *waiting]):
        rows = h.logs.get(stream, [])
        about = {row.entry_id: row.run_id for row in rows}
        noops = {msgspec.json.decode(row.data, type=_Named).event for row in rows if row.kind == NOOP}
        for row in rows:
            if row.kind == "postroad.failed":
                about |= dict.fromkeys(msgspec.json.decode(row.data, type=_Named).events, row.run_id)
        for row in [*rows, *waiting.get(stream, [])]:
            id = getattr(row, "entry_id", None) or row.event_id
            fire = read(row.data) if id.startswith("evt:") else None
            if fire is not None:
                found.setdefault(stream, []).append(
                    _Fired(
                        stream, int(id.partition("#")[2] or 0), fire, fire.at, row.received_at, id,
                        runs.get(about.get(id)), id in noops,
                    )
                )  # fmt: skip
    return {stream: sorted(fires, key=lambda each: each.generation) for stream, fires in found.items()}
