"""What the app sees of its Postgres before it relies on it."""

import logging

import pytest
from sqlalchemy import Connection, create_engine

from postroad import Kind, Postroad
from postroad.store import dialects


def test_settings_that_lose_commits_are_named(postgres_url: str) -> None:
    """synchronous_commit=off is said to the operator in a sentence; the defaults are fine."""
    engine = create_engine(postgres_url)
    with engine.begin() as conn:
        assert dialects.check_server(conn) == []
        conn.exec_driver_sql("SET LOCAL synchronous_commit = off")
        (said,) = dialects.check_server(conn)
    engine.dispose()
    assert "synchronous_commit=off" in said


def test_the_app_warns_when_it_opens(
    postgres_url: str, fresh_schema: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening the database logs what its settings put at risk."""
    checked: list[Connection] = []

    def risky(conn: Connection) -> list[str]:
        checked.append(conn)
        return ["Postgres runs with fsync=off: what was committed can be lost in a crash."]

    monkeypatch.setattr(dialects, "check_server", risky)
    post = Postroad(postgres_url, schema=fresh_schema, migrate=True)
    with caplog.at_level(logging.WARNING, "postroad"):
        post.check_schema()
    post.close()
    assert checked
    assert "fsync=off" in caplog.text


def test_nothing_is_prepared_on_the_server(postgres_url: str, fresh_schema: str) -> None:
    """Our own sessions leave no prepared statements behind, so that a pooler in transaction mode can stand between."""
    post = Postroad(postgres_url, schema=fresh_schema, migrate=True)
    for _ in range(10):
        post.read("chat/1")
    with post.database.engine.connect() as conn:
        assert conn.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements").scalar_one() == 0
    post.close()


def test_a_restarted_server_costs_the_next_caller_nothing(postgres_url: str, fresh_schema: str) -> None:
    """Sessions that the server has ended are replaced before anybody hears of it: nothing had been written."""
    post = Postroad(postgres_url, schema=fresh_schema, migrate=True)
    note = Kind("note", dict[str, int])
    with post.begin() as tx:
        tx.publish("chat/1", note, {"n": 1}, key="a")
    with post.database.engine.connect() as ours:
        pid = ours.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    killer = create_engine(postgres_url)
    with killer.begin() as conn:
        conn.exec_driver_sql("SELECT pg_terminate_backend(%s)", (pid,))
    killer.dispose()
    for n in range(20):  # whichever session is next
        with post.begin() as tx:
            tx.publish("chat/1", note, {"n": n}, key=f"b{n}")
    post.close()
