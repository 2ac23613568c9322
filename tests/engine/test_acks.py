"""Acknowledgements as programs ask for them and give them; the contract suites have the rest."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from sqlalchemy import create_engine

from postroad import (
    OUTCOME,
    AckNotRequested,
    AckRefused,
    BadAckToken,
    Dispatch,
    DispatchNotFound,
    Event,
    Kind,
    Postroad,
    Refused,
    Retry,
    Turn,
)
from postroad.model.events import FAILED
from postroad.model.failpoints import arm
from postroad.store import alerts, dialects, migrations
from postroad.surfaces import dispatch_reading
from postroad.testing.simulation.history import TABLES
from tests.engine.conftest import Open

SECRET = "a secret of the server's own"
MAIL = Kind("mail", dict[str, str])
TOKEN = Kind("token", str)
STEADY = Retry(attempts=3, first=60, cap=1000, jitter=False)


def app(seen: list[Dispatch[Any]] | None = None, **how: Any) -> Postroad:
    """An app whose sender records its dispatches, and whose streams ask for mail and take tokens."""
    post = Postroad(**{"secret_key": SECRET, **how})

    @post.sender(MAIL, retry=STEADY)
    def mail(d: Dispatch[dict[str, str]]) -> None:
        if seen is not None:
            seen.append(d)

    @post.turn("chat")
    def decide(turn: Turn) -> None:
        for event in turn.events:
            if event.kind == "ask":
                turn.send(MAIL, {}, key=event.key, ack=True)
            elif event.kind == TOKEN.name:
                turn.ack(event.data)

    return post


def send(post: Postroad, key: str = "k", **more: Any) -> str:
    """Send a mail that asks for an acknowledgement; the token that its consumer will get."""
    with post.begin() as tx:
        accepted = tx.send(MAIL, {"a": "b"}, to="x", key=key, **{"ack": True, **more})
    return post.keyring.token(accepted.id, 0)


def ack(post: Postroad, *tokens: str) -> None:
    with post.begin() as tx:
        for token in tokens:
            tx.ack(token)


def status(post: Postroad, key: str = "k") -> tuple[str, str]:
    row = post.dispatches.get(key)
    assert row is not None
    return row.status, row.reason.rsplit(".", 1)[1]


def test_an_ack_is_asked_for_with_a_key_only(harness: Open) -> None:
    """Without a secret_key asking for an ack, and giving one, is refused at the verb, with where a key goes."""
    post = app(secret_key=None)
    harness(post)
    with pytest.raises(Refused, match="POSTROAD_SECRET_KEY") as refusal:
        with post.begin() as tx:
            tx.send(MAIL, {}, ack=True)
    assert refusal.value.about == {"field": "secret_key"}
    with post.begin() as tx:
        with pytest.raises(Refused, match="secret_key"):
            tx.ack("x")
        tx.send(MAIL, {}, key="k")
    assert status(post) == ("pending", "enqueued")


def test_the_sender_gets_the_token(harness: Open) -> None:
    """Each attempt carries the same token, of the next epoch another one; what asks for no ack carries none."""
    seen: list[Dispatch[Any]] = []
    post = app(seen)
    h = harness(post, senders="run")
    token = send(post)
    send(post, "plain", ack=False)
    h.advance(1000)
    tokens = [d.ack_token for d in seen if d.key == "k"]
    assert tokens == [token] * 3
    assert [d.ack_token for d in seen if d.key == "plain"] == [None]
    assert status(post) == ("dead_letter", "ack_timeout")
    post.dispatches.retry("k", actor="ann")
    h.drain()
    assert seen[-1].ack_token == post.keyring.token(seen[-1].id, 1) != token
    assert seen[-1].ack_token is not None
    with pytest.raises(BadAckToken):
        ack(post, token)
    ack(post, seen[-1].ack_token)
    assert status(post) == ("acked", "consumer")


def test_a_process_without_the_key_sends_nothing_that_needs_it(harness: Open) -> None:
    """A dispatcher that has no secret_key fails the attempt, with the cure as its error."""
    seen: list[Dispatch[Any]] = []
    post = app(seen)
    h = harness(post, senders="run")
    send(post)
    post._keyring = app(secret_key=None).keyring
    h.drain()
    row = post.dispatches.get("k")
    assert row is not None
    assert (seen, row.status) == ([], "pending")
    assert "secret_key" in (row.last_error or "")


def test_resends_are_bounded_in_time_and_number(harness: Open) -> None:
    """Whoever never acknowledges gets each resend after the whole delay, and no more of them than attempts."""
    post = app()
    h = harness(post)
    send(post)
    counts = [h.drain().delivered, h.advance(59).delivered, h.advance(1).delivered, h.advance(119).delivered]
    counts += [h.advance(1).delivered, h.advance(239).delivered]
    assert counts == [1, 0, 1, 0, 1, 0]
    assert status(post) == ("pending", "transport_ok")
    done = h.advance(1)
    assert (done.attempted, done.delivered, done.dead_letter) == (0, 0, 1)
    assert status(post) == ("dead_letter", "ack_timeout")
    assert len(h.sent(MAIL)) == 3


@pytest.mark.parametrize("seed", range(4))
def test_lost_acks(harness: Open, seed: int) -> None:
    """Consumers that lose some of their acks get what they did not acknowledge again, and nothing after their ack."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    post = app()
    h = harness(post)
    tokens = {key: send(post, key) for key in (f"k{n}" for n in range(20))}
    sends: Counter[str] = Counter()
    acked: set[str] = set()
    for _ in range(60):
        h.advance(10)
        for d in h.sent(MAIL)[sends.total() :]:
            sends[d.key] += 1
            assert d.key not in acked, "sent after its ack"
            if draw.random() < 0.3:  # else the ack is lost
                ack(post, tokens[d.key])
                acked.add(d.key)
    found = {row.key: row for row in post.dispatches.list()}
    assert {key for key, row in found.items() if row.status == "acked"} == acked
    assert all(found[key].reason.endswith("ack_timeout") and sends[key] == 3 for key in found.keys() - acked)
    assert all(row.attempt == sends[key] for key, row in found.items())
    assert 0 < len(acked) < len(tokens)


