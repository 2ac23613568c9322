"""Bugs to plant in what consumers and operators do; `mutants` has the others, and says what a mutant is."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from postroad.model.acks import Presented
from postroad.model.lifecycle import Status
from postroad.store import moves, settle, tombstones, transitions
from postroad.testing.simulation.planting import Mutant, into

MUTANTS: dict[str, Mutant] = {}
planted = into(MUTANTS)


@planted("an ack is overwritten by a late settle")
@contextmanager
def overrides_acks() -> Iterator[None]:
    """What a sender reports counts although its dispatch was acknowledged meanwhile."""
    late = settle._late

    def ends(row: Any, each: Any) -> Any:
        return settle._ended(row, each, now=row.due_at or 0) if row.status is Status.ACKED else late(row, each)

    def allowed(before: Any, after: Any) -> None:
        return None

    edges = patch.object(moves, "check_edge", allowed), patch.object(transitions, "check_edge", allowed)
    with edges[0], edges[1], patch.object(settle, "_late", ends):
        yield


@planted("an ack of another epoch is taken")
def takes_any_epoch() -> AbstractContextManager[object]:
    """A token that was made before an operator's retry still counts."""
    proves = Presented.proves
    return patch.object(
        Presented, "proves", lambda self, epoch: any(proves(self, earlier) for earlier in range(epoch + 1))
    )


@planted("a purge frees the key")
def frees_keys() -> AbstractContextManager[object]:
    """What is purged leaves no tombstone."""
    return patch.object(tombstones, "bury", lambda conn, made, *, now: None)
