"""Rounds: ours and the limit by turns, in one run, on databases that were cleared; medians of the rounds."""

from contextlib import closing
from statistics import median
from typing import Protocol

from benchmarks import places
from benchmarks.figures import Figure, Plan, rounded
from benchmarks.limit_postgres import PostgresLimit
from benchmarks.limit_sqlite import SQLiteLimit
from benchmarks.ours import Ours
from benchmarks.places import Place
from benchmarks.work import Work

FEW = 64
COUNT_MAX = 20_000


class Unequal(AssertionError):
    """The two sides did not write the same rows, so their times say nothing."""


class Side(Protocol):
    """One of the two ways to do a work."""

    def run(self, what: Work) -> float:
        """Do the work on a cleared place; the seconds it took."""

    def close(self) -> None:
        """Close it."""


def measure(what: Work, plan: Plan, kind: places.Kind, ours: Place, limit: Place) -> Figure:
    """Measure a work on two places of a kind, which are cleared for it.

    Raises:
        Unequal: The two sides did not write the same number of rows into each table.
    """
    by_hand = SQLiteLimit(limit) if kind == "sqlite" else PostgresLimit(limit, what)
    with closing(Ours(ours, what)) as our_side, closing(by_hand) as limit_side:
        sides: list[tuple[Side, Place]] = [(our_side, ours), (limit_side, limit)]
        works = [_sized(what, side, place, plan) for side, place in sides]
        if ours.rows() != limit.rows():
            raise Unequal(f"ours wrote {ours.rows()}, the limit {limit.rows()}")
        rates: list[list[float]] = [[], []]
        for _ in range(plan.rounds):
            for (side, place), each, found in zip(sides, works, rates, strict=True):
                found.append(_rate(each, side, place))
    ours_per_s, limit_per_s = (rounded(median(found)) for found in rates)
    case = "1 stream" if what.streams == 1 else f"{what.streams} streams"
    return Figure(work=what.name, database=kind, case=case, unit="/s", ours=ours_per_s, against=limit_per_s)


def _sized(what: Work, side: Side, place: Place, plan: Plan) -> Work:
    """Warm up with a few, then as many as this side does in the time that the plan gives a round."""
    few = what.of(FEW)
    rate = _rate(few, side, place)
    return what.of(min(rate * plan.seconds, COUNT_MAX))


def _rate(what: Work, side: Side, place: Place) -> float:
    place.clear()
    return what.count / side.run(what)
