"""Views of many and of large dispatches: bounded, complete while everything moves, and true in their numbers."""

import json
import threading
import time
from typing import Any

import pytest
from sqlalchemy import event
from typer.testing import CliRunner

from postroad import Dispatch, DispatchFilter, InvalidInput, Kind, Postroad
from postroad.model.clock import SECOND, FakeClock
from postroad.model.rows import Settlement
from postroad.store import dispatch_claims, operators, outbox, settle, status
from postroad.store.audit import Operator
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.surfaces.cli import app as cli
from postroad.testing.contracts.dispatches import POLICY, dispatch
from tests.cases.apps import OpenApp

ANY: Kind[Any] = Kind("any", Any)
BODY = 250_000
FILL = Statement("""
WITH RECURSIVE n(n) AS (SELECT CAST(:first AS bigint) UNION ALL SELECT n + 1 FROM n WHERE n + 1 < :last)
INSERT INTO {p}outbox (id, key, stream, kind, version, destination, body, headers, policy, status, attempt,
    epoch, last_error, content_hash, origin, created_at, updated_at)
SELECT 'id/' || n, 'key/' || n, '', 'mail', 1, '', :body, '{}', 'event', 'dead_letter', 1, 0, :error, '', '{}',
    n % 97, n % 97
FROM n
""")


def fill(post: Postroad, last: int, *, first: int = 0, body: str = "{}", error: str = "") -> None:
    """Dead letters, many of them created at one instant."""
    post.database.transact(lambda conn, now: FILL(conn, first=first, last=last, body=body, error=error))


