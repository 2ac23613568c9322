"""Claims under concurrency: bounds that hold with any plan, work that is shared, withdrawals that race."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from postroad import Dispatch, Kind, Postroad
from postroad.model.clock import SECOND
from postroad.model.rows import NewEvent, TimerChange
from postroad.store import dispatch_claims, inbox, moments, outbox, queues, settle, timers
from postroad.store.database import Database
from postroad.store.statements import Statement
from postroad.testing.contracts.dispatches import POLICY, dispatch
from tests.cases.apps import until

ROWS = 1_000
LIMIT = 5
KNOBS = ("enable_hashjoin", "enable_mergejoin", "enable_material", "enable_memoize")
Apps = Callable[[], Postroad]


def due_mail(conn: Connection, now: int) -> None:
    outbox.insert(conn, [dispatch(n) for n in range(ROWS)], source="t", actor="a", in_turn=False, now=now)


def overdue_mail(conn: Connection, now: int) -> None:
    given = [dispatch(n, expires_at=n) for n in range(ROWS)]
    outbox.insert(conn, given, source="t", actor="a", in_turn=False, now=now)


def events(conn: Connection, now: int) -> None:
    inbox.publish(conn, [NewEvent(stream=f"load/{n}", event_id="e", kind="k", data="1") for n in range(ROWS)], now=now)


def armed(conn: Connection, now: int) -> None:
    timers.apply(
        conn, [TimerChange(verb="set", stream="s/1", key=f"t{n}", fire_at=n, spec="") for n in range(ROWS)], now=now
    )


def claimed_mail(conn: Connection, now: int) -> int:
    return len(dispatch_claims.claim(conn, POLICY, names=["mail"], token="t", limit=LIMIT, now=now).claims)


def claimed_streams(conn: Connection, now: int) -> int:
    found = queues.claim(conn, stream_type="load", token="t", limit=LIMIT, batch=10, lease=30 * SECOND, now=now)
    return len(found.claims)


CHANGED = [
    pytest.param(due_mail, claimed_mail, "outbox WHERE status = 'delivering'", id="dispatches"),
    pytest.param(overdue_mail, partial(settle.expire, limit=LIMIT), "outbox WHERE status = 'expired'", id="expiries"),
    pytest.param(events, claimed_streams, "queues WHERE state = 'claimed'", id="streams"),
    pytest.param(
        armed,
        lambda conn, now: timers.fire(conn, limit=LIMIT, now=now).count,
        "timers WHERE status = 'fired'",
        id="timers",
    ),
]


@pytest.mark.parametrize(("fill", "take", "taken"), CHANGED)
@pytest.mark.parametrize("analysed", ["never", "when it was empty"])
def test_no_plan_makes_a_claim_take_more_than_its_limit(
    database: Database, analysed: str, fill: Callable[..., None], take: Callable[..., int], taken: str
) -> None:
    """Nested loops over tables of unknown size: as many rows change as the limit says, and all of them are returned."""
    if not database.is_sqlite and analysed == "when it was empty":
        with database.engine.begin() as conn:
            conn.exec_driver_sql("ANALYZE")
    database.transact(fill)

    def with_nested_loops(conn: Connection, *, now: int) -> int:
        for knob in () if database.is_sqlite else KNOBS:
            conn.execute(text(f"SET LOCAL {knob} = off"))
        return take(conn, now=now)

    for rounds in (1, 2):
        assert database.transact(with_nested_loops) == LIMIT
        assert database.read(lambda conn: Statement(f"SELECT count(*) FROM {{p}}{taken}")(conn).scalar_one()) == (
            LIMIT * rounds
        )


@pytest.fixture
def crowd(open_app: Apps) -> Iterator[Callable[[Callable[[Dispatch[Any]], None]], list[Postroad]]]:
    """Several apps that send the same kind, all started before anything is done."""
    with ExitStack() as stack:

        def start(send: Callable[[Dispatch[Any]], None], count: int = 5) -> list[Postroad]:
            posts = [open_app() for _ in range(count)]
            for post in posts:
                post.sender("sms", concurrency=4)(send)
            posts[0].check_schema()
            for post in posts:
                stack.enter_context(post.running())
            return posts

        yield start


def test_dispatchers_that_start_at_once_share_the_work(crowd: Any) -> None:
    """Five dispatchers and two hundred rows: two hundred sends with two hundred keys, and nobody does it all."""
    sent: list[tuple[str, Postroad]] = []
    posts = crowd(lambda d: sent.append((d.key, d.post)))
    with posts[0].begin() as tx:
        for n in range(200):
            tx.send("sms", {}, key=f"m{n}")
    until(lambda: posts[0].database.read(moments.waiting) == 0)
    assert sorted(key for key, _ in sent) == sorted(f"m{n}" for n in range(200))
    assert len({id(post) for _, post in sent}) > 1


def test_what_was_withdrawn_is_never_sent(crowd: Any) -> None:
    """Beside four dispatchers each of 200 rows is withdrawn: where that succeeds no send ever begins."""
    sent: list[str] = []
    posts = crowd(lambda d: sent.append(d.key), 4)
    withdrawn: set[str] = set()
    for n in range(0, 200, 4):
        keys = [f"m{n + m}" for m in range(4)]
        with posts[0].begin() as tx:
            for key in keys:
                tx.send("sms", {}, key=key)
        for key in keys:
            with posts[1].begin() as tx:
                answer = tx.withdraw(key)
            withdrawn |= {key} if answer.done else set()
    until(lambda: posts[0].database.read(moments.waiting) == 0)
    assert Counter(sent) == Counter({f"m{n}" for n in range(200)} - withdrawn)
    for key in withdrawn:
        row = posts[0].dispatches.get(key)
        assert row is not None
        assert (row.status, row.reason, row.attempt) == ("expired", "dispatch.expired.withdrawn", 0)


def test_apps_that_make_the_tables_at_once_all_start(tmp_path: Path, postgres_url: str, fresh_schema: str) -> None:
    """Five apps whose first use is on one empty database at the same moment: one makes the tables, all go on."""
    for url, schema in ((f"sqlite:///{tmp_path / 'first.db'}", None), (postgres_url, fresh_schema)):
        posts = [Postroad(url, schema=schema, migrate=True) for _ in range(5)]
        ready = threading.Barrier(len(posts))
        failures: list[BaseException] = []

        def begin(
            post: Postroad, number: int, ready: threading.Barrier = ready, failures: list[BaseException] = failures
        ) -> None:
            post.recorded("chat")
            ready.wait()
            try:
                with post.begin() as tx:
                    tx.publish("chat/1", Kind("note", dict[str, int]), {"n": number}, key=f"k{number}")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=begin, args=(post, n)) for n, post in enumerate(posts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert posts[0].database.read(moments.waiting) == 5
        for post in posts:
            post.close()
