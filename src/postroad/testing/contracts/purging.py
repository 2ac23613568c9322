"""What purging promises: rows go, their keys stay taken.

It cannot catch a sender at REPEATABLE READ, who sees no tombstone younger than its first statement.
"""

from functools import partial
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection

from postroad.model import failpoints
from postroad.model.clock import FakeClock
from postroad.model.errors import DuplicateKey, KeyConflict
from postroad.model.rows import Enqueued, NewDispatch
from postroad.store import moves, outbox, purging, settle
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import (
    Run,
    Waiting,
    another,
    claim,
    dispatch,
    enqueue,
    everything,
    history,
    in_threads,
    outbox_rows,
    settlement,
)

TOMBSTONES = Statement("SELECT scope, key, id, stream, ended_at FROM {p}tombstones ORDER BY scope, key")


def purge(conn: Connection, *numbers: int, history: bool = False, now: int) -> list[str]:
    """Purge dispatches by their numbers, as an operator's verb does."""
    rows = moves.lock(conn, [f"{number:032x}" for number in numbers])
    return purging.purge(conn, list(rows.values()), history=history, now=now)


def buried(conn: Connection) -> list[tuple[str, str]]:
    """(scope, key) of the tombstones."""
    return [(row.scope, row.key) for row in TOMBSTONES(conn)]


def keys(conn: Connection) -> list[str]:
    """The keys of the outbox."""
    return [row.key for row in outbox_rows(conn)]


def same(number: int, key: int, **more: Any) -> NewDispatch:
    """Another dispatch with a key that was there before."""
    return dispatch(number, key=f"key/{key}", **more)


class PurgeContract:
    """Rows go, their keys do not."""

    def test_rows_go_and_history_stays(self, run: Run) -> None:
        """Purging deletes exactly these rows, leaves a tombstone for each key, and keeps the history."""
        enqueue(run, dispatch(1, stream="load/1"), dispatch(2), dispatch(3))
        before = run(history)
        assert sorted(run(purge, 1, 2, 9)) == [f"{1:032x}", f"{2:032x}"]
        assert run(keys) == ["key/3"]
        assert run(history) == before
        first, second = run(lambda conn: TOMBSTONES(conn).all())
        assert (first.scope, first.key, first.id, first.stream) == ("", "key/1", f"{1:032x}", "load/1")
        assert (second.key, second.stream) == ("key/2", "")

    def test_history_goes_if_told_to(self, run: Run) -> None:
        """With `history` a dispatch's history goes with its row, and nobody else's."""
        enqueue(run, dispatch(1), dispatch(2))
        run(purge, 1, history=True)
        assert run(history, f"{1:032x}") == []
        assert len(run(history)) == 1

    def test_nothing_is_nothing(self, run: Run) -> None:
        """No rows are fine, and nothing is written."""
        enqueue(run, dispatch(1))
        before = run(everything)
        assert run(purge) == run(purge, 7) == []
        assert run(everything) == before
        assert run(buried) == []

    def test_a_purged_key_stays_taken(self, run: Run) -> None:
        """The same content is answered with the first one's id, and nothing is written; beside it others are."""
        enqueue(run, dispatch(1))
        run(purge, 1)
        before = run(everything)
        assert enqueue(run, same(7, 1)) == [Enqueued(f"{1:032x}", "key/1", False)]
        assert enqueue(run, same(8, 1), same(9, 1)) == [Enqueued(f"{1:032x}", "key/1", False)] * 2
        assert run(everything) == before
        assert enqueue(run, dispatch(2), same(7, 1), dispatch(3)) == [
            Enqueued(f"{2:032x}", "key/2", True),
            Enqueued(f"{1:032x}", "key/1", False),
            Enqueued(f"{3:032x}", "key/3", True),
        ]
        assert len(run(history)) == 3

    def test_other_content_under_a_purged_key(self, run: Run) -> None:
        """It is refused, and the call has written nothing; `keep` answers with the first one's id."""
        enqueue(run, dispatch(1))
        run(purge, 1)
        before = run(everything)
        other = same(7, 1, body="2", content_hash="other")
        with pytest.raises(KeyConflict) as refused:
            enqueue(run, dispatch(2), other, dispatch(3))
        assert refused.value.key == "key/1"
        kept = msgspec.structs.replace(other, keep=True)
        assert enqueue(run, kept) == [Enqueued(f"{1:032x}", "key/1", False)]
        assert run(everything) == before

    def test_a_refusal_leaves_nothing(self, run: Run) -> None:
        """A refused call has written nothing, neither rows nor history, even if its caller goes on and commits."""

        def go_on(conn: Connection, *, now: int) -> None:
            given = [dispatch(2), same(7, 1, content_hash="other"), dispatch(3)]
            with pytest.raises(KeyConflict):
                outbox.insert(conn, given, source="test", actor="ann", in_turn=False, now=now)

        enqueue(run, dispatch(1))
        run(purge, 1)
        before = run(everything)
        run(go_on)
        assert run(everything) == before

    def test_in_a_turn_a_purged_key_is_an_error(self, run: Run) -> None:
        """As any key that exists; the error names it."""
        enqueue(run, dispatch(1))
        run(purge, 1)
        before = run(everything)
        with pytest.raises(DuplicateKey) as refused:
            run(outbox.insert, [dispatch(2), same(7, 1)], source="turn", actor="ann", in_turn=True)
        assert refused.value.keys == ("key/1",)
        assert run(everything) == before

    def test_the_first_tombstone_stays(self, run: Run, clock: FakeClock) -> None:
        """If a key was given twice all the same, its tombstone names the first and counts from the last."""
        enqueue(run, dispatch(1))
        run(purge, 1)
        run(lambda conn, *, now: outbox._INSERT(conn, new=msgspec.json.encode([same(2, 1)]).decode(), now=now))
        assert enqueue(run, same(3, 1)) == [Enqueued(f"{2:032x}", "key/1", False)]
        clock.advance(60)
        run(purge, 2)
        (tombstone,) = run(lambda conn: TOMBSTONES(conn).all())
        assert (tombstone.id, tombstone.ended_at) == (f"{1:032x}", clock.wall())

    def test_an_attempt_that_ends_after_the_purge(self, run: Run) -> None:
        """What was purged by force while it was sent settles into nothing, and its key is taken."""
        enqueue(run, dispatch(1))
        (held,) = claim(run)
        run(purge, 1)
        (settled,) = run(settle.settle, [settlement(held)])
        assert (settled.status, settled.stale) == ("", True)
        assert enqueue(run, same(2, 1)) == [Enqueued(f"{1:032x}", "key/1", False)]


