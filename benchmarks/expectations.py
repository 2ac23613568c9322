"""What the figures are expected to be, and whether they are. Nothing that falls short is left out."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from benchmarks import claims, conversations, fairness, hosts, idle, latency, memory, steady
from benchmarks.figures import Figure, rounded
from benchmarks.places import Kind

Measure = Callable[[Sequence[Figure]], float | None]


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of a measure: at least or at most the bound. A measure of what was not measured is None."""

    what: str
    database: Kind
    measure: Measure
    least: float | None = None
    most: float | None = None
    unit: str = "x"

    @property
    def bound(self) -> str:
        """The bound in words."""
        return f">= {self.least:g}{self.unit}" if self.least is not None else f"<= {self.most:g}{self.unit}"

    def holds(self, measured: float) -> bool:
        """Whether it is met."""
        return (self.least is None or measured >= self.least) and (self.most is None or measured <= self.most)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """An expectation held against what was measured."""

    what: str
    database: Kind
    expected: str
    measured: str
    verdict: Literal["ok", "FALLS SHORT"]


def judged(figures: Sequence[Figure]) -> Iterator[Verdict]:
    """The verdicts on whatever was measured."""
    for each in EXPECTATIONS:
        measured = each.measure(figures)
        if measured is not None:
            yield Verdict(
                what=each.what,
                database=each.database,
                expected=each.bound,
                measured=f"{rounded(measured):g}{each.unit}",
                verdict="ok" if each.holds(measured) else "FALLS SHORT",
            )


def _found(figures: Sequence[Figure], work: str, database: Kind, case: str) -> Figure | None:
    """The figure of that work whose case contains this text."""
    return next((f for f in figures if (f.work, f.database) == (work, database) and case in f.case), None)


def _ours(work: str, database: Kind, case: str) -> Measure:
    def measure(figures: Sequence[Figure]) -> float | None:
        found = _found(figures, work, database, case)
        return None if found is None else found.ours

    return measure


def _ratio(work: str, database: Kind, case: str) -> Measure:
    def measure(figures: Sequence[Figure]) -> float | None:
        found = _found(figures, work, database, case)
        return None if found is None else found.ratio

    return measure


def _times(work: str, database: Kind, case: str, one: str) -> Measure:
    """How many times of another case a case is."""

    def measure(figures: Sequence[Figure]) -> float | None:
        many, single = _ours(work, database, case)(figures), _ours(work, database, one)(figures)
        return None if many is None or not single else many / single

    return measure


def _to_send(database: Kind, case: str, *, most: float) -> Expectation:
    return Expectation(
        what=f"commit to send, {case}",
        database=database,
        measure=_ours(latency.NAME, database, case),
        most=most,
        unit=" ms",
    )


def _of_both() -> Iterator[Expectation]:
    kinds: tuple[Kind, ...] = ("sqlite", "postgres")
    for kind in kinds:
        for streams in (64, 500):
            case = f"{streams} streams"
            yield Expectation(
                what=f"drain, {case}, of the limit", database=kind, measure=_ratio("drain", kind, case), least=0.5
            )
        bulk = _ratio("publish bulk", kind, "64 streams")
        yield Expectation(what="publish bulk, of the limit", database=kind, measure=bulk, least=0.5)
        yield Expectation(
            what="idle, all loops", database=kind, measure=_ours(idle.NAME, kind, ""), most=1, unit="% of a core"
        )
        for what in ("dispatches", "turns"):
            grown = _ratio(claims.NAME, kind, what)
            yield Expectation(what=f"claim of {what}, full against empty", database=kind, measure=grown, most=1.5)
        for case in ("healthy host", "another kind"):
            held_up = _ratio(hosts.NAME, kind, f"{case} beside one that is down, p95")
            yield Expectation(what=f"{case} beside one that is down, p95", database=kind, measure=held_up, most=1.5)
        for case in ("at one stroke", "one by one"):
            beside = _ratio(fairness.NAME, kind, f"{case} beside a hot one, p95")
            yield Expectation(what=f"cold {case} beside a hot one, p95", database=kind, measure=beside, most=2)
        for window in conversations.WINDOWS:
            grown = _ratio(conversations.NAME, kind, f"log(last={window})")
            what = f"turn {conversations.LATE:,} of turn {conversations.EARLY}, log(last={window})"
            yield Expectation(what=what, database=kind, measure=grown, most=1.3)
        # Memory that grew with the backlog would be many times as much.
        flat = _ratio(memory.NAME, kind, "")
        yield Expectation(what="dispatcher's memory, large against small", database=kind, measure=flat, most=1.1)


EXPECTATIONS = (
    Expectation(
        what="decide, 64 streams against one by one",
        database="sqlite",
        measure=_times("decide", "sqlite", "64 streams", "1 stream"),
        least=3,
    ),
    *_of_both(),
    _to_send("postgres", "one process, p50", most=3),
    _to_send("postgres", "two processes, p50", most=3),
    _to_send("sqlite", "two processes, p99", most=30),
    # One in a hundred of what comes in would be 24 a minute.
    Expectation(
        what="steady load, backlog's growth",
        database="postgres",
        measure=_ours(steady.NAME, "postgres", "growth"),
        most=steady.PER_SECOND * 60 / 100,
        unit=" rows/min",
    ),
    Expectation(
        what="steady load, left at the end",
        database="postgres",
        measure=_ours(steady.NAME, "postgres", "left"),
        most=0,
        unit=" rows",
    ),
)