def test_an_ack_in_the_users_own_transaction(harness: Open) -> None:
    """In a joined transaction an ack is as durable as that transaction, and a refused one leaves it usable."""
    post = app()
    h = harness(post)
    token, other = send(post), send(post, "other")
    database = h._opened().database
    for ends in ("rollback", "commit"):
        with database.engine.connect() as conn, conn.begin() as transaction:
            with post.join(conn) as tx:
                tx.ack(token)
            with pytest.raises(DispatchNotFound):
                with post.join(conn) as tx:
                    tx.ack(other)
                    tx.ack(post.keyring.token("0" * 32, 0))
            getattr(transaction, ends)()
        expected = "acked" if ends == "commit" else "pending"
        assert (status(post)[0], status(post, "other")[0]) == (expected, "pending")


async def test_an_ack_from_async_code(harness: Open) -> None:
    """An ack in an async block, and the same one again."""
    post = app()
    harness(post)
    token = send(post)
    for _ in range(2):
        async with post.begin() as tx:
            tx.ack(token)
    assert status(post) == ("acked", "consumer")


def test_what_acknowledges_nothing_takes_its_block_along(harness: Open) -> None:
    """A refused ack is raised when the block is left, and nothing else of it is written; no token is shown."""
    post = app()
    h = harness(post)
    token, plain = send(post), send(post, "plain", ack=False)
    withdrawn = send(post, "withdrawn")
    with post.begin() as tx:
        tx.withdraw("withdrawn")
    forged = token[:-1] + ("A" if token[-1] != "A" else "B")
    nobody = post.keyring.token("0" * 32, 0)
    wrongs = {plain: AckNotRequested, withdrawn: AckRefused, forged: BadAckToken, nobody: DispatchNotFound}
    for wrong, expected in wrongs.items():
        with pytest.raises(expected) as refusal:
            with post.begin() as tx:
                tx.ack(wrong)
                tx.ack(token)
                tx.send(MAIL, {}, key="beside")
        assert wrong.rpartition(".")[2] not in f"{refusal.value!r} {refusal.value} {refusal.value.about}"
    assert post.dispatches.get("beside") is None
    assert status(post)[0] == "pending"
    with post.begin() as tx:
        with pytest.raises(BadAckToken):
            tx.ack("not a token")
        tx.ack(token)
    assert h.drain().attempted == 1  # the plain one


def test_an_ack_comes_before_a_withdrawal(harness: Open) -> None:
    """A transaction that both acknowledges and withdraws a dispatch has acknowledged it: it had arrived."""
    post = app()
    harness(post)
    token = send(post)
    with post.begin() as tx:
        gone = tx.withdraw("k")
        tx.ack(token)
    assert (gone.done, status(post)) == (False, ("acked", "consumer"))


