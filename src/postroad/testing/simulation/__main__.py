"""The command: plays seeds and says what came of them; fails if an invariant was broken or a planted bug survives."""

import argparse
import sys
import time
from collections import Counter

import msgspec

from postroad.testing.simulation.hunt import SEEDS, Hunt, hunt, table
from postroad.testing.simulation.mutants import MUTANTS
from postroad.testing.simulation.options import OPERATIONS, TROUBLES
from postroad.testing.simulation.seeds import Verdict, play, play_twice, shrink
from postroad.testing.simulation.sometimes import SOMETIMES, unreached

TWICE_EVERY = 10
COVERING = 300  # seeds that must have reached every state
SHOWN = ("operations", "blocks", "statements", "crashes", "arrivals", "turn.ended", "group of several", "checks")


def main() -> int:
    """Do what the command line asks for."""
    given = _parser().parse_args()
    if given.mutants:
        return _hunt_all(given.seeds or SEEDS, as_json=given.json)
    if given.seed is not None:
        return _tell(given.seed, given.operations, given.without, smaller=given.shrink)
    return _play_all(range(given.start, given.start + (given.seeds or 100)), given.operations, smaller=given.shrink)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m postroad.testing.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, help="how many seeds to play (100; mutants: at most 300)")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--seed", type=int, help="play this one alone and print its log")
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="how many operations each has")
    parser.add_argument("--without", type=_troubles, default=(), help=f"troubles to leave out: {', '.join(TROUBLES)}")
    parser.add_argument("--shrink", action="store_true", help="look for a smaller run that fails in the same way")
    parser.add_argument("--mutants", action="store_true", help="plant known bugs and see whether each is found")
    parser.add_argument("--json", action="store_true", help="the mutants as JSON")
    return parser


def _troubles(given: str) -> tuple[str, ...]:
    names = tuple(given.split(","))
    if unknown := set(names) - set(TROUBLES):
        raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}")
    return names


def _tell(seed: int, operations: int, without: tuple[str, ...], *, smaller: bool) -> int:
    verdict = play_twice(seed, operations=operations, without=without)
    if smaller and verdict.error is not None:
        verdict = shrink(verdict)
    print("\n".join(verdict.lines))
    print(verdict.options)
    print(_summary(verdict.counts))
    print(f"digest {verdict.digest}")
    print(verdict.error or "every invariant held")
    print(f"replay: {verdict.replay}")
    return verdict.error is not None


def _play_all(seeds: range, operations: int, *, smaller: bool) -> int:
    began = time.monotonic()
    total: Counter[str] = Counter()
    failed, virtual = 0, 0.0
    for seed in seeds:
        verdict = (play if seed % TWICE_EVERY else play_twice)(seed, operations=operations)
        total += verdict.counts
        virtual += verdict.virtual_seconds
        if verdict.error is not None:
            failed += 1
            _report(verdict, smaller=smaller)
    print(f"{len(seeds)} seeds, {failed} failed, {virtual / 3600:.1f} virtual hours, {time.monotonic() - began:.1f} s")
    print(_summary(total))
    for state, name in SOMETIMES.items():
        print(f"{total[name]:8} {state}")
    missing = unreached(total) if len(seeds) >= COVERING else []
    if missing:
        print(f"never reached: {', '.join(missing)}", file=sys.stderr)
    return failed > 0 or bool(missing)


def _report(verdict: Verdict, *, smaller: bool) -> None:
    print(verdict.failure(), file=sys.stderr, flush=True)
    if smaller:
        print(f"smaller: {shrink(verdict).replay}", file=sys.stderr, flush=True)


def _hunt_all(seeds: int, *, as_json: bool) -> int:
    hunts: list[Hunt] = []
    for mutant in MUTANTS.values():
        hunts.append(hunt(mutant, seeds=seeds))
        print(f"{mutant.name}: {len(hunts[-1].found)} of {hunts[-1].played}", file=sys.stderr, flush=True)
    print(msgspec.json.encode(hunts).decode() if as_json else table(hunts))
    return any(not one.found for one in hunts)


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in SHOWN)


if __name__ == "__main__":
    sys.exit(main())
