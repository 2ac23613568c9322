"""Nothing goes out twice without a cause that is recorded, and what may be a repeat says so."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from postroad import Dispatch, Kind, Postroad, Refused, Retry, RetryLater, Turn
from postroad.engine import run
from postroad.model import failpoints
from postroad.model.clock import SECOND
from postroad.store.database import Database
from postroad.testing import Harness
from tests.cases.apps import OpenApp, idle, until
from tests.engine.conftest import Open

MAIL = Kind("mail", dict[str, str])
NOTE = Kind("note", dict[str, int])


class Died(BaseException):
    """The process ended here."""


@pytest.fixture
def dying_at() -> Iterator[Callable[[str], None]]:
    """Arms a failpoint that ends, once, whatever reaches it."""

    def arm(name: str) -> None:
        def reached(place: str) -> None:
            if place == name:
                failpoints.arm(None)
                raise Died(name)

        failpoints.arm(reached)

    yield arm
    failpoints.arm(None)


def row(post: Postroad, key: str = "k") -> Any:
    found = post.dispatches.get(key)
    assert found is not None
    return found


def send(post: Postroad, *keys: str) -> None:
    with post.begin() as tx:
        for key in keys:
            tx.send(MAIL, {"a": "b"}, key=key)


def test_a_crash_between_the_send_and_its_record_marks_the_next_one(
    harness: Open, dying_at: Callable[[str], None]
) -> None:
    """The same key and bytes go out again as attempt 2, marked as a possible repeat; the history names the first."""
    post = Postroad()
    post.sender(MAIL, lease=15)(lambda d: None)
    h = harness(post)
    send(post, "k")
    dying_at("dispatch.after_send")
    h.drain()
    assert row(post).status == "delivering"
    h.advance(15)
    first, second = h.sent(MAIL)
    assert (first.key, first.body) == (second.key, second.body) == ("k", {"a": "b"})
    assert [(d.attempt, d.possible_duplicate) for d in (first, second)] == [(1, False), (2, True)]
    assert row(post).status == "delivered"
    assert "the lease of attempt 1 was lost" in [one["summary"] for one in row(post).history][2]


def test_what_is_sent_at_once_is_not_found_again_by_the_scan(open_app: OpenApp) -> None:
    """500 rows that come while two processes look every few milliseconds are sent once each."""
    sent: list[str] = []

    one, two = open_app(), open_app()
    for post in (one, two):
        post.sender(MAIL)(lambda d: sent.append(d.key))
    with Polling(one), Polling(two):
        for n in range(50):
            send(one, *(f"k{10 * n + m}" for m in range(10)))
        until(lambda: idle(one))
    assert Counter(sent) == Counter(f"k{n}" for n in range(500))


class Polling:
    """An app's loops in a thread, looking every 20 ms."""

    def __init__(self, post: Postroad) -> None:
        self._loops = post.running()
        self._loops._build = lambda: post.runtime(poll=SECOND // 50)

    def __enter__(self) -> None:
        self._loops.__enter__()

    def __exit__(self, *error: object) -> None:
        self._loops.__exit__(*error)


class Refusing:
    """A database in which dispatches, or those with a key, cannot be settled as delivered: a trigger refuses it."""

    def __init__(self, database: Database, key: str | None = None) -> None:
        self._database = database
        prefix = f'"{database.schema}".' if database.schema else ""
        only = "" if key is None else f" AND NEW.key = '{key}'"
        when = f"WHEN (NEW.status = 'delivered'{only})"
        on = f"BEFORE UPDATE ON {prefix}postroad_outbox"
        if database.is_sqlite:
            self._run(f"CREATE TRIGGER refusing {on} {when} BEGIN SELECT RAISE(ABORT, 'read-only'); END")
            self._undo = "DROP TRIGGER refusing"
            return
        self._run(
            f"CREATE FUNCTION {prefix}refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN RAISE EXCEPTION 'read-only'; END$$"
        )
        self._run(f"CREATE TRIGGER refusing {on} FOR EACH ROW {when} EXECUTE FUNCTION {prefix}refuse()")
        self._undo = f"DROP TRIGGER refusing ON {prefix}postroad_outbox"

    def _run(self, statement: str) -> None:
        with self._database.engine.begin() as conn:
            conn.exec_driver_sql(statement)

    def end(self) -> None:
        """Settling is possible again."""
        self._run(self._undo)


def test_while_settling_is_impossible_nothing_is_sent_again_and_nothing_new(harness: Open) -> None:
    """What was sent waits to be settled, with growing pauses; no other row goes out, and in the end each once."""
    post = Postroad()
    post.sender(MAIL, timeout=1, lease=6, concurrency=1)(lambda d: None)
    h = harness(post)
    refusing = Refusing(post.database)
    send(post, "k1", "k2")
    for _ in range(5):
        with pytest.raises(DBAPIError):
            h.drain()
        h.clock.advance(1)
    assert [d.key for d in h.sent(MAIL)] == ["k1"]
    refusing.end()
    h.drain()
    assert [(d.key, d.attempt) for d in h.sent(MAIL)] == [("k1", 1), ("k2", 1)]
    assert row(post, "k1").status == row(post, "k2").status == "delivered"


def test_a_row_that_cannot_be_settled_is_sent_no_more_often_than_allowed(harness: Open) -> None:
    """Lost settlements count as attempts, a lease apart; then the row is dead and says that its leases were lost."""
    post = Postroad()
    post.sender(MAIL, timeout=1, lease=6, retry=Retry(attempts=3))(lambda d: None)
    h = harness(post)
    Refusing(post.database)
    send(post, "k")
    live_through(h, 60)
    assert [d.attempt for d in h.sent(MAIL)] == [1, 2, 3]
    assert (row(post).status, row(post).reason) == ("dead_letter", "dispatch.dead_letter.lease_lost")


def live_through(h: Harness, seconds: int) -> None:
    """Let time pass; what a loop would report and back off from is passed over."""
    for _ in range(seconds):
        with contextlib.suppress(DBAPIError):
            h.drain()
        h.clock.advance(1)


def test_one_result_that_cannot_be_settled_holds_up_no_other(harness: Open) -> None:
    """Of a group the sound ones are settled, and the broken one alone goes its way to a dead letter."""
    post = Postroad()
    post.sender(MAIL, timeout=1, lease=6, retry=Retry(attempts=2))(lambda d: None)
    h = harness(post)
    Refusing(post.database, key="bad")
    send(post, "bad", *(f"k{n}" for n in range(5)))
    h.advance(1)
    assert {row(post, f"k{n}").status for n in range(5)} == {"delivered"}
    assert row(post, "bad").status == "delivering"
    send(post, "later")
    live_through(h, 30)
    assert row(post, "later").status == "delivered"
    assert (row(post, "bad").status, row(post, "bad").attempt) == ("dead_letter", 2)
    assert Counter(d.key for d in h.sent(MAIL)) == {"bad": 2, "later": 1, **{f"k{n}": 1 for n in range(5)}}


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_id_is_an_id_like_any_other(harness: Open, empty: str) -> None:
    """Refused at every verb; a row that got one all the same is tried in place and dies at its cap, forking nothing."""
    post = Postroad()

    @post.turn("chat", attempts=2)
    def chat(t: Turn) -> None:
        raise RetryLater("busy")

    post.sender(MAIL, timeout=1, lease=6, retry=Retry(attempts=3, first=1, jitter=False))(lambda d: None)
    h = harness(post)
    with post.begin() as tx:
        for call in (
            lambda: tx.send(MAIL, {}, key=empty),
            lambda: tx.publish("chat/1", NOTE, {"n": 1}, key=empty),
            lambda: tx.publish(f"chat/{empty}", NOTE, {"n": 1}),
            lambda: tx.publish(empty, NOTE, {"n": 1}),
            lambda: tx.set_timer(empty, after=1, stream="chat/1"),
            lambda: tx.withdraw(empty),
        ):
            with pytest.raises(Refused):
                call()
    send(post, "k")
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="e")

    def plant(conn: Connection, *, now: int) -> None:
        prefix = f'"{post.database.schema}".' if post.database.schema else ""
        for table, columns in (("outbox", ("id", "key")), ("inbox", ("event_id",))):
            for column in columns:
                conn.exec_driver_sql(f"UPDATE {prefix}postroad_{table} SET {column} = '{empty}'")

    post.database.transact(plant)
    h.fail(MAIL, RetryLater("busy"), times=10)
    h.advance(5 * 30)
    (only,) = post.dispatches.list()
    assert (only.key, only.status, only.attempt) == (empty, "dead_letter", 3)
    (entry,) = h.entries("chat/1")
    assert (entry.kind, entry.data["events"]) == ("postroad.failed", [empty])


