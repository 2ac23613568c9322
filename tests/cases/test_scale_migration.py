"""Scale and change: what a claim costs beside a backlog, what a delivery writes, what lists carry, other schemas."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, text
from typer.testing import CliRunner

from postroad import Kind, Postroad, SchemaMismatch, Turn
from postroad.engine import sweep
from postroad.model.clock import SECOND, FakeClock
from postroad.model.retention import DAY
from postroad.store import audit, dispatch_claims, migrations, outbox, retention, settle, timers
from postroad.store.database import Database
from postroad.store.migrations.steps import STEPS, Step
from postroad.store.statements import Statement
from postroad.surfaces.cli import app as cli
from postroad.testing.contracts.dispatches import POLICY, claim, dispatch, settlement
from tests.cases.apps import OpenApp, until

ANY: Kind[Any] = Kind("any", Any)
MAIL = Kind("mail", dict[str, int])
BACKLOG = 60_000
KINDS = 50
NUMBERS = "WITH RECURSIVE n(n) AS (SELECT CAST(:first AS bigint) UNION ALL SELECT n + 1 FROM n WHERE n + 1 < :last)"
# Over fifty kinds, one in ten due; or finished.
OUTBOX = Statement(f"""
INSERT INTO {{p}}outbox (id, key, stream, kind, version, destination, body, headers, policy, status, attempt,
    epoch, due_at, expires_at, content_hash, origin, created_at, updated_at)
{NUMBERS}
SELECT 'id/' || n, 'key/' || n, '', 'mail' || CAST(n % {KINDS} AS text), 1, '', '1', '{{{{}}}}', 'event', :status, 0, 0,
    CASE WHEN :status = 'pending' THEN CASE WHEN n % 10 = 0 THEN n ELSE :later + n END END, :later, '', '{{{{}}}}', 0, 0
FROM n
""")
TIMERS = Statement(f"""
INSERT INTO {{p}}timers (stream, key, fire_at, kind, data, spec, status, generation, updated_at)
{NUMBERS}
SELECT 's/' || CAST(n % 1000 AS text), 't' || n, CASE WHEN n % 10 = 0 THEN n ELSE :later + n END, 'k', '1', '',
    CASE WHEN :status = 'pending' THEN 'armed' ELSE 'fired' END, 0, 0 FROM n
""")


def fill(conn: Connection, *, now: int, first: int, rows: int) -> None:
    for status in ("pending", "delivered"):
        OUTBOX(conn, first=first, last=first + rows, later=now + 3_600 * SECOND, status=status)
        TIMERS(conn, first=first, last=first + rows, later=now + 3_600 * SECOND, status=status)
        first += rows


def work_of(conn: Connection, fn: Callable[[], Any]) -> int:
    """How much the database did: rows that Postgres has read, steps of SQLite's machine in hundreds."""
    if conn.dialect.name == "postgresql":
        read = text(
            "SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) FROM pg_stat_xact_user_tables "
            "WHERE relname LIKE 'postroad_%'"
        )
        before = conn.execute(read).scalar_one()
        fn()
        return int(conn.execute(read).scalar_one() - before)
    steps: list[int] = []
    raw: Any = conn.connection.dbapi_connection
    raw.set_progress_handler(lambda: steps.append(1), 100)
    fn()
    raw.set_progress_handler(None, 100)
    return len(steps)


PASSES: dict[str, Callable[..., Any]] = {
    "claim": lambda conn, now: dispatch_claims.claim(conn, POLICY, names=["mail0"], token="t", limit=10, now=now),
    "which kinds": lambda conn, now: dispatch_claims.due_kinds(
        conn, [f"mail{n}" for n in range(KINDS)], takeover=True, now=now
    ),
    "expire": lambda conn, now: settle.expire(conn, limit=10, now=now),
    "fire": lambda conn, now: timers.fire(conn, limit=10, now=now),
}


