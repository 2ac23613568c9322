"""Publishing, claiming and committing are answered by indexes, beside 100,000 of each thing that is finished.

The real verbs run, and every statement that they send is explained just before it is executed, with its own
parameters and settings. What a claim touches is counted by the database, not timed.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy import event as hooks

from postroad.model.clock import FakeClock
from postroad.model.operations import CallStatus, OperationRow
from postroad.model.rows import ClaimedTurns, NewAlert, TurnClaim, TurnCommit
from postroad.store import due, inbox, log, operations, queues, runs, stopping, turns
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing.contracts.streams import LEASE, decided, event, hold
from tests.plans.finished import NUMBERS

NOW = FakeClock().wall()
WHOLE = re.compile("inbox_stops|queues_parked")
DEEP = 100_000
DEPTH = Statement(f"""INSERT INTO {{p}}inbox (stream, type, event_id, kind, version, data, received_at, ready_at)
    {NUMBERS} SELECT :type || '/0', :type, 'e' || n, 'k', 1, '1', :now - 9, :now - 9 FROM n""")  # fmt: skip
READ_BY_INDEX = text("""
    SELECT coalesce(sum(pg_stat_get_xact_tuples_returned(indexrelid)), 0) FROM pg_index
    WHERE indrelid IN (SELECT oid FROM pg_class WHERE relname LIKE 'postroad_%'
        AND relnamespace = CAST(CAST(:schema AS text) AS regnamespace))
""")


@contextmanager
def explained(database: Database) -> Iterator[list[tuple[str, str]]]:
    """Each statement that the engine executes meanwhile, with its plan."""
    found: list[tuple[str, str]] = []
    explain = "EXPLAIN QUERY PLAN " if database.is_sqlite else "EXPLAIN "

    def before(conn: Connection, _cursor: Any, sql: str, parameters: Any, *_rest: Any) -> None:
        if sql.lstrip().startswith(("SELECT", "WITH", "INSERT", "UPDATE", "DELETE")):
            with_plan = conn.connection.cursor()
            with_plan.execute(explain + sql, parameters)
            found.append((sql, "\n".join(str(row[-1]) for row in with_plan.fetchall())))
            with_plan.close()

    hooks.listen(database.engine, "before_cursor_execute", before)
    yield found
    hooks.remove(database.engine, "before_cursor_execute", before)


def walks(plan: str) -> list[str]:
    """The places of a plan at which a table of ours, or an index of one, is read from end to end.

    Not the indexes of stops that nobody has seen to and of parked streams: they hold nothing else, and are looked at
    as a whole.
    """
    places = [place.strip() for place in re.split(r"-> |\n(?=\S)", plan)]
    return [
        place
        for place in places
        if re.search(r"Seq Scan on (\w+\.)?postroad", place)
        or re.search(
            r"^SCAN (?!q USING (COVERING )?INDEX postroad_queues_parked|json_each|win|walk|front|cut|found$"
            r"|\(subquery|CONST)",
            place,
        )
        or (
            re.search(r"Index (Only )?Scan .*on (\w+\.)?postroad", place)
            and "Index Cond" not in place
            and not WHOLE.search(place)
        )
    ]


def in_place(database: Database, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run in a transaction that is rolled back."""
    with database.engine.connect() as conn, conn.begin() as transaction:
        result = fn(database.bind(conn), *args, **kwargs)
        transaction.rollback()
        return result


def claim(conn: Connection, token: str, **how: Any) -> ClaimedTurns:
    given = {"stream_type": "load", "limit": 64, "batch": 100, "lease": LEASE, "now": NOW, **how}
    return queues.claim(conn, token=token, **given)


def call(conn: Connection, held: TurnClaim) -> None:
    """A tool call of a run, and what others look at of it."""
    row = OperationRow(
        turn_id=held.turn_id, ordinal=1, run_id=held.run_id, stream=held.stream, tool="find", version=1, effect="read",
        arguments="{}",
    )  # fmt: skip
    operations.start(conn, [operations.Start(hold=hold(held), row=row)], now=NOW)
    end = operations.Finish(hold=hold(held), turn_id=held.turn_id, ordinal=1, status=CallStatus.FINISHED, result="null")
    operations.finish(conn, [end], now=NOW)
    operations.of_turn(conn, held.turn_id)
    operations.of_stream(conn, held.stream)
    operations.resolve(conn, held.turn_id, "continue")


