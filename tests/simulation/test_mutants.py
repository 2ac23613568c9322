"""The simulation finds what is broken: mutants of the product, each killed within a few seeds."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from postroad.engine.calls import Returned
from postroad.engine.dispatcher import Dispatcher
from postroad.store import dispatch_claims, inbox, moves, runs, settle, timers
from postroad.testing.simulation.seeds import play

SEEDS = 20
# Much of what makes claims pass from one process to another.
ROUGH = {
    "processes": 3,
    "lease": 6,
    "poll": 1,
    "pace": 1,
    "pauses": 6,
    "jumps": 0,
    "latency": 0.01,
    "crash_statement": 0,
    "crash_failpoint": 0,
    "send_attempts": 2,
    "send_trouble": 0.8,
    "repeats": 0.2,
}
Mutant = Callable[[], Any]


def fires_early() -> Any:
    """Timers fire a second before their time."""
    fire = timers.fire
    return patch.object(timers, "fire", lambda conn, *, limit, now: fire(conn, limit=limit, now=now + 1_000_000))


def loses_outcomes() -> Any:
    """How a dispatch ended is not told to its stream."""
    return patch.object(moves, "_tell", lambda conn, told, *, now: frozenset())


def delivers_unsent() -> Any:
    """What is claimed counts as sent."""

    async def carry_out(self: Dispatcher, claim: object, sender: object) -> Returned:
        return Returned(None)

    return patch.object(Dispatcher, "_carry_out", carry_out)


def never_ends() -> Any:
    """Deadlines, budgets and attempts are not looked at before a claim."""
    return patch.object(dispatch_claims, "_end", lambda row, policy, *, now: None)


def forgets_the_token() -> Any:
    """Whoever settles a dispatch is taken for its claimant."""
    real = settle.settle

    def settles(conn: Any, settlements: Any, *, now: int) -> Any:
        standing = moves.lock(conn, [each.id for each in settlements])
        taken = [
            msgspec.structs.replace(each, token=standing[each.id].claim_token or each.token)
            for each in settlements
            if each.id in standing
        ]
        return real(conn, taken, now=now)

    return patch.object(settle, "settle", settles)


def looks_only_at_the_inbox() -> Any:
    """Publishing doesn't look for the event in the log."""
    return patch.object(inbox, "_landed", lambda conn, keys: {})


def forgets_the_run() -> Any:
    """A turn's run is not ended with its commit."""
    return patch.object(runs, "end", lambda conn, ends, *, now: None)


MUTANTS: list[Mutant] = [
    fires_early,
    loses_outcomes,
    delivers_unsent,
    never_ends,
    forgets_the_token,
    looks_only_at_the_inbox,
    forgets_the_run,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_killed(mutant: Mutant) -> None:
    """What this mutant breaks is seen within a few seeds."""
    with mutant():
        killed = any(play(seed, changes=ROUGH).error for seed in range(SEEDS))
    assert killed
