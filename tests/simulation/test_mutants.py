"""The simulation finds what is broken. `make mutants` plants all the bugs there are; here are those found at once."""

import pytest

from postroad.testing.simulation.hunt import Hunt, hunt, table
from postroad.testing.simulation.mutants import MUTANTS

# `make mutants` says how soon each is found; the others take up to some dozens of seeds.
QUICK = (
    "consumes_apart", "tells_apart", "marks_before_sending", "sends_before_commit", "delivers_unsent",
    "claims_briefly", "never_ends", "loses_outcomes", "loses_alerts", "strands", "forgets_the_run",
    "overrides_acks", "frees_keys", "counts_what_is_held", "counts_no_starts", "makes_new_keys", "forgets_what_began",
    "mixes_sorts", "wakes_everybody", "writes_nothing_down", "takes_any_source", "names_any_parent",
    "takes_any_owner",
)  # fmt: skip
SEEDS = 12


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_found(name: str) -> None:
    """A seed finds it, and not one of these seeds fails without it, as the seeds' own test shows."""
    found = hunt(MUTANTS[name], seeds=SEEDS, at_least=1)
    assert found.found, f"{name} survives {SEEDS} seeds"


def test_a_hunt_says_how_soon_a_bug_is_found() -> None:
    """The median is of the distances from find to find; a bug that no seed finds has none."""
    about = {"mutant": "m", "guarantee": "keep", "says": "It forgets.", "played": 20}
    found = Hunt(found=[2, 3, 9], broken=["O1 no lost action"], **about)
    assert found.median_seeds == 3
    missed = Hunt(found=[], broken=[], **about)
    assert missed.median_seeds is None
    assert table([found, missed]).splitlines()[2:] == [
        "| keep: It forgets. | 2 | O1 no lost action | 3 of 20 | 3 |",
        "| keep: It forgets. | never |  | 0 of 20 | None |",
    ]
