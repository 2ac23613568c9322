"""Turns that delete streams: their own, as the last thing that they do, and others."""

import pytest

from postroad import Kind, Postroad, StreamDeleted, Turn
from tests.engine.conftest import Open

MESSAGE = Kind("message", dict[str, str])


def say(post: Postroad, stream: str, key: str) -> None:
    with post.begin() as tx:
        tx.publish(stream, MESSAGE, {}, key=key)


def kinds(post: Postroad, stream: str) -> list[str]:
    return [entry.kind for entry in post.read(stream)]


def test_a_turn_deletes_its_own_stream(harness: Open) -> None:
    """What it records is committed with the deletion and is the last of the log; what waits behind it is dropped."""
    post = Postroad()
    turns: list[str] = []

    @post.turn("chat", debounce=0)
    def chat(turn: Turn) -> None:
        turns.append(turn.events[0].key)
        turn.set_timer("later", after=60, stream="chat/other")
        turn.record("goodbye", {})
        turn.delete_stream(turn.stream)
        with pytest.raises(StreamDeleted):
            turn.set_timer("never", after=60)
        with pytest.raises(StreamDeleted):
            turn.publish(turn.stream, MESSAGE, {})
        turn.record("really", {})
        say(turn.post, turn.stream, "m2")

    h = harness(post)
    say(post, "chat/1", "m1")
    h.drain()
    assert (turns, kinds(post, "chat/1")) == (["m1"], ["message", "goodbye", "really"])
    row = post.streams.get("chat/1")
    assert row is not None
    assert (row.deleted_at is not None, row.state, row.dead) == (True, "idle", 0)
    with pytest.raises(StreamDeleted):
        say(post, "chat/1", "m3")


def test_a_turn_deletes_other_streams(harness: Open) -> None:
    """In its commit, those that have never been too; a turn that fails deletes nothing."""
    post = Postroad()

    @post.turn("user", attempts=2)
    def user(turn: Turn) -> None:
        turn.delete_stream("chat/1")
        turn.delete_stream("chat/none")
        if turn.attempt == 1:
            raise ConnectionError

    @post.turn("chat")
    def chat(turn: Turn) -> None:
        turn.record("reply", {})

    h = harness(post)
    say(post, "chat/1", "m1")
    h.drain()
    say(post, "user/1", "forget me")
    with pytest.raises(ConnectionError):
        h.drain()
    say(post, "chat/1", "m2")
    h.advance(10)
    for stream in ("chat/1", "chat/none"):
        with pytest.raises(StreamDeleted):
            say(post, stream, "m9")
    assert kinds(post, "chat/1") == ["message", "reply", "message", "reply"]
    assert kinds(post, "user/1") == ["message"]


def test_two_that_delete_each_other(harness: Open) -> None:
    """One of them commits; the other one's decision is discarded with its stream."""
    post = Postroad()

    @post.turn("pair")
    def pair(turn: Turn) -> None:
        turn.record("decided", {})
        turn.delete_stream({"pair/1": "pair/2", "pair/2": "pair/1"}[turn.stream])

    h = harness(post)
    with post.begin() as tx:
        tx.publish("pair/1", MESSAGE, {}, key="m")
        tx.publish("pair/2", MESSAGE, {}, key="m")
    h.drain()
    rows = [post.streams.get(name) for name in ("pair/1", "pair/2")]
    gone = [row.stream for row in rows if row is not None and row.deleted_at is not None]
    assert len(gone) == 1
    assert [len(post.read(row.stream)) for row in rows if row is not None and row.stream in gone] == [0]


def test_a_turn_that_arms_a_timer_of_a_deleted_stream(harness: Open) -> None:
    """It is refused as a decision, like a message to it would be."""
    post = Postroad()

    @post.turn("user", attempts=1)
    def user(turn: Turn) -> None:
        turn.set_timer("t", after=60, stream="chat/1")

    h = harness(post)
    with post.begin() as tx:
        tx.delete_stream("chat/1")
    say(post, "user/1", "m")
    h.drain()
    assert kinds(post, "user/1") == ["postroad.failed"]
