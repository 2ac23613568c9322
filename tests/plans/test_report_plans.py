"""Reports are accepted, claimed, landed and waited for by indexes, beside 100,000 of each thing that is finished."""

import pytest
from sqlalchemy import Connection

from postroad.model.rows import ClaimedTurns
from postroad.store import inbox, reports, turns, watching
from postroad.store.database import Database
from postroad.store.reports import NewReport
from postroad.store.statements import Statement
from postroad.store.watching import Asked
from postroad.testing.contracts.reports import report
from postroad.testing.contracts.streams import decided, event
from tests.plans.finished import NUMBERS
from tests.plans.test_queue_plans import DEEP, NOW, assert_none_walks, claim, explained, in_place, work

MANY = 40
DEPTH = Statement(f"""INSERT INTO {{p}}inbox (stream, type, event_id, kind, version, data, received_at, ready_at)
    {NUMBERS} SELECT :type || '/0', :type, 'e' || n, CASE WHEN n % :every = :every - 1 THEN 'postroad.report' ELSE 'k'
    END, 1, '1', :now - 9, :now - 9 FROM n""")  # fmt: skip


def life(conn: Connection) -> None:
    """Everything that happens to reports, once."""
    new = [NewReport(event=report(n, f"load/{n}", source=f"load/{n + 1}"), source=f"load/{n + 1}") for n in range(MANY)]
    assert reports.accept(conn, new, now=NOW) == [None] * MANY
    reports.tell(conn, [report(n, f"load/{n}") for n in range(MANY + 9)], now=NOW)
    inbox.publish(conn, [event(1, f"load/{n}") for n in range(MANY)], now=NOW)
    asked = [Asked(f"load/{n}", event=f"r{n}") for n in range(MANY)]
    assert watching.look(conn, asked, now=NOW) == {}
    won = claim(conn, "t1").claims
    assert {len(held.events) for held in won} == {1}
    turns.commit(conn, [decided(held) for held in won], now=NOW)
    assert all(news.entries for news in watching.look(conn, asked, now=NOW).values())
    assert all(entry is not None for entry in reports.accept(conn, new, now=NOW))


def test_every_statement_has_its_index(database: Database) -> None:
    """No statement that accepts a report, lands it, or looks for its end reads a table from end to end."""
    with explained(database) as found:
        in_place(database, life)
    assert len({sql for sql, _ in found}) > 15
    assert_none_walks(found)


@pytest.mark.parametrize("every", [1, 2, 10**9], ids=["reports", "both in turn", "messages"])
def test_a_claim_does_not_grow_with_a_streams_depth(database: Database, every: int) -> None:
    """Beside 100,000 reports, or reports and messages in turn, a claim costs what it does beside 1,000 messages."""

    def cost(conn: Connection, stream_type: str, depth: int, every: int) -> int:
        DEPTH(conn, rows=depth, type=stream_type, every=every, now=NOW)
        inbox.publish(conn, [event(1, f"{stream_type}/{n}", ready_at=NOW) for n in range(1, 101)], now=NOW)
        found: list[ClaimedTurns] = []
        cost = work(
            database, conn, lambda: found.append(claim(conn, "t", stream_type=stream_type, limit=16, batch=10))
        )  # fmt: skip
        assert len(found[0].claims) == 16
        deepest = next(held for held in found[0].claims if held.stream == f"{stream_type}/0")
        assert len(deepest.events) == (1 if every == 2 else 10)
        return cost

    # What was rolled back stays in Postgres' indexes for a while: each has a type of its own.
    shallow = in_place(database, cost, f"shallow{every}", 1_000, 10**9)
    assert in_place(database, cost, f"deep{every}", DEEP, every) < 1.5 * shallow
