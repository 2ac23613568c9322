"""What was accepted is never lost, and `delivered` is never written for what did not plainly succeed."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from postroad import Dispatch, InvalidInput, Kind, Postroad, Retry, Turn
from postroad.store import runs
from tests.cases.apps import until
from tests.engine.conftest import Open
from tests.postgres_server import Own

MAIL = Kind("mail", dict[str, str])
NOTE = Kind("note", dict[str, int])


async def in_background(failed: asyncio.Event) -> None:
    """The real delivery, that fails after the handler has returned."""
    failed.set()
    raise ConnectionError("refused")


def a_task(failed: asyncio.Event) -> Any:
    task = asyncio.ensure_future(in_background(failed))
    task.add_done_callback(lambda done: done.exception())
    return task


def a_future(_: asyncio.Event) -> Any:
    return Future()


async def _generated() -> Any:
    yield "sent"


@pytest.mark.parametrize("handed_over", [a_task, a_future, lambda _: _generated()], ids=["task", "future", "generator"])
def test_handing_over_to_the_background_is_not_delivered(
    harness: Open, handed_over: Callable[[asyncio.Event], Any]
) -> None:
    """A sender that returns what it has only started has sent nothing: the attempt fails and says what came back."""
    post = Postroad()

    @post.sender(MAIL, retry=Retry(attempts=1))
    async def mail(d: Dispatch[dict[str, str]]) -> Any:
        return handed_over(asyncio.Event())

    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    h.drain()
    row = post.dispatches.get("k")
    assert row is not None
    assert row.status == "dead_letter"
    assert row.last_error is not None
    assert row.last_error.endswith("; success is Receipt, str or None")


@pytest.mark.acceptance
def test_what_is_sent_while_the_database_is_away_is_refused_to_the_caller(own_postgres: Own) -> None:
    """Every call raises, none looks accepted, and a caller that tries again with its keys has each row once."""
    post = Postroad(own_postgres.url, migrate=True)
    post.elsewhere("mail")

    def send(n: int) -> bool:
        try:
            with post.begin() as tx:
                accepted = tx.send("mail", {}, key=f"k{n}")
        except Exception:
            assert not hasattr(accepted, "id"), "not accepted, and it does not look so"
            return False
        return accepted.created

    assert send(0)
    own_postgres.crash()
    assert [send(n) for n in range(10)] == [False] * 10
    own_postgres.start()
    until(lambda: all(send(n) or post.dispatches.get(f"k{n}") for n in range(10)))
    assert sorted(row.key for row in post.dispatches.list()) == [f"k{n}" for n in range(10)]
    post.close()


def test_a_decision_whose_action_cannot_be_stored_is_no_decision(harness: Open) -> None:
    """What is too large for the outbox fails the whole turn: no entry, no dispatch, and the error says what it was."""
    post = Postroad()
    post.sender(MAIL)(lambda d: None)

    @post.turn("chat")
    def chat(t: Turn) -> None:
        t.record("notified", {"n": 1})
        t.send(MAIL, {"a": "small"}, key="k1")
        t.send(MAIL, {"a": "x" * 300_000}, key="k2")

    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="e")
    h.drain()
    assert (h.entries("chat/1"), post.dispatches.list()) == ([], [])
    (run,) = post.database.read(runs.of_stream, "chat/1")
    assert str(run.end) == "failed"
    assert run.error is not None
    assert "body takes 300008 bytes" in run.error


def test_a_block_whose_action_cannot_be_stored_writes_nothing(harness: Open) -> None:
    """Outside of a turn too: neither the event nor the user's rows nor the dispatches before it."""
    post = Postroad()
    post.sender(MAIL)(lambda d: None)
    wrote: list[str] = []
    h = harness(post)
    with pytest.raises(InvalidInput, match="body takes"), post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1})
        tx.write(lambda conn: wrote.append("user's rows"))
        tx.send(MAIL, {"a": "small"}, key="k1")
        tx.send(MAIL, {"a": "x" * 300_000}, key="k2")
    assert h.drain().waiting == 0
    assert (wrote, post.dispatches.list()) == ([], [])