def test_a_pass_costs_the_same_beside_any_backlog(database: Database, clock: FakeClock) -> None:
    """A thousand rows or tens of thousands of them, due, not due and finished, never analysed: the same work."""
    costs: list[dict[str, int]] = []
    first = 0
    for rows in (1_000, BACKLOG):
        database.transact(fill, first=first, rows=rows)
        first += 2 * rows
        with database.engine.connect() as conn, conn.begin() as transaction:
            one_pass = {name: partial(fn, database.bind(conn), now=clock.wall()) for name, fn in PASSES.items()}
            costs.append({name: work_of(conn, fn) for name, fn in one_pass.items()})
            transaction.rollback()
    for name, small in costs[0].items():
        assert costs[1][name] <= 1.5 * small + 20, (name, costs)


def test_a_delivery_changes_few_rows(database: Database, clock: FakeClock) -> None:
    """From enqueueing to delivered a dispatch's row is written once and changed twice; its history has three rows."""
    if database.is_sqlite:
        pytest.skip("it keeps no counters of rows")

    def deliver(conn: Connection, *, now: int) -> dict[str, tuple[int, int, int]]:
        def run(fn: Any, *args: Any, **kwargs: Any) -> Any:
            return fn(conn, *args, now=now, **kwargs)

        outbox.insert(conn, [dispatch(n) for n in range(50)], source="t", actor="a", in_turn=False, now=now)
        run(settle.settle, [settlement(held) for held in claim(run)])
        counted = text(
            "SELECT relname, n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_xact_user_tables "
            "WHERE n_tup_ins + n_tup_upd + n_tup_del > 0"
        )
        return {row[0]: tuple(row[1:]) for row in conn.execute(counted)}

    assert database.transact(deliver) == {"postroad_outbox": (50, 100, 0), "postroad_transitions": (150, 0, 0)}


OLD, DEAD = 50_000, 500  # `python -m benchmarks --work retention` has four times as many, and figures
LETTERS = Statement(f"""
INSERT INTO {{p}}outbox (id, key, stream, kind, version, destination, body, headers, policy, status, attempt,
    epoch, content_hash, origin, created_at, updated_at)
{NUMBERS}
SELECT 'old' || n, 'old' || n, '', 'any', 1, '', '1', '{{{{}}}}', 'event', :status, 1, 0, '', '{{{{}}}}', :born + n,
    :ended FROM n
""")
TRACES = Statement(f"""
INSERT INTO {{p}}transitions (entity, from_status, to_status, reason_code, summary, source, actor, evidence, metadata,
    at)
{NUMBERS} SELECT 'old' || n, 'delivering', 'dead_letter', 'dispatch.dead_letter.permanent', '', '', '', '[]',
    '{{{{}}}}', 0 FROM n
""")
LEFT = Statement("SELECT status, count(*) AS rows FROM {p}outbox WHERE kind = 'any' GROUP BY status")
KEPT = Statement("SELECT count(*) FROM {p}transitions WHERE at = 0")