def test_what_a_timed_out_handler_still_does_is_refused(open_app: OpenApp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that ignores its deadline cannot add to the retry's decision, and is told so."""
    monkeypatch.setattr(run, "BACKOFF", Retry(attempts=1, first=0))
    post = open_app()
    over = threading.Event()
    told: list[Exception] = []
    release = threading.Event()

    @post.turn("chat", timeout=0.3)
    def chat(t: Turn) -> None:
        attempt = t.attempt
        if attempt == 1:
            release.wait(30)
            assert t.stopping
        for late in (lambda: t.record("by", {"n": attempt}), lambda: t.send("elsewhere", {}, key=f"a{attempt}")):
            try:
                late()
            except Refused as error:
                told.append(error)
        if attempt == 1:
            over.set()

    post.elsewhere("elsewhere")
    with post.running():
        with post.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": 1})
        until(lambda: len(post.read("chat/1")) == 2, "the retry decided")
        release.set()
        assert over.wait(30)
    assert [e.data["n"] for e in post.read("chat/1")] == [1, 2]
    assert [d.key for d in post.dispatches.list()] == ["a2"]
    assert ["over" in str(error) for error in told] == [True, True]


def test_verbs_after_the_block_are_refused(harness: Open) -> None:
    """What nobody would write any more is an error, not a loss."""
    post = Postroad()
    post.sender(MAIL)(lambda d: None)
    harness(post)
    with post.begin() as tx:
        pass
    with pytest.raises(Refused, match="over"):
        tx.send(MAIL, {}, key="late")
    assert post.dispatches.list() == []


def test_each_transport_settles_in_the_store_that_its_rows_came_from(harness: Open) -> None:
    """Rows of a second transport are sent once and settled as those of the first would be."""
    post = Postroad()
    fax = Kind("fax", dict[str, str])
    sent: list[tuple[str, str]] = []

    class Wire:
        def __init__(self, name: str) -> None:
            self.name = name

        async def send(self, d: Dispatch[Any]) -> str:
            sent.append((self.name, d.key))
            return "ref"

    post.transport(MAIL, Wire("first"))
    post.transport(fax, Wire("second"))
    h = harness(post, senders="run")
    with post.begin() as tx:
        for n in range(10):
            tx.send(fax, {}, key=f"f{n}")
    h.advance(3600)
    assert Counter(sent) == Counter({("second", f"f{n}"): 1 for n in range(10)})
    assert {(r.kind, r.status) for r in post.dispatches.list()} == {("fax", "delivered")}
