"""The simulation's seeds: crashes between statements, at failpoints and around sends; every invariant holds."""

import os
import subprocess
import sys

import pytest

from postroad.testing.simulation.seeds import Verdict, play, play_twice

SEEDS = 100
CHUNK = 10


def failures(verdicts: list[Verdict]) -> str:
    return "\n\n".join(verdict.failure() for verdict in verdicts if verdict.error)


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_invariant_holds(first: int) -> None:
    """Nothing is lost, doubled without a cause, misordered or silent, whatever dies; the first seed is played twice."""
    verdicts = [play_twice(first), *(play(seed) for seed in range(first + 1, first + CHUNK))]
    assert not failures(verdicts), failures(verdicts)


def test_a_seed_is_the_same_in_another_process() -> None:
    """A seed's log doesn't depend on how this process hashes strings, so that its command replays it."""
    told = [
        subprocess.run(
            [sys.executable, "-m", "postroad.testing.simulation", "--seed", "5", "--operations", "15"],
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
    harmless = {"kills": 0, "crash_statement": 0, "crash_failpoint": 0, "crash_send": 0}
    verdict = play(3, operations=3, changes=harmless)
    assert verdict.error is not None
    assert "no crash" in verdict.failure()
    assert "python -m postroad.testing.simulation --seed 3 --operations 3" in verdict.failure()
