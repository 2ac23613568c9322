"""The command: plays seeds and says what came of them; fails if an invariant was broken."""

import argparse
import sys
import time
from collections import Counter

from postroad.testing.simulation.options import OPERATIONS
from postroad.testing.simulation.seeds import Verdict, play, play_twice

TWICE_EVERY = 10
REACHED = ("run ", "dispatch.pending", "dispatch.de", "dispatch.ex", "dispatch.st", "timer ", "call ", "dead ")
SHOWN = ("operations", "statements", "crashes", "commits lost", "arrivals", "turn.ended", "lease.lost", "checks")


def main() -> int:
    """Play what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m postroad.testing.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to play")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--seed", type=int, help="play this one alone and print its log")
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="how many operations each has")
    given = parser.parse_args()
    if given.seed is not None:
        return _tell(play_twice(given.seed, operations=given.operations))
    return _play_all(range(given.start, given.start + given.seeds), given.operations)


def _tell(verdict: Verdict) -> int:
    print("\n".join(verdict.lines))
    print(verdict.options)
    print(_summary(verdict.counts))
    print(f"digest {verdict.digest}")
    print(verdict.error or "every invariant held")
    return verdict.error is not None


def _play_all(seeds: range, operations: int) -> int:
    began = time.monotonic()
    total: Counter[str] = Counter()
    failed, virtual = 0, 0.0
    for seed in seeds:
        twice = seed % TWICE_EVERY == 0
        verdict = (play_twice if twice else play)(seed, operations=operations)
        total += verdict.counts
        virtual += verdict.virtual_seconds
        if verdict.error is not None:
            failed += 1
            print(verdict.failure(), file=sys.stderr)
    print(f"{len(seeds)} seeds, {failed} failed, {virtual / 3600:.1f} virtual hours, {time.monotonic() - began:.1f} s")
    print(_summary(total))
    print(f"reached: {_listed(total, *REACHED)}")
    print(f"died at: {_listed(total, 'at ')}")
    return failed > 0


def _listed(counts: Counter[str], *beginnings: str) -> str:
    names = sorted(name for name in counts if name.startswith(beginnings))
    return ", ".join(f"{name.removeprefix('at ')} {counts[name]}" for name in names)


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in SHOWN)


if __name__ == "__main__":
    sys.exit(main())
