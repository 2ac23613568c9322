"""What turns say and the look for news are answered by indexes, beside 100,000 of each thing that is finished."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Connection

from postroad.store import inbox, partials, watching
from postroad.store.database import Database
from postroad.store.partials import Said
from postroad.store.statements import Statement
from postroad.store.watching import Asked
from postroad.testing.contracts.streams import LEASE, event
from tests.plans import test_queue_plans as finished
from tests.plans.places import STATISTICS, filled
from tests.plans.test_queue_plans import NOW, STREAMS, assert_none_walks, claim, explained, in_place

_SPOKEN = Statement("""INSERT INTO {p}partials (stream, run_id, turn_id, updated_at, said)
    WITH RECURSIVE n(n) AS (SELECT CAST(0 AS bigint) UNION ALL SELECT n + 1 FROM n WHERE n + 1 < :rows)
    SELECT 'load/' || n, 'r' || n, 't', 0, 'hm' FROM n""")


@pytest.fixture(params=STATISTICS, ids="-".join, scope="module")
def database(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Much that is finished and much that was said, and a planner that was told that nothing is there, or the truth."""
    with filled(request, tmp_path_factory, request.param, fill) as made:
        yield made


def fill(conn: Connection) -> None:
    finished.fill(conn)
    _SPOKEN(conn, rows=STREAMS // 2)


def life(conn: Connection) -> None:
    """Turns speak beside many that did, and many watch."""
    inbox.publish(conn, [event(1, f"load/{n}", ready_at=NOW - 9) for n in range(STREAMS - 50, STREAMS)], now=NOW - 9)
    claims = claim(conn, "t1").claims
    said = [Said(name=one.stream, token=one.token, run=one.run_id, turn=one.turn_id, words="hm") for one in claims]
    assert len(partials.carry(conn, said, {"r1": "load/1"}, now=NOW)) == 50
    asked = [Asked(f"load/{n}", 7) for n in range(STREAMS - 1_000, STREAMS)]
    found = watching.look(conn, asked, now=NOW + LEASE // 2)
    assert sum(len(news.entries) for news in found.values()) == watching.ENTRIES_MAX
    assert sum(news.partial is not None for news in found.values()) == 0  # those come once there is room
    last = watching.look(conn, [Asked(one.stream, 10) for one in claims], now=NOW + LEASE // 2)
    assert sum(news.partial is not None for news in last.values()) == 50
    partials.clear(conn, [one.stream for one in claims])


def test_every_statement_has_its_index(database: Database) -> None:
    """No statement that carries words, or looks for news, reads a table from end to end."""
    with explained(database) as found:
        in_place(database, life)
    assert len({sql for sql, _ in found}) > 5
    assert_none_walks(found)
