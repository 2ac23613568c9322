"""Deleting streams from code, and looking at them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event as hooks

from postroad import (
    OUTCOME,
    TIMER_FIRED,
    Dispatch,
    GiveUp,
    InvalidInput,
    Kind,
    Postroad,
    Refused,
    RetryLater,
    StreamDeleted,
    Turn,
)
from postroad.store import audit
from tests.engine.conftest import Open

MESSAGE = Kind("message", dict[str, str])
MAIL = Kind("mail", dict[str, str])
CHAT = "chat/42"


def app(decide: Callable[[Turn], object] | None = None, seen: list[str] | None = None) -> Postroad:
    """An app that answers each message, and whose mail to nobody bounces."""
    post = Postroad()

    @post.sender(MAIL)
    def mail(d: Dispatch[dict[str, str]]) -> None:
        if d.to == "nobody":
            raise GiveUp("no such mailbox")

    @post.turn("chat", attempts=2)
    def chat(turn: Turn) -> None:
        if seen is not None:
            seen.extend(event.key for event in turn.events)
        if decide is not None:
            decide(turn)
        for event in turn.events:
            if MESSAGE.of(event) is not None:
                turn.record("reply", {"to": event.key})
                turn.send(MAIL, {}, to=event.data.get("mail", "ann"), key=f"{turn.subject}/{event.key}")
                turn.set_timer(f"{event.key}/still there?", after=3600)
            elif OUTCOME.of(event) is not None or TIMER_FIRED.of(event) is not None:
                turn.record("heard", {"of": event.key})

    return post


def say(post: Postroad, key: str, stream: str = CHAT, **data: str) -> None:
    """A message of a client; the same key again is a client that tries again."""
    with post.begin() as tx:
        tx.publish(stream, MESSAGE, data, key=key)


def delete(post: Postroad, stream: str = CHAT) -> None:
    """Delete a conversation as an app does."""
    with post.begin() as tx:
        tx.delete_stream(stream)


def kinds(post: Postroad, stream: str = CHAT) -> list[str]:
    """The kinds of a stream's entries."""
    return [entry.kind for entry in post.read(stream)]


def test_a_conversation_deleted_in_the_middle_of_a_turn(harness: Open) -> None:
    """The result is discarded: no reply, no mail, no timer, and nothing is tried again; its neighbour goes on."""
    seen: list[str] = []
    post = app(lambda turn: delete(turn.post, turn.stream) if turn.stream == CHAT else None, seen)
    h = harness(post)
    say(post, "m1")
    say(post, "n1", "chat/43")
    h.advance(7200)
    assert (seen.count("m1"), kinds(post), [d.key for d in h.sent(MAIL)]) == (1, [], ["43/n1"])
    assert kinds(post, "chat/43")[:2] == ["message", "reply"]
    row = post.streams.get(CHAT)
    assert row is not None
    assert (row.state, row.version, row.dead, row.waiting) == ("idle", 0, 0, ())
    assert row.deleted_at is not None


def test_what_comes_afterwards_re_creates_nothing(harness: Open) -> None:
    """Outcomes of what it sent, its timers, late messages and retries of early ones all leave it as it was."""
    post = app()
    h = harness(post, senders="run")
    h.fail(MAIL, GiveUp("bounced"))
    say(post, "m1")
    say(post, "m2")
    post.drain(only=["turns"])
    before = kinds(post)
    delete(post)
    h.advance(7200)
    for key in ("m1", "m3"):
        with pytest.raises(StreamDeleted) as refused:
            say(post, key)
        assert refused.value.stream == CHAT
    h.advance(7200)
    assert kinds(post) == before == ["message", "message", "reply", "reply"]
    assert post.streams.list() == []
    rows = {row.key: row.status for row in post.dispatches.list()}
    assert sorted(rows.values()) == ["dead_letter", "delivered"], "what it had sent went on its way"
    found = post.dispatches.get("42/m1")
    assert found is not None
    assert "dropped: the stream was deleted" in found.history[-1]["metadata"]


def test_a_message_that_was_written_offline(harness: Open) -> None:
    """A conversation that was made and deleted offline is deleted before its first message arrives: it is refused."""
    post = app()
    h = harness(post)
    delete(post)
    delete(post)
    with pytest.raises(StreamDeleted):
        say(post, "m1")
    h.drain()
    assert kinds(post) == []


