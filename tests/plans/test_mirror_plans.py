"""What a mirror asks is answered by indexes, beside 100,000 of each thing that is finished."""

from sqlalchemy import Connection

from postroad.store import inbox, mirroring
from postroad.store.database import Database
from postroad.store.mirroring import Place
from postroad.testing.contracts.streams import event
from tests.plans.finished import STREAMS
from tests.plans.test_queue_plans import NOW, assert_none_walks, claim, explained, in_place


def life(conn: Connection) -> None:
    """A mirror begins and looks; then turns begin, and it looks again; it walks on from the middle."""
    inbox.publish(conn, [event(1, f"load/{n}", ready_at=NOW - 9) for n in range(STREAMS - 50, STREAMS)], now=NOW - 9)
    claims = claim(conn, "t1").claims
    begun = mirroring.start(conn, "load")
    assert {held.run_id for held in claims} == set(begun.running)
    seen = mirroring.glance(
        conn, "load", runs=Place(NOW - 1), deletions=Place(NOW - 1), running=sorted(begun.running), limit=1_000
    )
    assert seen.running == set(begun.running) == {run.name for run in seen.runs if not run.over}
    names = mirroring.names(conn, "load", after="load/5", limit=200)
    assert len(names) == 200
    assert mirroring.unknown(conn, [*names, "load/none"]) == ["load/none"]


def test_every_statement_has_its_index(database: Database) -> None:
    """No statement that a mirror looks with reads a table from end to end."""
    with explained(database) as found:
        in_place(database, life)
    assert_none_walks(found)


def test_a_look_does_not_grow_with_what_is_finished(database: Database) -> None:
    """A look behind the last run of all reads next to nothing, beside 100,000 runs that have ended."""
    with explained(database) as found:
        seen = in_place(
            database, mirroring.glance, "load", runs=Place(NOW), deletions=Place(NOW), running=[], limit=1_000
        )
    assert len(found) == 2
    assert seen.runs == []
    assert_none_walks(found)
