"""The harness that users test with."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from postroad import (
    Dispatch,
    InvalidInput,
    Kind,
    Postroad,
    PostroadError,
    Refused,
    RetryLater,
    Turn,
    UnknownKind,
    sqlite,
)
from postroad.store import migrations
from postroad.store.database import Database
from postroad.testing import Harness
from tests.engine.conftest import Open

MAIL = Kind("mail", dict[str, str])
NOTE = Kind("note", dict[str, int])


def app() -> tuple[Postroad, list[str]]:
    post = Postroad()
    really: list[str] = []
    post.sender(MAIL)(lambda d: really.append(d.key))

    @post.turn("chat")
    def chat(t: Turn) -> None:
        t.send(MAIL, {}, key=f"{t.events[0].key}/mail", to="ann") if t.events[0].kind == "note" else None

    return post, really


def test_sends_are_captured_and_nothing_is_sent(harness: Open) -> None:
    """By default a dispatch counts as delivered and its sender is not called."""
    post, really = app()
    h = harness(post)
    with post.begin() as tx:
        tx.publish("chat/1", NOTE, {"n": 1}, key="a")
    done = h.drain()
    assert (done.turns, done.attempted, done.delivered, done.waiting) == (2, 1, 1, 0)
    assert [d.key for d in h.sent(MAIL)] == ["a/mail"]
    assert h.sent(MAIL, to="bob") == []
    assert really == []


def test_senders_can_run(harness: Open) -> None:
    """`senders="run"` calls the real ones and captures all the same."""
    post, really = app()
    h = harness(post, senders="run")
    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    h.drain()
    assert really == ["k"]
    assert [d.key for d in h.sent(MAIL)] == ["k"]


def test_planned_failures_are_not_raised_again(harness: Open) -> None:
    """`fail` makes the next sends of a kind raise; the test does not have to catch what it asked for."""
    post, _ = app()
    h = harness(post)
    h.fail(MAIL, RuntimeError("planned"), times=2)
    with post.begin() as tx:
        tx.send(MAIL, {}, key="k")
    h.advance(3600)
    assert [d.attempt for d in h.sent(MAIL)] == [3]
    with pytest.raises(UnknownKind):
        h.fail("nobody", RetryLater())


@pytest.mark.parametrize("driver", ["sqlite", "postgres"])
def test_everything_happens_in_the_tests_own_transaction(request: pytest.FixtureRequest, driver: str) -> None:
    """With `on=connection` the app's rows and the user's are one transaction, which the test rolls back."""
    schema = None
    if driver == "postgres":
        schema = request.getfixturevalue("fresh_schema")
        url = request.getfixturevalue("postgres_url")
        engine = create_engine(url)
    else:
        path: Path = request.getfixturevalue("sqlite_path")
        url = f"sqlite:///{path}"
        engine = sqlite.configure(create_engine(url))
    setup = Database(url, schema=schema)
    migrations.migrate(setup)
    post, _ = app()
    with engine.connect() as conn, conn.begin() as transaction:
        with Harness(post, on=conn, schema=schema) as h:
            with post.join(conn) as tx:
                tx.publish("chat/1", NOTE, {"n": 1}, key="a")
            conn.execute(text("select 1"))
            h.drain()
            assert [d.key for d in h.sent(MAIL)] == ["a/mail"]
            assert [e.key for e in h.entries("chat/1")] == ["a", "out:a/mail:delivered"]
        transaction.rollback()
    engine.dispose()
    assert setup.read(migrations.current) > 0
    left = Postroad(url, schema=schema)
    assert left.read("chat/1") == []
    assert left.dispatches.list() == []
    left.close()
    setup.close()


async def test_async_tests_await(harness: Open) -> None:
    """Inside an event loop `drain` says what to await, and `adrain` and `aadvance` do the same."""
    post, _ = app()
    h = harness(post)
    async with post.begin() as tx:
        tx.send(MAIL, {}, key="k", after=60)
    with pytest.raises(Refused, match="adrain"):
        h.drain()
    assert (await h.adrain()).delivered == 0
    assert (await h.aadvance(60)).delivered == 1


def test_the_app_is_as_before_afterwards(sqlite_path: Path) -> None:
    """Leaving the block gives the app its database, senders and clock back."""
    post = Postroad(f"sqlite:///{sqlite_path}")
    really: list[Any] = []

    @post.sender(MAIL)
    def mail(d: Dispatch[dict[str, str]]) -> None:
        really.append(d.key)

    with Harness(post) as h, post.begin() as tx:
        tx.send(MAIL, {}, key="in the test")
    with pytest.raises(PostroadError, match="inside"):
        h.entries("chat/1")
    with post.begin() as tx:
        tx.send(MAIL, {}, key="for real")
    post.drain()
    post.close()
    assert really == ["for real"]


def test_what_it_does_not_know_is_refused() -> None:
    """Wrong settings of a harness are refused."""
    with pytest.raises(InvalidInput):
        Harness(Postroad(), senders="shout")  # type: ignore[arg-type]
    with pytest.raises(Refused), Harness(Postroad(), on=object()):
        pass
    with pytest.raises(InvalidInput):
        Harness(Postroad(), start="2026-01-01T00:00")