class PurgeRaces:
    """Purges beside inserts. They need a database of their own, not a way to run."""

    @pytest.mark.parametrize("commits", [True, False])
    def test_an_insert_that_waits_for_a_purge(self, database: Database, commits: bool) -> None:
        """Who asks for a key that is being purged gets its id, from the tombstone or from the row; no second row."""
        run = database.transact
        enqueue(run, dispatch(1))
        with database.engine.connect() as conn:
            purge(database.bind(conn), 1, now=5)
            second = Waiting(database, partial(enqueue, run, same(2, 1), dispatch(3)))
            second.blocked()
            conn.commit() if commits else conn.rollback()
        assert second.result() == [Enqueued(f"{1:032x}", "key/1", False), Enqueued(f"{3:032x}", "key/3", True)]
        assert database.read(keys) == (["key/3"] if commits else ["key/1", "key/3"])
        assert len(database.read(history)) == 2

    def test_a_purge_between_insert_and_look(self, database: Database) -> None:
        """A holder that is purged after the insert met it is found by its tombstone."""
        if database.is_sqlite:
            pytest.skip("SQLite's transactions are serial")
        other = Database(database.engine, schema=database.schema, clock=database.clock)
        enqueue(other.transact, dispatch(1))

        def reached(name: str) -> None:
            if name == "outbox.inserted":
                with database.engine.begin() as conn:
                    purge(database.bind(conn), 1, now=5)

        failpoints.arm(reached)
        try:
            answers = enqueue(database.transact, same(2, 1))
        finally:
            failpoints.arm(None)
            other.close()
        assert answers == [Enqueued(f"{1:032x}", "key/1", False)]
        assert database.read(keys) == []

    def test_purges_and_inserts_at_once(self, database: Database, clock: FakeClock) -> None:
        """A key that many ask for while it is purged, 50 times over: one id for all of them, and at most one row."""
        other = another(database, clock)
        for number in range(50):
            enqueue(database.transact, dispatch(number))
            ask = [partial(enqueue, other.transact, same(1_000 * n + number, number)) for n in (1, 2, 3)]
            _, *answers = in_threads(partial(database.transact, purge, number), *ask)
            assert answers == [[Enqueued(f"{number:032x}", f"key/{number}", False)]] * 3
        assert database.read(keys) == []
        assert len(database.read(history)) == 50
        other.close()
