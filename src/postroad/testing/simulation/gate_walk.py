"""What was done to gates and what happened to dispatches, step by step in the one order in which it was committed."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from postroad.model import gates as model
from postroad.model.clock import SECOND
from postroad.model.gates import WHOLE_KIND
from postroad.model.lifecycle import TERMINAL, Reason, Status
from postroad.store.transitions import WITHOUT_EDGE
from postroad.testing.simulation.outages import AFTER_SECONDS, named

Rows = Sequence[Any]
Gate = tuple[str, str]  # its kind, and its host or ''
# By these an attempt ends its own claim, having been at its destination or having failed on the way.
_ANSWERS = frozenset({
    Reason.TRANSPORT_OK, Reason.RETRY_BACKOFF, Reason.PERMANENT, Reason.MAX_ATTEMPTS, Reason.BUDGET,
    Reason.UNKNOWN_OUTCOME,
})  # fmt: skip


class _Closed(msgspec.Struct):
    """A closed gate: whether somebody may be sent as its probe, who was, and how the probe's claim has ended."""

    until: int
    at: int
    may_probe: bool = False
    probe: str = ""
    end: Any = None


class Opened(msgspec.Struct, frozen=True):
    """A gate that was opened, when it had been closed, and since when there had been something to send behind it."""

    place: Gate
    at: int
    closed_at: int
    wanted_since: int


class _Behind:
    """What is unfinished behind a gate, since when there has been anything or nothing; and what waits in no lane."""

    def __init__(self) -> None:
        self.all: set[str] = set()
        self.due: set[str] = set()
        self.since = 0
        self.none_since = 0

    def move(self, row: Any, step: Any) -> None:
        """A dispatch has gone from status to status."""
        if step.to_status in TERMINAL:
            self.all.discard(row.id)
            self.due.discard(row.id)
            self.none_since = step.at
            return
        if not self.all:
            self.since = step.at
        self.all.add(row.id)
        if row.lane is None:  # what waits in a lane is not looked for yet
            self.due.add(row.id)


