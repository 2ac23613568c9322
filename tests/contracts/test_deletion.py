"""The contract of deletion over both databases and every way to run a transaction, and deaths in the middle of it."""

from collections.abc import Callable

import pytest

from postroad.model.clock import FakeClock
from postroad.model.retention import DAY, Retention
from postroad.store import audit, queues, retention, streams
from postroad.store.database import Database
from postroad.store.retention import Place, Tally
from postroad.testing.contracts import deletion, stream_views
from postroad.testing.contracts.streams import STREAM, hold
from tests.contracts import striking


class TestDeletion(deletion.DeletionContract):
    """Nothing comes into being in it any more."""


class TestContents(deletion.ContentsContract):
    """What it contained goes."""


class TestStreamViews(stream_views.StreamViewsContract):
    """As operators see it."""


def filled(database: Database) -> None:
    """A stream with something of everything, whose turn backs off."""
    contract = deletion.ContentsContract()
    held = contract.fill(database.transact)
    database.transact(queues.back_off, hold(held), delay=1, error="e")


@pytest.mark.parametrize("what", ["block", "operator", "sweep"])
def test_a_process_that_dies_before_any_statement(database: Database, clock: FakeClock, what: str) -> None:
    """Of a deletion, and of a step of what deletes its content, there is all or nothing."""
    by = audit.Operator(actor="ann")
    place = Place(stage=next(n for n, stage in enumerate(retention._STAGES) if stage.look is retention._CONTENTS))
    filled(database)
    if what == "sweep":
        deletion.delete(database.transact, STREAM)
        clock.advance_to(clock.wall() + 2 * DAY)
    found = database.read(retention.look, place, retention=Retention(), now=clock.wall())
    works: dict[str, Callable[[], object]] = {
        "block": lambda: deletion.delete(database.transact, STREAM),
        "operator": lambda: database.transact(streams.delete_by, STREAM, by=by),
        "sweep": lambda: database.transact(retention.end, found, Tally(), retention=Retention()),
    }
    before, number = striking.rows_of(database), 0
    while True:
        number += 1
        try:
            with striking.striking(database, number) as seen:
                works[what]()
        except striking.Crash:
            assert striking.rows_of(database) == before, f"died before {seen.struck}"
        else:
            break
    assert striking.rows_of(database) != before
    assert number > 4
