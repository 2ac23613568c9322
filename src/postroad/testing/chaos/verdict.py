"""What came of a run, and what must have happened in it for that to mean anything."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from postroad.testing.chaos.evidence import Evidence

KILLS_PER_MINUTE = 30
DISPATCHES_PER_MINUTE = 2_000
HELD_PER_MINUTE = 20
DATABASES = 2
STORIES_MAX = 3
STORY_LINES_MAX = 40


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run on one database. `violations` is empty if everything held; `stories` tell of the first."""

    database: str
    seed: int
    seconds: float
    heal_seconds: float
    counts: Counter[str]
    violations: list[str]
    stories: list[str]
    folder: str


def lacking(verdicts: Sequence[Verdict], seconds: float) -> list[str]:
    """What happened too seldom for the runs to mean anything: a run without kills is no pass."""
    part = seconds / 60 * len(verdicts) / DATABASES
    found = []
    marks = {"kills": KILLS_PER_MINUTE, "dispatches": DISPATCHES_PER_MINUTE, "held": HELD_PER_MINUTE}
    for name, least in ((name, mark * part) for name, mark in marks.items()):
        total = sum(verdict.counts[name] for verdict in verdicts)
        if total < least or total == 0:
            found.append(f"{total} {name}, at least {round(least)} are needed: this run has shown nothing")
    return found


def stories(evidence: Evidence, violations: Sequence[str]) -> list[str]:
    """The history of the first rows that violations name."""
    told: list[str] = []
    said = " ".join(violations)
    for row in evidence.history.outbox:
        if len(told) < STORIES_MAX and (row.id in said or f"{row.key} " in said):
            told.append("\n".join(_story(evidence, row)))
    return told


def _story(e: Evidence, row: Any) -> Iterator[str]:
    """Everything that happened to a dispatch, and every fault in between, in order."""
    said = "{0.from_status} -> {0.to_status}, {0.reason_code}: {0.summary}"
    steps = [(step.at, said.format(step)) for step in e.history.transitions if step.entity == row.id]
    arrivals = [(a.at, f"arrives from {a.process}, attempt {a.attempt}") for a in e.history.arrivals if a.id == row.id]
    last = max(at for at, _ in (*steps, *arrivals))
    hits = [fault for fault in e.faults if fault.begun <= last and (fault.ended or last) >= row.created_at]
    faults = [(fault.begun, f"fault: {fault.kind} of {', '.join(fault.lives)} {fault.how}") for fault in hits]
    lines = [*steps, *arrivals, *faults]
    yield f"{row.kind} {row.key} ({row.id}) of stream {row.stream!r}, {row.body}"
    yield from (f"  {(at - row.created_at) / 1e6:9.3f} s  {what}" for at, what in sorted(lines)[:STORY_LINES_MAX])
