"""Looking at streams is answered by indexes, beside 100,000 of each thing that is finished or waits elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.store import dialects, inbox, stream_views
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.store.stream_views import STATES, Wanted
from postroad.testing.contracts.streams import event
from tests.plans.test_queue_plans import DEEP, DEPTH, NOW, assert_none_walks, claim, explained, in_place, work

_BURY = Statement("UPDATE {p}inbox SET reason = 'dead' WHERE stream = :stream AND event_id = 'e1'")


def look(conn: Connection) -> None:
    """Everything that is asked about streams."""
    inbox.publish(conn, [event(m, f"load/{n}", ready_at=NOW - 9) for n in range(80) for m in range(3)], now=NOW - 9)
    assert len(claim(conn, "t1", batch=2).claims) == 64
    for state in (None, *STATES):
        for wanted in (Wanted(state=state), Wanted(type="load", state=state, after="load/5")):
            found = stream_views.list_(conn, wanted, limit=20, now=NOW)
            assert bool(found) == (state not in ("backing_off", "parked")), state
    assert stream_views.row(conn, "load/7", now=NOW) is not None
    for dead in (False, True):
        assert len(stream_views.events(conn, "load/7", dead_ones=dead, after=None, limit=5)) > 2
        stream_views.events(conn, "load/7", dead_ones=dead, after=10**6, limit=5)
    stream_views.queue(conn, "load/7")
    stream_views.place(conn, "load/7", 10**6)


def test_every_statement_has_its_index(database: Database) -> None:
    """No look at streams, by whatever state, and none at one stream's events reads a table from end to end."""
    with explained(database) as found:
        in_place(database, look)
    assert len({sql for sql, _ in found}) > 10
    assert_none_walks(found)


LOOKS: dict[str, Callable[[Connection, str], object]] = {
    "row": lambda conn, name: stream_views.row(conn, name, now=NOW),
    "list": lambda conn, name: stream_views.list_(conn, Wanted(type=name.split("/")[0]), limit=50, now=NOW),
    "waiting": lambda conn, name: stream_views.events(conn, name, dead_ones=False, after=None, limit=5),
    "dead": lambda conn, name: stream_views.events(conn, name, dead_ones=True, after=None, limit=5),
}


@pytest.mark.parametrize("what", LOOKS)
def test_a_look_does_not_grow_with_a_streams_depth(database: Database, what: str) -> None:
    """A look at a stream in which 100,000 events wait costs what one does in which 1,000 do."""

    def cost(conn: Connection, stream_type: str, depth: int) -> int:
        DEPTH(conn, rows=depth, type=stream_type, now=NOW)
        _BURY(conn, stream=f"{stream_type}/0")
        dialects.distrust_statistics(conn)
        found: list[Any] = []
        spent = work(database, conn, lambda: found.append(LOOKS[what](conn, f"{stream_type}/0")))
        assert found[0]
        return spent

    # Behind all names so far: what another test has taken back stands in Postgres' indexes still.
    last = f"z{list(LOOKS).index(what)}"
    shallow, deep = in_place(database, cost, f"{last}_1", 1_000), in_place(database, cost, f"{last}_2", DEEP)
    assert deep < 1.5 * shallow
