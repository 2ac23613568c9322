"""Bugs to plant in gates and rates; `mutants` has the others, and says what a mutant is."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import msgspec

from postroad.model.lifecycle import Reason
from postroad.store import gates, rates, ready, settle
from postroad.testing.simulation.planting import Mutant, into

MUTANTS: dict[str, Mutant] = {}
planted = into(MUTANTS)


@planted("a closed gate holds nothing back")
def lets_all_through() -> AbstractContextManager[object]:
    """Claims take what is due, whatever is closed."""
    oldest = ready._Look.oldest
    return patch.object(ready._Look, "oldest", lambda self, conn, limit, *, gated: oldest(self, conn, limit, gated=""))


@planted("what is held is counted")
def counts_what_is_held() -> AbstractContextManager[object]:
    """An attempt that could reach nobody stays counted."""
    ended = settle._ended

    def ends(row: Any, each: Any, *, now: int) -> Any:
        move = ended(row, each, now=now)
        return msgspec.structs.replace(move, attempt=row.attempt) if move.reason is Reason.HELD else move

    return patch.object(settle, "_ended", ends)


@planted("a gate never opens")
def never_opens() -> AbstractContextManager[object]:
    """Whatever its probe came to, the gate stays closed."""
    following = gates._following

    def follows(gate: Any, each: Any, *, now: int) -> Any:
        kept = {"kind": gate.kind, "host": gate.host, "until": now + gates._hold(1, each), "failures": 1, "reason": ""}
        return following(gate, each, now=now) or kept

    return patch.object(gates, "_following", follows)


@planted("a rate is not kept")
def counts_no_starts() -> AbstractContextManager[object]:
    """Attempts that start are not counted against their rate."""
    return patch.object(rates.Limits, "start", lambda self, numbers: None)
