"""What a measurement yields, whatever it measures: a figure and what it is held against."""

from collections.abc import Callable

import msgspec

from benchmarks.places import Kind

Progress = Callable[[str], None]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `work`, `database` and `case` name it.

    `against` is, in the same unit, what `ours` is held against: hand-written SQL, or the same on an empty database
    (the case says which); None: nothing.
    """

    work: str
    database: Kind
    case: str
    unit: str
    ours: float
    against: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times of what it is held against."""
        return self.ours / self.against if self.against else None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much to measure. `seconds`: about that much of either side in each round; 0: a few of each only.

    `many` and `few` are numbers of rows; the other lengths are seconds.
    """

    rounds: int = 3
    seconds: float = 0.8
    latency_seconds: float = 8
    idle_seconds: float = 10
    memory_seconds: float = 5
    steady_seconds: float = 300
    sample_seconds: float = 10
    many: int = 1_000_000
    few: int = 10_000
    claims: int = 100
    conversations: int = 50


QUICK = Plan(
    rounds=1,
    seconds=0.05,
    latency_seconds=0.3,
    idle_seconds=0.5,
    memory_seconds=0.3,
    steady_seconds=2,
    sample_seconds=0.5,
    many=2_000,
    few=200,
    claims=4,
    conversations=3,
)


def rounded(value: float) -> float:
    """A figure with three significant digits or, if it is large, without a fraction."""
    return float(f"{value:.3g}") if abs(value) < 100 else round(value, 1)
