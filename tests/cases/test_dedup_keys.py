"""Keys: one row for each, whoever asks at the same time, in whatever state it is, and never an id of nothing."""

import threading
from collections.abc import Callable

import pytest
from sqlalchemy import Connection, text

from postroad import OUTCOME, Dispatch, GiveUp, KeyConflict, Kind, Postroad, Retry, Turn
from postroad.model.dispatches import Accepted
from postroad.store import moments, moves, purging
from postroad.testing.contracts.dispatches import Waiting, in_threads
from tests.engine.conftest import Open

Apps = Callable[[], Postroad]
SMS: Kind[dict[str, int]] = Kind("sms", dict[str, int])
NOTE = Kind("note", dict[str, int])
USERS = 20


@pytest.mark.parametrize("commits", [True, False])
def test_a_key_of_a_transaction_that_rolls_back_is_not_answered(open_app: Apps, commits: bool) -> None:
    """Who asks for a key that an open transaction holds gets that one's id if it commits, else a row of its own."""
    one, two = open_app(), open_app()
    for post in (one, two):
        post.kinds(SMS)
        post.check_schema()
    with one.database.engine.connect() as conn, conn.begin() as theirs:
        with one.join(conn) as tx:
            first, event = tx.send(SMS, {"n": 1}, key="k"), tx.publish("chat/1", NOTE, {"n": 1}, key="e")

        def ask() -> tuple[Accepted, Accepted]:
            with two.begin() as tx:
                return tx.send(SMS, {"n": 1}, key="k"), tx.publish("chat/1", NOTE, {"n": 1}, key="e")

        second = Waiting(two.database, ask)
        second.blocked()
        theirs.commit() if commits else theirs.rollback()
    sent, published = second.result()
    assert (sent.created, published.created) == (not commits, not commits)
    assert (sent.id == first.id) is commits
    assert published.position is not None
    assert not commits or published.position == event.position
    row = two.dispatches.get("k")
    assert row is not None
    assert row.id == sent.id


def test_transactions_that_lose_a_race_for_a_key_stay_usable(open_app: Apps) -> None:
    """Twenty ask for one key at once, half of them in transactions with rows of their own: one id, all rows kept."""
    post = open_app()
    post.kinds(SMS)
    post.check_schema()
    engine = post.database.engine
    schema = post.database.schema
    table = f'"{schema}".visits' if schema else "visits"
    with engine.begin() as conn:
        conn.exec_driver_sql(f"CREATE TABLE {table} (n INTEGER PRIMARY KEY)")
    ready = threading.Barrier(USERS)

    def join(number: int) -> Accepted:
        ready.wait()
        with engine.begin() as conn:
            conn.execute(text(f"INSERT INTO {table} VALUES (:n)"), {"n": number})
            with post.join(conn) as tx:
                accepted = tx.send(SMS, {"n": 1}, key="k")
            conn.execute(text(f"INSERT INTO {table} VALUES (:n)"), {"n": number + USERS})
        return accepted

    def begin() -> Accepted:
        ready.wait()
        with post.begin() as tx:
            return tx.send(SMS, {"n": 1}, key="k")

    calls = [(lambda n=n: join(n)) if n % 2 else begin for n in range(USERS)]
    answers = in_threads(*calls)
    assert len({one.id for one in answers}) == 1
    assert sum(one.created for one in answers) == 1
    with engine.connect() as conn:
        assert conn.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one() == USERS
    assert post.database.read(moments.waiting) == 1


def test_another_body_under_a_taken_key_is_an_error_in_every_status(harness: Open) -> None:
    """Pending, delivering, delivered, dead or expired: a key's other content is refused, its own is the first one."""
    post = Postroad()
    seen: list[str] = []

    @post.sender(SMS, retry=Retry(attempts=1))
    def send(d: Dispatch[dict[str, int]]) -> None:
        check(post, d.key, seen)
        if d.key == "dead":
            raise GiveUp("no such number")

    h = harness(post, senders="run")
    for key in ("pending", "delivered", "dead", "expired"):
        with post.begin() as tx:
            tx.send(SMS, {"n": 1}, key=key, after=0 if key in ("delivered", "dead") else 60, expires=90)
        check(post, key, seen)
    h.drain()
    h.clock.advance(100)
    h.drain()
    for key in ("delivered", "dead", "expired"):
        check(post, key, seen)
    assert set(seen) == {"pending", "delivering", "delivered", "dead_letter", "expired"}