def test_the_stream_is_told_acked_and_not_delivered(harness: Open) -> None:
    """A turn's dispatch tells its stream once, that it was acked; its sends are no outcomes."""
    told: list[Event] = []
    post = Postroad(secret_key=SECRET)

    @post.turn("chat")
    def decide(turn: Turn) -> None:
        for event in turn.events:
            if event.kind == "ask":
                turn.send(MAIL, {}, key="k", ack=True)
            else:
                told.append(event)

    post.sender(MAIL, retry=STEADY)(lambda d: None)
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", "ask", {})
    h.advance(60)
    (first, _) = h.sent(MAIL)
    assert told == []
    ack(post, post.keyring.token(first.id, 0))
    h.advance(1000)
    (event,) = told
    assert event.key == "out:k:acked"
    assert (event.data["status"], event.data["reason"]) == ("acked", "dispatch.acked.consumer")


def test_a_turn_acknowledges(harness: Open) -> None:
    """A turn that was handed a token acknowledges in its own commit."""
    post = app()
    h = harness(post)
    token = send(post)
    with post.begin() as tx:
        tx.publish("chat/1", TOKEN, token)
    h.drain()
    assert status(post) == ("acked", "consumer")


def tokens(post: Postroad) -> dict[str, str]:
    """A good token, and one for each way in which an acknowledgement is refused."""
    good, ended, plain = send(post, "good"), send(post, "ended"), send(post, "plain", ack=False)
    with post.begin() as tx:
        tx.withdraw("ended")
    forged = good[:-1] + ("A" if good[-1] != "A" else "B")
    nobody = post.keyring.token("0" * 32, 0)
    return {"good": good, "ended": ended, "plain": plain, "forged": forged, "nobody": nobody, "no token": "x"}


def desk(post: Postroad) -> list[list[str]]:
    """A stream type that acknowledges what it is told to, and decides more beside that; the sets it was called with."""
    called: list[list[str]] = []
    post.filter("desk", OUTCOME)(lambda event: "sent")

    @post.turn("desk")
    def take(turn: Turn) -> None:
        called.append([event.key for event in turn.events])
        for event in turn.events:
            turn.record("taken", {"key": event.key})
            turn.send(MAIL, {}, key=f"thanks/{event.key}")
            if event.kind == TOKEN.name:
                turn.ack(event.data)

    return called


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("ended", "AckRefused"), ("plain", "AckNotRequested"), ("forged", "BadAckToken"), ("nobody", "DispatchNotFound"),
     ("no token", "BadAckToken")],
)  # fmt: skip
def test_a_refused_ack_of_a_turn_is_final(harness: Open, wrong: str, said: str) -> None:
    """It would be refused again: the handler is called once, its event dies visibly, and the stream moves on."""
    post = app()
    called = desk(post)
    h = harness(post)
    given = tokens(post)
    h.advance(1)
    with post.begin() as tx:
        tx.publish("desk/1", TOKEN, given[wrong], key="wrong")
    h.drain()
    with post.begin() as tx:
        tx.publish("desk/1", TOKEN, given["good"], key="next")
    h.drain()
    assert called == [["wrong"], ["next"]]
    (failed,) = [entry.data for entry in h.entries("desk/1") if entry.kind == FAILED]
    assert (failed["events"], failed["reason"]) == (["wrong"], "turn.dead.permanent")
    assert failed["error"].startswith(said)
    assert given[wrong].rpartition(".")[2] not in failed["error"] or wrong == "no token"
    assert [alert.code for alert in post.database.read(alerts.list_)] == ["turn.dead"]
    assert [entry.data["key"] for entry in h.entries("desk/1") if entry.kind == "taken"] == ["next"]
    assert post.dispatches.get("thanks/wrong") is None
    assert status(post, "good") == ("acked", "consumer")


def test_a_refused_ack_takes_no_neighbours_along(harness: Open) -> None:
    """Of a set the events beside it are decided without it, their own acknowledgements too."""
    post = app()
    called = desk(post)
    h = harness(post)
    given = tokens(post)
    h.advance(1)
    with post.begin() as tx:
        tx.publish("desk/1", "note", {}, key="a")
        tx.publish("desk/1", TOKEN, given["ended"], key="wrong")
        tx.publish("desk/1", TOKEN, given["good"], key="b")
    h.drain()
    assert called == [["a", "wrong", "b"], ["a"], ["wrong"], ["b"]]
    assert [entry.data["key"] for entry in h.entries("desk/1") if entry.kind == "taken"] == ["a", "b"]
    assert [entry.data["events"] for entry in h.entries("desk/1") if entry.kind == FAILED] == [["wrong"]]
    assert status(post, "good") == ("acked", "consumer")


