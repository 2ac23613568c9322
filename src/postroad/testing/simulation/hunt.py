"""How soon the simulation finds planted bugs: what says how strong it is."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from postroad.testing.simulation.planting import Mutant
from postroad.testing.simulation.seeds import play

SEEDS = 300
AT_LEAST = 20
_MISFIT = re.compile("TypeError|AttributeError|NameError|ImportError")


class Hunt(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the first `played` seeds found a mutant, and which invariants the first of them saw broken."""

    mutant: str
    guarantee: str
    says: str
    played: int
    found: Sequence[int]
    broken: Sequence[str]

    @property
    def median_seeds(self) -> float | None:
        """How many seeds it takes to find it: the median distance from one find to the next."""
        return median(later - seed for seed, later in pairwise([-1, *self.found])) if self.found else None


def hunt(mutant: Mutant, *, seeds: int = SEEDS, at_least: int = AT_LEAST) -> Hunt:
    """Play `at_least` seeds with the mutant planted, and then on until one finds it, at most `seeds`.

    Only what an invariant sees is a find, not that the product was surprised itself.

    Raises:
        RuntimeError: The mutant no longer fits the product.
    """
    found: list[int] = []
    broken: list[str] = []
    played = 0
    with mutant.plant():
        while played < seeds and (played < at_least or not found):
            verdict = play(played)
            if _MISFIT.search(verdict.error or ""):
                raise RuntimeError(f"{mutant.name} no longer fits the product\n{verdict.failure()}")
            broken = broken or verdict.invariants
            if verdict.invariants:
                found.append(played)
            played += 1
    return Hunt(
        mutant=mutant.name, guarantee=mutant.guarantee, says=mutant.says, played=played, found=found, broken=broken
    )


def table(hunts: Iterable[Hunt]) -> str:
    """The hunts for people to read, in Markdown."""
    lines = ["| planted bug | first seed | found by | of the first seeds | median |", "| --- | --- | --- | --- | --- |"]
    for one in hunts:
        first = one.found[0] if one.found else "never"
        lines.append(
            f"| {one.guarantee}: {one.says} | {first} | {', '.join(one.broken)} | {len(one.found)} of {one.played} "
            f"| {one.median_seeds} |"
        )
    return "\n".join(lines)