class Walk:
    """The whole way; `wrong` says what was wrong, by the letter of who asks, `counts` how often gates did what."""

    def __init__(self, dispatches: Rows, audit: Rows) -> None:
        self.wrong: dict[str, list[str]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self._rows = {row.id: row for row in dispatches}
        self._by_hand = Counter(row.subject for row in audit if row.action == "gate.open")
        self._closed: dict[Gate, _Closed] = {}
        self._down: dict[Gate, int] = {}  # when an attempt has last said that it is down
        self._behind: dict[Gate, _Behind] = defaultdict(_Behind)
        self.opened: list[Opened] = []

    def step(self, step: Any) -> None:
        """A row of history."""
        row = self._rows.get(step.entity)
        if row is None or step.reason_code in WITHOUT_EDGE:
            return
        for place in _on_its_way(row):
            self._behind[place].move(row, step)
        if step.reason_code == Reason.ATTEMPT and not step.summary.endswith("no attempt"):
            self._starts(row, step)
            return
        host = named(step.summary)
        if host is not None:
            self._down[row.kind, host] = step.at
        for gate in self._closed.values() if self._closed else ():
            if gate.probe == row.id and gate.end is None:
                gate.end = step

    def _starts(self, row: Any, step: Any) -> None:
        for place in _on_its_way(row):
            gate = self._closed.get(place)
            if gate is None:
                continue
            if not gate.may_probe:
                self.wrong["h1"].append(f"{row.key} was sent although {_said(place)} was closed")
            gate.may_probe, gate.probe, gate.end = False, row.id, None
        for (kind, host), gate in self._closed.items():
            behind = self._behind[kind, host]
            # What this very claim has ended was there when it looked.
            idle = not behind.all and behind.none_since < step.at
            if kind == row.kind and host and gate.until <= step.at and idle:
                self.wrong["h6"].append(f"{_said((kind, host))} is closed, and nothing goes there any more")

    def gate(self, log: Any) -> None:
        """What was done to a gate."""
        place = (log.kind, log.host)
        if log.did == "close":
            self._closed[place] = _Closed(until=log.until, at=log.at)
            if self._down.get(place) != log.at:
                self.wrong["h3"].append(f"{_said(place)} was closed although nobody had said that it is down")
            self._hold(log)
            return
        gate = self._closed[place]
        match log.did:
            case "take":
                self._take(place, gate, log)
            case "keep":
                self._keep(place, gate, log)
            case _:
                del self._closed[place]
                behind = self._behind[place]
                self.opened.append(Opened(place, log.at, gate.at, behind.since if behind.all else log.at))
                self._open(place, gate)

    def _take(self, place: Gate, gate: _Closed, log: Any) -> None:
        if log.at < gate.until:
            self.wrong["h2"].append(f"{_said(place)} was probed {gate.until - log.at} µs early")
        self._open_yet(place, gate)
        self.counts["gate probe lost"] += bool(gate.probe) and gate.end is None
        self._closed[place] = _Closed(until=log.until, at=gate.at, may_probe=True)

    def _keep(self, place: Gate, gate: _Closed, log: Any) -> None:
        short = gate.end is not None and gate.end.reason_code == Reason.RELEASED
        if not short and self._down.get(place) != log.at:
            self.wrong["h3"].append(f"{_said(place)} was kept closed although its probe had not found it down")
        if not short:
            self._hold(log)
        self.counts["gate cut short" if short else "gate kept"] += 1
        self._closed[place] = _Closed(until=log.until, at=gate.at)

    def _hold(self, log: Any) -> None:
        most = min(model.FIRST * 2 ** (log.failures - 1), model.CAP)
        if not most // 2 <= log.until - log.at <= max(most, AFTER_SECONDS * SECOND):
            self.wrong["h2"].append(f"{log.kind} {log.host} waits {log.until - log.at} µs, down {log.failures} times")

    def _open(self, place: Gate, gate: _Closed) -> None:
        if _answered(place, gate.end):
            self.counts["gate opened by its probe"] += 1
        elif place[1] and not self._behind[place].due:
            self.counts["gate forgotten"] += 1
        elif self._by_hand[" ".join(place).strip()] > 0:
            self._by_hand[" ".join(place).strip()] -= 1
            self.counts["gate opened by hand"] += 1
        else:
            self.wrong["h5"].append(f"{_said(place)} was opened for no reason")

    def _open_yet(self, place: Gate, gate: _Closed) -> None:
        if _answered(place, gate.end):
            said = f"{gate.end.reason_code} at {gate.end.at}"
            self.wrong["h5"].append(f"{_said(place)} stayed closed, its probe had come to {said}")

    def finish(self) -> None:
        """The way ends here, between two transactions."""
        for place, gate in self._closed.items():
            self._open_yet(place, gate)


def _on_its_way(row: Any) -> tuple[Gate, ...]:
    """The gates that a dispatch has to pass."""
    whole = (row.kind, WHOLE_KIND)
    return (whole,) if row.host is None else (whole, (row.kind, row.host))


def _said(place: Gate) -> str:
    return f"the gate of {place[0]} {place[1]}".strip()


def _answered(place: Gate, end: Any) -> bool:
    """Whether a probe has come back with something else than that this gate's destination is down."""
    if end is None or end.from_status != Status.DELIVERING or "the lease of attempt" in end.summary:
        return False
    host = named(end.summary)
    return end.reason_code in _ANSWERS | {Reason.HELD} and host != place[1]


def walked(transitions: Rows, gate_log: Rows, dispatches: Rows, audit: Rows) -> Walk:
    """The way through these; each row of `gate_log` came after the row of history that it names."""
    walk = Walk(dispatches, audit)
    if not gate_log:
        return walk
    log = iter(gate_log)
    following = next(log, None)
    for step in transitions:
        while following is not None and following.place < step.id:
            walk.gate(following)
            following = next(log, None)
        walk.step(step)
    while following is not None:
        walk.gate(following)
        following = next(log, None)
    walk.finish()
    return walk