def life(conn: Connection) -> None:
    """Everything that happens to events and claims, once."""
    new = [event(m, f"load/{n}", ready_at=NOW - 9) for n in range(80) for m in range(3)]
    inbox.publish(conn, [*new, event(0, "deep/1")], now=NOW - 9)
    inbox.publish(conn, new[:5], now=NOW)
    won = claim(conn, "t1", batch=2).claims
    assert len(won) == 64
    first, second, third, fourth, *rest = won
    queues.renew(conn, [hold(held) for held in won], lease=LEASE, now=NOW)
    queues.back_off(conn, hold(first), delay=0, error="", now=NOW)
    queues.release(conn, hold(second), now=NOW)
    queues.split(conn, hold(third), error="", now=NOW)
    queues.park(conn, hold(fourth), error="", alert=NewAlert(code="turn.parked", subject=fourth.stream), now=NOW)
    call(conn, rest[1])
    assert turns.drop_landed(conn, hold(rest[0]), now=NOW) == 0
    made: list[TurnCommit] = [decided(held, "a", operated=True) for held in rest]
    turns.commit(conn, made, now=NOW)
    found = claim(conn, "t2", debounce=5, debounce_max=9, limit=8)
    assert found.clogged
    queues.adopt(conn, stream_type="load", now=NOW)
    claim(conn, "t3", limit=8, now=NOW + 10 * LEASE)
    due.streams(conn, ["load", "room"])
    inbox.publish(conn, [stopping.event("load/2", "s1"), stopping.event("deep/1", "s2")], now=NOW)
    stopping.asked(conn, ["load"])
    stopping.hurry(conn, ["load/2"], now=NOW)
    inbox.publish(conn, [stopping.cancelling("load/2", "load/3", "k")], now=NOW)
    stopping.withdraw(conn, {"deep/1": f"[{-(10**6)}, 7, null]"}, now=NOW)
    for read in (log.read, log.last, inbox.waiting):
        read(conn, "load/1")
    log.find(conn, "load/1", ["x1", "x2"])


def test_every_statement_has_its_index(database: Database) -> None:
    """No statement of publish, claim, renew, settle, commit or adopt reads a table from end to end."""
    with explained(database) as found:
        in_place(database, life)
    assert len({sql for sql, _ in found}) > 25
    assert_none_walks(found)


def test_what_people_read_has_its_index(database: Database, request: pytest.FixtureRequest) -> None:
    """A stream's runs are found through their index, unless the planner takes the table for nearly empty."""
    with explained(database) as found:
        in_place(database, lambda conn: runs.of_stream(conn, "load/1"))
    if request.node.callspec.params["database"][1] != "hollow":
        assert_none_walks(found)


def assert_none_walks(found: list[tuple[str, str]]) -> None:
    slow = [(sql, plan) for sql, plan in found if walks(plan)]
    assert not slow, "\n\n".join(f"{sql}\n{plan}" for sql, plan in slow)


def work(database: Database, conn: Connection, fn: Callable[[], Any]) -> int:
    """How much the database had to do: rows read through indexes, or steps of SQLite's virtual machine."""
    if not database.is_sqlite:
        before = conn.execute(READ_BY_INDEX, {"schema": database.schema}).scalar_one()
        fn()
        return int(conn.execute(READ_BY_INDEX, {"schema": database.schema}).scalar_one() - before)
    steps = itertools.count()
    raw: Any = conn.connection.driver_connection
    raw.set_progress_handler(lambda: next(steps) * 0, 10)
    fn()
    raw.set_progress_handler(None, 0)
    return next(steps) * 10


def beside(conn: Connection, stream_type: str, depth: int) -> None:
    """One stream with that many events, and 100 younger ones with one event each."""
    DEPTH(conn, rows=depth, type=stream_type, now=NOW)
    inbox.publish(conn, [event(1, f"{stream_type}/{n}", ready_at=NOW) for n in range(1, 101)], now=NOW)


def test_a_claim_does_not_grow_with_a_streams_depth(database: Database) -> None:
    """A claim beside a stream of 100,000 events costs what it does beside one of 1,000."""

    def cost(conn: Connection, stream_type: str, depth: int) -> int:
        beside(conn, stream_type, depth)
        found: list[ClaimedTurns] = []
        cost = work(
            database,
            conn,
            lambda: found.append(claim(conn, "t", stream_type=stream_type, limit=16, batch=10)),
        )
        assert len(found[0].claims) == 16
        return cost

    shallow, deep = in_place(database, cost, "shallow", 1_000), in_place(database, cost, "deep", DEEP)
    assert deep < 1.5 * shallow


def test_a_deep_stream_keeps_nobody_waiting(database: Database) -> None:
    """Beside 100,000 events of one stream 100 others all have their turn within 7 claims of 16: the ideal."""

    def served(conn: Connection) -> list[int]:
        beside(conn, "deeper", DEEP)
        cursor, seen, passes = "", set[str](), list[int]()
        while len(seen) < 101 and len(passes) < 20:
            won = claim(conn, f"p{len(passes)}", stream_type="deeper", limit=16, batch=10, cursor=cursor)
            cursor = won.cursor
            seen |= {held.stream for held in won.claims}
            passes.append(len(won.claims))
            turns.commit(conn, [decided(held) for held in won.claims], now=NOW)
        return passes

    assert len(in_place(database, served)) <= 8
