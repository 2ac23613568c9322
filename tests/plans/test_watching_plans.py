"""What turns say and the look for news are answered by indexes, beside 100,000 of each thing that is finished."""

from sqlalchemy import Connection

from postroad.store import inbox, partials, watching
from postroad.store.database import Database
from postroad.store.partials import Said
from postroad.store.watching import Asked
from postroad.testing.contracts.streams import LEASE, event
from tests.plans.finished import STREAMS
from tests.plans.test_queue_plans import NOW, assert_none_walks, claim, explained, in_place


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
