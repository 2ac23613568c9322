"""The simulation's seeds: crashes between statements, at failpoints and around sends; every invariant holds."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from postroad.testing.simulation.options import OPERATIONS
from postroad.testing.simulation.seeds import Verdict, play, play_twice, shrink
from postroad.testing.simulation.sometimes import SOMETIMES, unreached

# `make sim SEEDS=300` plays them all, in minutes, and looks whether each state is reached; so does this with as many.
SEEDS = int(os.environ.get("POSTROAD_TEST_SEEDS", "100"))
ALL = 300
CHUNK = 10


def failures(verdicts: list[Verdict]) -> str:
    return "\n\n".join(verdict.failure() for verdict in verdicts if verdict.error)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of this run of the suite have in common."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "simulation"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_invariant_holds(first: int, shared: Path) -> None:
    """Nothing is lost, doubled without a cause, misordered or silent, whatever dies; the first seed is played twice.

    Each of the states that must be reached is reached by one of 300 seeds: where so many are played, the chunk
    that ends last, in whichever worker, looks.
    """
    verdicts = [play_twice(first), *(play(seed) for seed in range(first + 1, first + CHUNK))]
    assert not failures(verdicts), failures(verdicts)
    assert all(verdict.counts["operations"] >= OPERATIONS for verdict in verdicts)
    counts = sum((verdict.counts for verdict in verdicts), Counter[str]())
    (shared / f"{first}.part").write_bytes(msgspec.json.encode({name: counts[name] for name in SOMETIMES.values()}))
    (shared / f"{first}.part").rename(shared / f"{first}.json")
    parts = [msgspec.json.decode(path.read_bytes()) for path in shared.glob("*.json")]
    if SEEDS >= ALL and len(parts) == SEEDS // CHUNK:
        assert unreached(sum(map(Counter, parts), Counter[str]())) == []


def test_a_seed_is_the_same_in_another_process() -> None:
    """A seed's log doesn't depend on how this process hashes strings, so that its command replays it."""
    told = [
        subprocess.run(
            [sys.executable, "-m", "postroad.testing.simulation", "--seed", "5", "--operations", "80"],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert "every invariant held" in told[0]


def test_a_seed_that_shows_nothing_has_failed() -> None:
    """A run in which no process died counts as failed, and says how to play it again."""
    harmless = ("kills", "crash_statement", "crash_failpoint", "crash_send")
    verdict = play(3, operations=10, without=harmless)
    assert verdict.error is not None
    assert "no crash" in verdict.failure()
    assert f"--seed 3 --operations 10 --without {','.join(harmless)}" in verdict.failure()


def test_a_shorter_run_is_the_beginning_of_a_longer_one() -> None:
    """Fewer operations are the same ones, cut short: what fails early fails in the shorter run as well."""
    longer, shorter = play(4), play(4, operations=40)
    calm = next(number for number, line in enumerate(shorter.lines) if line.endswith(" calm"))
    same = [one == other for one, other in zip(longer.lines, shorter.lines[:calm], strict=False)]
    assert same.index(False) if False in same else len(same) > 20
    assert shorter.counts["blocks"] < longer.counts["blocks"]


def test_a_failure_is_made_smaller() -> None:
    """Shrinking finds fewer operations and fewer troubles that break one of the same invariants."""
    from postroad.testing.simulation.mutants import MUTANTS

    with MUTANTS["loses_outcomes"].plant():
        failed = next(verdict for verdict in map(play, range(20)) if verdict.error)
        smaller = shrink(failed)
        assert set(play(smaller.options.seed, operations=smaller.options.operations, without=smaller.without).broken)
    assert set(smaller.broken) & set(failed.broken)
    assert smaller.options.operations < OPERATIONS // 4
    assert len(smaller.without) > 1
    assert f"--operations {smaller.options.operations} --without" in smaller.replay
