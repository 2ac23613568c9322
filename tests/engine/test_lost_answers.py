"""COMMITs that happened, or did not, and whose answer was lost: looked up by token, never run again blindly."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from postroad import Kind, Postroad, Turn
from postroad.engine.dispatcher import Dispatcher
from postroad.engine.running import build
from postroad.model.errors import CommitUnknown, DatabaseBusy
from postroad.store import runs
from postroad.testing import Harness
from tests.engine.conftest import Open

NOTE = Kind("note", dict[str, int])
Happened = pytest.mark.parametrize("happened", [True, False])


def app(**turn: Any) -> tuple[Postroad, list[str]]:
    post = Postroad()
    seen: list[str] = []
    post.sender("mail", timeout=1)(lambda d: seen.append(f"send {d.key} {d.attempt}"))

    @post.turn("chat", **turn)
    def chat(t: Turn) -> None:
        seen.append(f"turn {t.events[0].key} {t.attempt}")
        t.record("thought", {})

    return post, seen


def name_of(fn: Any) -> str:
    """The name of a transaction's function; of a group that of its verb."""
    return str((fn.args[0][0].verb.run if isinstance(fn, partial) else fn).__name__)


def lose_one_answer(h: Harness, monkeypatch: pytest.MonkeyPatch, of: str, *, happened: bool) -> list[str]:
    """Have the next transaction whose function bears this name commit, or not, and answer CommitUnknown."""
    database: Any = h.post.database
    original: Callable[..., Any] = database._once
    lost: list[str] = []

    def once(asked: Any) -> Any:
        if name_of(asked.fn) != of or lost:
            return original(asked)
        lost.append(of)
        if happened:
            original(asked)
        raise CommitUnknown("the connection broke")

    monkeypatch.setattr(database, "_once", once)
    return lost


def fail_one_read(h: Harness, monkeypatch: pytest.MonkeyPatch, of: str) -> list[str]:
    """Have the next read whose function bears this name fail, as if the database were away."""
    database: Any = h.post.database
    original: Callable[..., Any] = database._read
    failed: list[str] = []

    def read(fn: Any, args: Any, kwargs: Any) -> Any:
        if fn.__name__ == of and not failed:
            failed.append(of)
            raise DatabaseBusy("away")
        return original(fn, args, kwargs)

    monkeypatch.setattr(database, "_read", read)
    return failed


@Happened
def test_a_claim_of_dispatches(harness: Open, monkeypatch: pytest.MonkeyPatch, happened: bool) -> None:
    """A claim that happened is carried out under its token, one that did not is simply made again."""
    post, seen = app()
    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send("mail", {}, key="k")
    lost = lose_one_answer(h, monkeypatch, "claim_due", happened=happened)
    h.drain()
    h.drain()
    assert lost
    assert seen == ["send k 1"]


@Happened
def test_a_settle(harness: Open, monkeypatch: pytest.MonkeyPatch, happened: bool) -> None:
    """A settle that happened is not written twice, one that did not is."""
    post, seen = app()
    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send("mail", {}, key="k")
    assert lose_one_answer(h, monkeypatch, "settle", happened=happened) == []
    h.drain()
    row = post.dispatches.get("k")
    assert row is not None
    assert seen == ["send k 1"]
    assert [t["to_status"] for t in row.history] == ["pending", "delivering", "delivered"]


@Happened
def test_a_settle_that_cannot_be_looked_up_at_once(
    harness: Open, monkeypatch: pytest.MonkeyPatch, happened: bool
) -> None:
    """A database that crashes in COMMIT is away right afterwards: the results wait until it can be asked."""
    post, seen = app()
    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send("mail", {}, key="k")
    lose_one_answer(h, monkeypatch, "settle", happened=happened)
    asked = fail_one_read(h, monkeypatch, "unsettled")
    (dispatcher,) = (loop for loop in build(post.parts()) if isinstance(loop, Dispatcher))

    async def work() -> None:
        await dispatcher.step()
        with pytest.raises(DatabaseBusy):
            await dispatcher.finish()
        await dispatcher.finish()

    asyncio.run(work())
    row = post.dispatches.get("k")
    assert row is not None
    assert asked == ["unsettled"]
    assert seen == ["send k 1"]
    assert [t["to_status"] for t in row.history] == ["pending", "delivering", "delivered"]


@Happened
def test_a_claim_of_turns(harness: Open, monkeypatch: pytest.MonkeyPatch, happened: bool) -> None:
    """Nothing of such a claim has begun, so it is given back and its attempt does not count."""
    post, seen = app()
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="a")
    lose_one_answer(h, monkeypatch, "claim_all", happened=happened)
    with pytest.raises(CommitUnknown):
        h.drain()
    h.drain()
    assert seen == ["turn a 1"]


@Happened
def test_a_turns_commit(harness: Open, monkeypatch: pytest.MonkeyPatch, happened: bool) -> None:
    """The run's row tells whether the decision stands; only if it does not is it taken again."""
    post, seen = app()
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="a")
    lose_one_answer(h, monkeypatch, "commit", happened=happened)
    h.drain()
    assert seen == (["turn a 1"] if happened else ["turn a 1", "turn a 1"])
    assert [e.kind for e in h.entries("chat/1")] == ["note", "thought"]
    ends = sorted(str(r.end) for r in post.database.read(runs.of_stream, "chat/1"))
    assert ends == (["committed"] if happened else ["committed", "conflict"])


@Happened
def test_the_commit_of_what_needs_no_decision(harness: Open, monkeypatch: pytest.MonkeyPatch, happened: bool) -> None:
    """Recorded events are committed together: their runs tell whether that stands, and nobody is taken for a zombie."""
    post, _ = app()
    post.recorded("notes")
    h = harness(post)
    with post.begin() as tx:
        for n in range(3):
            tx.publish(f"notes/{n}", NOTE, {"n": n})
    lost = lose_one_answer(h, monkeypatch, "commit", happened=happened)
    drained = h.drain()
    assert lost
    assert (drained.turns, drained.stale) == (3, 0)
    assert [len(h.entries(f"notes/{n}")) for n in range(3)] == [1, 1, 1]


def test_a_lost_answer_is_no_failed_attempt(harness: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn with one attempt, whose COMMIT did not happen and was not answered, is taken again, not buried."""
    post, seen = app(attempts=1)
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="a")
    lose_one_answer(h, monkeypatch, "commit", happened=False)
    h.drain()
    assert seen == ["turn a 1", "turn a 1"]
    assert [e.kind for e in h.entries("chat/1")] == ["note", "thought"]


def test_a_filter_that_fails_hands_the_event_to_the_handler(harness: Open) -> None:
    """A broken filter costs a log line, not the stream."""
    post, seen = app()
    post.filter("chat", NOTE)(lambda e: 1 / 0)  # type: ignore[arg-type, return-value]
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="a")
    h.drain()
    assert seen == ["turn a 1"]