def fill_old(conn: Connection, *, now: int) -> None:
    """Delivered ones past their time, and dead ones among them that are not."""
    rows = partial(LETTERS, conn, born=now - 20 * DAY, ended=now - 10 * DAY)
    rows(first=0, last=OLD // 2, status="delivered")
    rows(first=OLD // 2, last=OLD // 2 + DEAD, status="dead_letter")
    rows(first=OLD // 2 + DEAD, last=OLD + DEAD, status="delivered")
    TRACES(conn, first=OLD // 2, last=OLD // 2 + DEAD)


@pytest.mark.timeout(300)
def test_a_great_purge_goes_in_small_steps_beside_sends(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 old rows go in chunks while dispatches come and are sent; none of these is lost, the dead ones stay."""
    monkeypatch.setattr(sweep, "FIRST", 0)
    monkeypatch.setattr(sweep, "REST", 1)
    chunks: list[int] = []
    real = retention.end

    def end(conn: Connection, found: Any, *args: Any, **more: Any) -> Any:
        chunks.append(len(found.rows))
        return real(conn, found, *args, **more)

    monkeypatch.setattr(retention, "end", end)
    post = open_app()
    sent: list[str] = []
    post.sender(MAIL)(lambda d: sent.append(d.key))
    post.kinds(ANY)
    post.database.transact(fill_old)
    keys: list[str] = []
    with post.running():
        while sum(chunks) < OLD:
            keys.append(f"k{len(keys)}")
            with post.begin() as tx:
                tx.send(MAIL, {"n": len(keys)}, key=keys[-1])
            until(lambda: len(sent) == len(keys), "a send beside the purge")
    assert sorted(sent) == sorted(keys)
    assert (sum(chunks), max(chunks)) == (OLD, retention.CHUNK)
    assert {row.status: row.rows for row in post.database.read(lambda conn: LEFT(conn).all())} == {"dead_letter": DEAD}
    assert post.database.read(lambda conn: KEPT(conn).scalar_one()) == DEAD
    (audited,) = post.database.read(audit.list_)
    assert audited.after == f'{{"delivered":{OLD}}}'
    with post.begin() as tx:
        again = tx.send(ANY, 1, key="old7", on_conflict="keep")
    assert (again.id, again.created) == ("old7", False)


def test_lists_carry_no_bodies(place: dict[str, Any], open_app: OpenApp) -> None:
    """Sixty dispatches and events of 200 KB each: what lists print is small and bounded, what is shown is cut."""
    post = open_app()

    @post.sender(ANY)
    def send(d: Any) -> None:
        raise ValueError("x" * 64_000)

    @post.turn("chat")
    def chat(t: Turn) -> None:
        t.record(ANY, {"pad": "x" * 200_000})

    with post.begin() as tx:
        for n in range(60):
            tx.send(ANY, {"pad": "x" * 200_000}, key=f"k{n}")
        tx.publish("chat/1", ANY, {"pad": "x" * 200_000})
    post.drain()
    assert len(post.dispatches.list()) == 50
    options = ["--database", place["database"], *(["--schema", place["schema"]] if "schema" in place else [])]
    for command, largest in (
        (["status", "--json"], 10_000),
        (["dispatch", "ls", "--json"], 200_000),
        (["dispatch", "ls"], 200_000),
        (["dispatch", "show", "k0"], 20_000),
    ):
        done = CliRunner().invoke(cli, [*command, *options])
        assert done.exit_code == 0, done.output
        assert len(done.stdout) < largest, command
        assert "x" * 5_000 not in done.stdout


@pytest.mark.parametrize("ahead", [False, True], ids=["code newer than the schema", "schema newer than the code"])
def test_code_and_schema_that_do_not_fit_never_half_work(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """The first use is refused with what to do about it, by app, drain, loops and command line; nothing is written."""
    post = Postroad(place["database"], schema=place.get("schema"), migrate=True)
    post.check_schema()
    post.close()
    if ahead:
        with post.database.engine.begin() as conn:
            added = Statement("INSERT INTO {p}migrations VALUES (:n, 'later', 1, :n)")
            for n in range(migrations.latest + 1, migrations.latest + 3):
                added(post.database.bind(conn), n=n)
        post.close()
    else:
        step = Step(version=migrations.latest + 1, name="more", oldest_code=1)
        monkeypatch.setattr(migrations, "STEPS", (*STEPS, step))
        monkeypatch.setattr(migrations, "latest", step.version)
    misfit = Postroad(place["database"], schema=place.get("schema"), migrate=False)
    misfit.kinds(ANY)
    cure = "upgrade postroad" if ahead else "run `postroad migrate`"
    with pytest.raises(SchemaMismatch, match=cure), misfit.begin() as tx:
        tx.send(ANY, {})
    with pytest.raises(SchemaMismatch, match=cure):
        misfit.drain()
    with pytest.raises(SchemaMismatch, match=cure), misfit.running():
        pytest.fail("never began")
    options = ["--database", place["database"], *(["--schema", place["schema"]] if "schema" in place else [])]
    done = CliRunner().invoke(cli, ["status", *options])
    assert done.exit_code != 0
    misfit.close()