def test_in_the_users_own_transaction(harness: Open) -> None:
    """The conversation's row of the app and its stream go together, or stay together."""
    post = app()
    h = harness(post)
    say(post, "m1")
    engine = post.database.engine
    with engine.connect() as connection:
        with connection.begin() as transaction:
            with post.join(connection) as tx:
                tx.delete_stream(CHAT)
            transaction.rollback()
    say(post, "m2")
    with engine.begin() as connection, post.join(connection) as tx:
        tx.delete_stream(CHAT)
    with pytest.raises(StreamDeleted):
        say(post, "m3")
    h.drain()
    assert kinds(post) == []


def test_a_block_that_contradicts_itself(harness: Open) -> None:
    """What a block publishes or arms in a stream that it deletes would be lost: it is refused, either way round."""
    post = app()
    harness(post)
    verbs: list[Callable[[Any, str], object]] = [
        lambda tx, stream: tx.publish(stream, MESSAGE, {}, key="m"),
        lambda tx, stream: tx.set_timer("t", after=1, stream=stream),
        lambda tx, stream: tx.rearm_timer("t", after=1, stream=stream),
    ]
    for number, verb in enumerate(verbs):
        with post.begin() as tx:
            tx.delete_stream(f"gone/{number}")
            with pytest.raises(StreamDeleted):
                verb(tx, f"gone/{number}")
        with post.begin() as tx:
            verb(tx, f"kept/{number}")
            with pytest.raises(Refused, match=f"publishes to kept/{number}, or arms"):
                tx.delete_stream(f"kept/{number}")
    with post.begin() as tx:
        tx.cancel_timer("t", stream="chat/44")
        tx.delete_stream("chat/44")
    with post.begin() as tx, pytest.raises(InvalidInput, match="type/id"):
        tx.delete_stream("chat")


def test_an_operator_deletes(harness: Open) -> None:
    """Audited, once; true only if there was something to do."""
    post = app()
    h = harness(post)
    say(post, "m1")
    h.drain()
    assert post.streams.delete(CHAT, actor="ann", reason="asked by mail")
    assert not post.streams.delete(CHAT, actor="bob")
    (row,) = post.database.read(audit.list_)
    assert (row.action, row.actor, row.reason) == ("stream.delete", "ann", "asked by mail")
    with pytest.raises(InvalidInput, match="actor"):
        post.streams.delete(CHAT, actor="")
    with pytest.raises(InvalidInput, match="type/id"):
        post.streams.delete("chat", actor="ann")
    h.advance(7200)
    assert "heard" not in kinds(post)[4:]


