"""What is asked of delegations is answered by their indexes, however many have ended, and whoever had them done."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from postroad.model.clock import FakeClock
from postroad.store import delegation_views, delegations, dialects, due
from postroad.store.database import Database
from postroad.store.statements import Statement, as_json
from tests.plans.places import STATISTICS, filled
from tests.plans.test_timer_plans import NUMBERS, assert_indexed, plan

NOW = FakeClock().wall()
ENDED = 50_000
COLUMNS = "stream, key, child, position, depth, status, created_at, deadline_at, ended_at"
FILL = [
    # Of many streams, each with a worker of its own; of one that has delegated much, to one worker.
    Statement(f"""INSERT INTO {{p}}delegations ({COLUMNS}) {NUMBERS}
        SELECT 'chief/' || n, 'k', 'sub/' || n, n, 1, 'done', n, n, n FROM n"""),
    Statement(f"""INSERT INTO {{p}}delegations ({COLUMNS}) {NUMBERS}
        SELECT 'chief/old', 'k' || n, 'sub/old', n, 1, 'done', n, n, n FROM n"""),
]


# True statistics would only say that all of it has ended: SQLite then reads a table as soon as its index.
@pytest.fixture(params=[each for each in STATISTICS if each[1] != "true"], ids="-".join, scope="module")
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A database whose table is full of what has ended, whatever its statistics say."""
    with filled(request, tmp_path_factory, request.param, fill) as made:
        yield made


def fill(conn: Connection) -> None:
    for statement in FILL:
        statement(conn, rows=ENDED, now=NOW)


KEYS = as_json([{"stream": "chief/old", "key": f"k{n}"} for n in range(5)])
ENDS = as_json([{"stream": "chief/old", "key": f"k{n}", "status": "done", "error": None} for n in range(1, 5)])
NOTES = as_json([{"stream": "chief/old", "key": f"k{n}", "note": "late"} for n in range(1, 5)])
OPEN, CHILD, DUE, KEY = (
    "postroad_delegations_open", "postroad_delegations_child", "postroad_delegations_due", "postroad_delegations",
)  # fmt: skip


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "user's"])
@pytest.mark.parametrize(
    ("statement", "given", "indexes"),
    [
        (delegations._LOCK, {"keys": KEYS, "size": 5}, (KEY,)),
        (delegations._OF_CHILDREN, {"children": '["sub/old","sub/7"]'}, (CHILD,)),
        (delegations._LOCK_DUE, {"now": NOW, "limit": 100}, (DUE,)),
        (delegations._END, {"ends": ENDS, "size": 4, "now": NOW}, (KEY,)),
        (delegations._NOTE, {"notes": NOTES, "size": 4}, (KEY,)),
        (delegations._STANDING, {"stream": "sub/old", "child": "sub/old", "most": 100}, (OPEN, CHILD)),
        (delegations._KNOWN, {"stream": "chief/old", "key": "k7"}, (KEY,)),
        (delegations._OPEN_OF, {"child": "sub/old", "limit": 100}, (CHILD,)),
        (delegations._LAST_OF, {"child": "sub/old"}, (CHILD,)),
        (delegations._OF, {"stream": "chief/old", "limit": 100}, (KEY,)),
        (delegations._OPEN_BY, {"stream": "chief/old", "limit": 100}, (OPEN,)),
        (due._MOMENTS, {}, (DUE,)),
        (delegation_views._statement(("stream",)), {"stream": "chief/old", "limit": 50}, (KEY,)),
        (
            delegation_views._statement(("child", "status")),
            {"child": "sub/7", "status": "done", "limit": 50},
            (CHILD,),
        ),
        (delegation_views._statement(("open",)), {"limit": 50}, (DUE,)),
        (delegation_views._statement(("after",)), {"after_stream": "chief/7", "after_key": "k", "limit": 50}, (KEY,)),
    ],
    ids=["lock", "child", "due", "end", "note", "standing", "known", "open of", "last of", "of", "open by", "moments",
         "listed", "listed by child", "listed open", "listed after"],
)  # fmt: skip
def test_found_by_an_index(
    database: Database, statement: Statement, given: Any, indexes: tuple[str, ...], ours: bool
) -> None:
    """No table of ours is walked, in a transaction of ours and in a user's, whose planner knows no better."""
    with database.engine.connect() as conn:
        bound = database.bind(conn)
        if ours:
            dialects.distrust_statistics(bound)
        assert_indexed(plan(bound, statement, **given), *indexes)
