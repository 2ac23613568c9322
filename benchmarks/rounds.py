"""Rounds: ours and the limit by turns, in one run, on databases that were cleared; medians of the rounds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import median
from typing import Protocol

import msgspec

from benchmarks import places
from benchmarks.limit_postgres import PostgresLimit
from benchmarks.limit_sqlite import SQLiteLimit
from benchmarks.ours import Ours
from benchmarks.places import Place
from benchmarks.work import Work

FEW = 64
COUNT_MAX = 20_000


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How long to measure. `seconds`: about that much of either side in each round; 0: a few of each only."""

    rounds: int = 3
    seconds: float = 0.8


QUICK = Plan(rounds=1, seconds=0.05)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a work on a database, as `--json` prints it."""

    name: str
    database: places.Kind
    streams: int
    ours_per_s: float
    limit_per_s: float
    ratio: float


class Unequal(AssertionError):
    """The two sides did not write the same rows, so their times say nothing."""


class Side(Protocol):
    """One of the two ways to do a work."""

    def run(self, what: Work) -> float:
        """Do the work on a cleared place; the seconds it took."""

    def close(self) -> None:
        """Close it."""


def measure(
    works: Sequence[Work],
    plan: Plan,
    *,
    kinds: Sequence[places.Kind],
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Result]:
    """Measure the works on these databases, one result after the other.

    Raises:
        Unequal: The two sides did not write the same number of rows into each table.
    """
    for kind in kinds:
        progress(f"{kind}: preparing")
        with places.places(kind) as (ours, limit):
            for what in works:
                progress(f"{kind}: {what.name}, {what.streams} at once")
                yield _measure(what, plan, kind, ours, limit)


def _measure(what: Work, plan: Plan, kind: places.Kind, ours: Place, limit: Place) -> Result:
    by_hand = SQLiteLimit if kind == "sqlite" else PostgresLimit
    with closing(Ours(ours, what)) as our_side, closing(by_hand(limit, what)) as limit_side:
        sides: list[tuple[Side, Place]] = [(our_side, ours), (limit_side, limit)]
        works = [_sized(what, side, place, plan) for side, place in sides]
        if ours.rows() != limit.rows():
            raise Unequal(f"ours wrote {ours.rows()}, the limit {limit.rows()}")
        rates: list[list[float]] = [[], []]
        for _ in range(plan.rounds):
            for (side, place), each, found in zip(sides, works, rates, strict=True):
                found.append(_rate(each, side, place))
    ours_per_s, limit_per_s = (median(found) for found in rates)
    return Result(
        name=what.name,
        database=kind,
        streams=what.streams,
        ours_per_s=round(ours_per_s, 1),
        limit_per_s=round(limit_per_s, 1),
        ratio=round(ours_per_s / limit_per_s, 3),
    )


def _sized(what: Work, side: Side, place: Place, plan: Plan) -> Work:
    """Warm up with a few, then as many as this side does in the time that the plan gives a round."""
    few = what.of(FEW)
    rate = _rate(few, side, place)
    return what.of(min(rate * plan.seconds, COUNT_MAX))


def _rate(what: Work, side: Side, place: Place) -> float:
    place.clear()
    return what.count / side.run(what)