def test_another_body_under_a_purged_key_is_an_error(harness: Open) -> None:
    """Once its row is gone a key's own content is still the first one, with its id; other content is refused."""
    post = Postroad()
    post.sender(SMS)(lambda d: None)

    @post.turn("chat", attempts=1)
    def chat(t: Turn) -> None:
        t.send(SMS, {"n": 1}, key="k")

    h = harness(post)
    with post.begin() as tx:
        first = tx.send(SMS, {"n": 1}, key="k")
    h.drain()
    post.database.transact(lambda conn, *, now: purge(conn, first.id, now=now))
    assert post.dispatches.get("k") is None
    for given, keep in (({"n": 1}, "error"), ({"n": 1}, "keep"), ({"n": 2}, "keep")):
        with post.begin() as tx:
            again = tx.send(SMS, given, key="k", on_conflict=keep)
        assert (again.id, again.created) == (first.id, False)
    with pytest.raises(KeyConflict) as refused, post.begin() as tx:
        tx.send(SMS, {"n": 2}, key="k")
    assert refused.value.key == "k"
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1})
    h.drain()
    assert [e.kind for e in h.entries("chat/1")] == ["note", "postroad.failed"]
    assert len(h.sent(SMS)) == 1


def purge(conn: Connection, id: str, *, now: int) -> None:
    purging.purge(conn, list(moves.lock(conn, [id]).values()), history=False, now=now)


def check(post: Postroad, key: str, seen: list[str]) -> None:
    """A key that is there is answered by its first one, or refused."""
    row = post.dispatches.get(key)
    assert row is not None
    seen.append(row.status)
    with post.begin() as tx:
        again = tx.send(SMS, {"n": 1}, key=key, expires=3_600)
    assert (again.id, again.created) == (row.id, False)
    with pytest.raises(KeyConflict) as refused, post.begin() as tx:
        tx.send(SMS, {"n": 2}, key=key)
    assert refused.value.key == key


def test_another_event_under_a_taken_key_is_an_error_in_every_state(harness: Open) -> None:
    """Waiting, claimed, landed or dead: an event's other content is refused, its own is answered as the first one."""
    post = Postroad()
    states: list[str] = []

    @post.turn("chat", attempts=1)
    def chat(t: Turn) -> None:
        ask(t.events[0].key, "claimed")
        if t.events[0].key == "bad":
            raise GiveUp("cannot be read")

    def ask(key: str, state: str) -> None:
        states.append(state)
        with post.begin() as tx:
            again = tx.publish("chat/1", NOTE, {"n": 1}, key=key)
        assert (again.id, again.created) == (key, False)
        with pytest.raises(KeyConflict), post.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": 2}, key=key)

    h = harness(post)
    for key in ("good", "bad"):
        with post.begin() as tx:
            tx.publish("chat/1", NOTE, {"n": 1}, key=key)
        ask(key, "waiting")
        h.drain()
        ask(key, "landed" if key == "good" else "dead")
    assert set(states) == {"waiting", "claimed", "landed", "dead"}
    assert [e.key for e in h.entries("chat/1") if e.kind == "note"] == ["good"]


def test_a_key_that_is_sent_again_while_it_is_delivered_is_not_lost(harness: Open) -> None:
    """Enqueued again during its own delivery, a key answers with the existing dispatch: one row, one send, settled."""
    post = Postroad()
    sent: list[str] = []
    again: list[Accepted] = []

    @post.sender(SMS)
    def send(d: Dispatch[dict[str, int]]) -> None:
        sent.append(d.id)
        if not again:
            with post.begin() as tx:
                again.extend([tx.send(SMS, {"n": 1}, key="k"), tx.send(SMS, {"n": 1})])

    h = harness(post, senders="run")
    with post.begin() as tx:
        first = tx.send(SMS, {"n": 1}, key="k")
    h.drain()
    assert (again[0].id, again[0].created) == (first.id, False)
    assert again[1].created, "without a key every send is a dispatch of its own"
    assert sent == [first.id, again[1].id]
    assert {row.status for row in post.dispatches.list()} == {"delivered"}


def test_an_event_that_is_published_again_during_its_turn_is_decided_once(harness: Open) -> None:
    """Published again by its own turn and beside it, an event lands once; a new key is another event."""
    post = Postroad()
    decided: list[str] = []

    @post.turn("chat")
    def chat(t: Turn) -> None:
        decided.extend(e.key for e in t.events)
        if "k" in decided and len(decided) == 1:
            with post.begin() as tx:
                tx.publish("chat/1", NOTE, {"n": 1}, key="k")
            t.publish("chat/1", NOTE, {"n": 1}, key="k")
            t.publish("chat/1", NOTE, {"n": 1}, key="next")

    post.filter("chat", OUTCOME)(lambda e: "sent")
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="k")
    h.drain()
    assert decided == ["k", "next"]
    assert [e.key for e in h.entries("chat/1")] == ["k", "next"]