@pytest.mark.parametrize("looks", [True, False])
def test_what_ends_while_a_turn_acknowledges_it(harness: Open, looks: bool) -> None:
    """A turn that decided on what was so no longer decides again; one that insists is then refused for good."""
    post = app()
    token = ""
    seen: list[str] = []

    @post.turn("desk", attempts=100)
    def take(turn: Turn) -> None:
        seen.append(status(post)[0])
        if looks and seen[-1] != "pending":
            turn.record("too late", {})
            return
        with post.begin() as tx:  # somebody else, meanwhile
            tx.withdraw("k")
        turn.ack(token)

    h = harness(post)
    token = send(post, after=7200)
    with post.begin() as tx:
        tx.publish("desk/1", "go", {})
    h.advance(600)
    assert seen[:2] == ["pending", "expired"]
    if looks:
        assert len(seen) == 2
        assert [entry.kind for entry in h.entries("desk/1")] == ["go", "too late"]
        assert post.database.read(alerts.list_) == []
    else:
        assert len(seen) < 10  # one, and those in the second in which it ended
        assert [entry.data["reason"] for entry in h.entries("desk/1")] == ["turn.dead.permanent"]


def test_a_wrong_ack_hurts_nobody_elses(postgres_url: str, fresh_schema: str) -> None:
    """Of blocks that are written together, those whose acks are refused hear of it, and the others are acked."""
    post = app(database=postgres_url, schema=fresh_schema, migrate=True)
    tokens = [send(post, f"k{n}") for n in range(30)]
    wrong = {3, 4, 20}
    reached: Counter[str] = Counter()

    async def one(number: int) -> object:
        async with post.begin() as tx:
            tx.ack(tokens[number] if number not in wrong else tokens[number][:-2] + "__")
        return "acked"

    async def all_at_once() -> list[object]:
        return await asyncio.gather(*map(one, range(30)), return_exceptions=True)

    arm(lambda name: reached.update([name]))
    try:
        answers = asyncio.run(all_at_once())
    finally:
        arm(None)
    assert reached["group.member"] > 3, "they were not written together"
    assert {n for n, answer in enumerate(answers) if isinstance(answer, BadAckToken)} == wrong
    assert {n for n in range(30) if status(post, f"k{n}")[0] == "acked"} == set(range(30)) - wrong
    post.close()


def test_an_ack_wakes_the_loops(sqlite_path: Any) -> None:
    """An ack wakes who has work now: the worker for its outcome, the dispatcher for the next one of a lane."""
    post = app(database=f"sqlite:///{sqlite_path}")
    token = send(post)
    woken: list[str] = []
    for topic in ("turns", "sends", "timers"):
        post._wakeups.subscribe((topic,), partial(woken.append, topic))
    ack(post, token)
    assert sorted(woken) == ["sends", "turns"]
    post.close()


def test_an_ack_on_a_users_engine(sqlite_path: Any) -> None:
    """With the application's own engine an ack is written as with ours."""
    engine = create_engine(f"sqlite:///{sqlite_path}")
    dialects.configure_sqlite(engine)
    post = app(database=engine)
    token = send(post)
    ack(post, token)
    assert status(post) == ("acked", "consumer")
    post.close()
    engine.dispose()


def test_no_token_is_ever_shown(harness: Open, caplog: pytest.LogCaptureFixture) -> None:
    """A token is in no log, no observation, no error, no table and nothing that operators are shown."""
    caplog.set_level(logging.DEBUG)
    seen: list[Dispatch[Any]] = []
    observed: list[str] = []
    post = app(seen)

    def watch(name: str, values: Mapping[str, Any]) -> None:
        observed.append(f"{name} {dict(values)!r}")

    post.observe(watch)
    h = harness(post, senders="run")
    h.fail(MAIL, ValueError("the first one fails"))
    for key in ("acked", "dead"):
        send(post, key)
    with post.begin() as tx:
        tx.publish("chat/1", "ask", {}, key="asked")
    h.advance(60)
    given = {d.key: d.ack_token for d in seen}
    assert None not in given.values()
    assert len(given) == 3
    ack(post, str(given["acked"]))
    h.advance(1000)
    with pytest.raises(AckRefused) as refusal:
        ack(post, str(given["dead"]))
    database = h._opened().database
    shown = [repr(seen), repr(observed), repr(refusal.value), caplog.text, repr(refusal.value.about)]
    with database.engine.connect() as conn:
        prefix = f'"{database.schema}".' if database.schema else ""
        shown += [repr(conn.exec_driver_sql(f"SELECT * FROM {prefix}postroad_{table}").all()) for table in TABLES]
    for key in given:
        view = database.read(dispatch_reading.dispatch, key, whole=True, known=None, now=0)
        shown.append(repr(view.plain()))
    secrets = [SECRET, *(str(token).rpartition(".")[2] for token in given.values())]
    assert [secret for secret in secrets if any(secret in text for text in shown)] == []
    assert "dispatch.sending" in repr(observed)
    assert database.read(migrations.current) > 0