def test_the_place_and_the_age_of_a_waiting_message(harness: Open) -> None:
    """Another process, or a page that was reloaded, knows the message's key only, and reads both all the same."""
    post = app()
    h = harness(post)
    accepted = []
    for key in ("m1", "m2", "m3"):
        with post.begin() as tx:
            accepted.append(tx.publish(CHAT, MESSAGE, {}, key=key))
        h.clock.advance(5)
    row = post.streams.get(CHAT)
    assert row is not None
    places = {event.key: event.position for event in row.waiting}
    assert places == {"m1": 0, "m2": 1, "m3": 2}
    assert list(places.values()) == [post.position(each) for each in accepted]
    ages = [h.clock.wall() // 1_000_000 - event.received_at.timestamp() for event in row.waiting]
    assert ages == [15, 10, 5]
    h.drain()
    row = post.streams.get(CHAT)
    assert row is not None
    assert (row.waiting, row.state) == ((), "idle")


def test_a_stream_s_state_from_inside_and_after_its_turn(harness: Open) -> None:
    """Running while its turn runs, backing off after it failed, waiting when that is over."""
    states: list[str] = []

    def look(turn: Turn) -> None:
        row = turn.post.streams.get(turn.stream)
        assert row is not None
        states.append(row.state)
        if turn.attempt == 1:
            raise RetryLater("the model is down", after=5)

    post = app(look)
    h = harness(post)
    say(post, "m1")
    h.drain()
    (row,) = post.streams.list(state="backing_off")
    assert (row.stream, row.attempts, row.state) == (CHAT, 1, "backing_off")
    assert row.until is not None
    assert row.why.startswith("Events wait for the next attempt")
    h.advance(10)
    assert states[:2] == ["running", "running"]
    assert [one.state for one in post.streams.list(type="chat")] == ["idle"]


def test_what_waits_can_be_read(harness: Open) -> None:
    """A chat without a table of its own shows what is not answered yet, typed by its kind, and what never was."""

    def answer(turn: Turn) -> None:
        if turn.events[0].key == "bad":
            raise GiveUp("cannot be read")

    post = app(answer)
    h = harness(post)
    say(post, "bad", text="???")
    h.drain()
    for key in ("m1", "m2", "m3"):
        say(post, key, text=f"I am {key}")
    page = post.streams.events(CHAT, limit=2)
    assert [(one.key, MESSAGE.of(one)) for one in page] == [
        ("m1", {"text": "I am m1"}), ("m2", {"text": "I am m2"}),
    ]  # fmt: skip
    assert [one.key for one in post.streams.events(CHAT, after=page[-1].cursor)] == ["m3"]
    (dead,) = post.streams.events(CHAT, dead=True)
    assert (dead.key, dead.data, dead.reason) == ("bad", {"text": "???"}, "turn.dead.permanent")
    assert dead.ended_at == h.clock.now
    h.drain()
    assert post.streams.events(CHAT) == []
    assert post.streams.events("chat/none") == []


async def test_looking_from_async_code(place: dict[str, Any]) -> None:
    """Each look has an async form that answers the same."""
    post = Postroad(place["database"], schema=place.get("schema"), migrate=True)
    say(post, "m1", text="hello")
    assert await post.streams.aget(CHAT) == post.streams.get(CHAT) is not None
    assert await post.streams.alist(type="chat") == post.streams.list(type="chat") != []
    (one,) = await post.streams.aevents(CHAT)
    assert (one.key, one.data) == ("m1", {"text": "hello"})
    assert await post.streams.aevents(CHAT, dead=True) == []
    post.close()


def test_what_a_page_costs(harness: Open) -> None:
    """A page of sixty streams takes as many statements as one of five, and as one of those that are parked."""
    post = app()
    h = harness(post)
    for number in range(60):
        for key in ("m1", "m2"):
            say(post, key, f"chat/{number:03}", text="x" * 1_000)
    with counted(h.post) as statements:
        costs = []
        for how in ({"limit": 5}, {"limit": 60}, {"state": "waiting", "limit": 60}, {"state": "parked"}):
            post.streams.list(**how)
            costs.append(len(statements))
            statements.clear()
        assert costs[0] == costs[1] >= costs[2] > costs[3]
        assert costs[1] <= 8
        assert post.streams.get(CHAT) is None
        assert post.streams.get("chat/001") is not None
        assert len(statements) <= 8
        assert not any("data" in sql for sql in statements), "what events say is not read for this"


@contextmanager
def counted(post: Postroad) -> Iterator[list[str]]:
    """The statements that the app's database is asked meanwhile."""
    found: list[str] = []

    def before(conn: Any, cursor: Any, sql: str, *_: Any) -> None:
        if sql.lstrip().startswith(("SELECT", "WITH")) and "set_config" not in sql:
            found.append(sql)

    hooks.listen(post.database.engine, "before_cursor_execute", before)
    yield found
    hooks.remove(post.database.engine, "before_cursor_execute", before)


def test_arguments_of_a_list(harness: Open) -> None:
    """A state, a limit or a type that cannot be is refused and named."""
    post = app()
    harness(post)
    given: list[tuple[dict[str, Any], str]] = [
        ({"state": "asleep"}, "state"), ({"limit": 0}, "limit"), ({"type": ""}, "type"), ({"after": 3}, "after"),
    ]  # fmt: skip
    for arguments, field in given:
        with pytest.raises(InvalidInput, match=field):
            post.streams.list(**arguments)
    for page, field in (({"limit": 1_001}, "limit"), ({"after": -1}, "after"), ({"dead": "yes"}, "dead")):
        with pytest.raises(InvalidInput, match=field):
            post.streams.events(CHAT, **page)
    with pytest.raises(InvalidInput, match="type/id"):
        post.streams.events("chat")
    assert post.streams.list(type="chat", state="idle", limit=1, after="a") == []
    assert post.streams.get("chat/none") is None