def test_a_list_of_large_dispatches_stays_small(place: dict[str, Any], open_app: OpenApp) -> None:
    """With payloads near the limit and long errors no list reads or carries a body, and each is bounded."""
    post = open_app()
    fill(post, 400, body=json.dumps("x" * BODY), error="e" * 2000)
    statements: list[str] = []
    event.listen(post.database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    for wanted in ({"limit": 10_000}, {"status": "delivered"}, {"reason": "max_attempts"}, {"key": "key/3"}):
        post.dispatches.list(**wanted)
    assert len(statements) >= 4
    assert not [said for said in statements if "body" in said]
    options = ["--database", place["database"], *(["--schema", place["schema"]] if "schema" in place else [])]
    for command in (("ls", "--limit", "10000", "--json"), ("ls",), ("purge", "--kind", "mail", "--dry-run", "--json")):
        begun = time.monotonic()
        done = CliRunner().invoke(cli, ["dispatch", *command, *options])
        assert done.exit_code == 0, done.output
        assert time.monotonic() - begun < 10
        assert len(done.stdout) < 5_000_000
        assert "x" * 100 not in done.stdout
    shown = CliRunner().invoke(cli, ["dispatch", "show", "key/1", *options])
    assert f"body ({BODY + 2} bytes, the first 2000 characters)" in shown.stdout
    assert len(shown.stdout) < 20_000
    whole = CliRunner().invoke(cli, ["dispatch", "show", "key/1", "--body", "--json", *options])
    assert len(json.loads(whole.stdout)["data"]["body"]) == BODY + 2


def test_a_walk_by_pages_misses_and_repeats_nothing(open_app: OpenApp) -> None:
    """While others are purged and sent between and during pages, whatever stays is on exactly one of them."""
    post = open_app()
    post.elsewhere(ANY)
    rows = 10_000
    fill(post, rows)
    purged = threading.Event()
    begun = threading.Event()

    def disturb() -> None:
        other = open_app()
        other.elsewhere(ANY)
        begun.wait()
        for tenth in range(10):
            other.dispatches.purge(DispatchFilter(key=f"key/{tenth}7"), actor="ann")
            with other.begin() as tx:
                tx.send(ANY, {}, key=f"new/{tenth}")
        purged.set()

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    seen: list[str] = []
    cursor: str | None = None
    while page := post.dispatches.list(limit=500, after=cursor):
        seen += [row.key for row in page]
        cursor = page[-1].cursor
        begun.set()
        if len(seen) >= rows // 2:
            purged.wait(60)  # the rest is read after the purge: what it deleted is not there, what it left is
    disturbing.join()
    assert purged.is_set()
    stayed = {row.key for row in post.dispatches.list(limit=10_000) if row.key.startswith("key/")}
    assert 8_000 < len(stayed) < rows
    assert len(seen) == len(set(seen))
    assert stayed <= set(seen)


def test_counts_tell_what_happened_not_what_was_tried(database: Database, clock: FakeClock) -> None:
    """Of 100 results 20 are stale: 80 delivered, 20 stale, and the ages are those of the oldest that waits."""
    given = [dispatch(n) for n in range(100)]
    database.transact(outbox.insert, given, source="test", actor="ann", in_turn=False)
    first = database.transact(dispatch_claims.claim, POLICY, names=["mail"], token="t1", limit=100).claims
    clock.advance(POLICY.lease / SECOND)
    second = database.transact(dispatch_claims.claim, POLICY, names=["mail"], token="t2", limit=20).claims
    again = {held.id for held in second}
    settled = database.transact(
        settle.settle,
        [Settlement(id=h.id, token=h.token, attempt=h.attempt, result="ok", policy=POLICY) for h in first],
    )
    assert sum(each.stale for each in settled) == 20
    assert {each.id for each in settled if each.stale} == again
    clock.advance(60)
    found = database.read(status.snapshot, now=clock.wall())
    assert found.stale_settles_lately == 20
    assert found.dispatches == {"pending": 0, "delivering": 20}
    assert found.oldest_dispatch_age == POLICY.lease + 60 * SECOND
    failed = [Settlement(id=h.id, token=h.token, attempt=h.attempt, result="failed", policy=POLICY) for h in second]
    database.transact(settle.settle, failed)
    found = database.read(status.snapshot, now=clock.wall())
    assert found.dispatches == {"pending": 20, "delivering": 0}
    assert found.oldest_dispatch_age == POLICY.lease + 60 * SECOND, "a row that bounces is as old as before"
    assert (found.dead_lately, found.expired_lately) == (0, 0)


def test_a_late_result_of_a_dead_letter_is_no_second_death(database: Database, clock: FakeClock) -> None:
    """What comes in after the end is counted as stale, and a person's word about it not at all."""
    database.transact(outbox.insert, [dispatch(1)], source="test", actor="ann", in_turn=False)
    (held,) = database.transact(dispatch_claims.claim, POLICY, names=["mail"], token="t1", limit=1).claims
    result = Settlement(id=held.id, token=held.token, attempt=1, result="unknown", policy=POLICY)
    database.transact(settle.settle, [result])
    orders = operators.Orders(by=Operator(actor="ann"))
    database.transact(operators.resolve, held.id, "discard", orders=orders, due=operators.Due())
    database.transact(settle.settle, [result])
    found = database.read(status.snapshot, now=clock.wall())
    assert (found.dead_lately, found.stale_settles_lately) == (1, 1)


def test_a_drain_counts_won_claims(open_app: OpenApp) -> None:
    """Attempted are the claims that were won, each of which is one result."""
    post = open_app()
    seen: list[str] = []

    @post.sender(ANY)
    def send(d: Dispatch[Any]) -> None:
        seen.append(d.key)

    with post.begin() as tx:
        for n in range(30):
            tx.send(ANY, {}, key=f"k{n}")
    drained = post.drain()
    assert (drained.attempted, drained.delivered, drained.stale, len(seen)) == (30, 30, 0, 30)


@pytest.mark.parametrize("limit", [0, 10_001, True, "5"])
def test_a_list_is_bounded(open_app: OpenApp, limit: Any) -> None:
    """Nobody gets all rows at once."""
    with pytest.raises(InvalidInput, match="limit"):
        open_app().dispatches.list(limit=limit)
