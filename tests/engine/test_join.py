"""Joining the user's own transaction, sync and async, on both databases."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from postroad import (
    DatabaseBusy,
    Dispatch,
    InvalidInput,
    KeyConflict,
    Kind,
    NotInTransaction,
    Postroad,
    Refused,
    sqlite,
)
from postroad.store import dialects

MAIL = Kind("mail", dict[str, str])


def app(database: Engine | str, schema: str | None = None) -> Postroad:
    post = Postroad(database, schema=schema, migrate=True)

    @post.sender(MAIL)
    def mail(d: Dispatch[dict[str, str]]) -> None: ...

    return post


@pytest.fixture(params=["sqlite", "sqlite-unconfigured", "postgres"])
def joined(request: pytest.FixtureRequest) -> Iterator[tuple[Postroad, Engine]]:
    """An app and a user's engine on one database; SQLite with and without `sqlite.configure`."""
    schema = None
    if request.param == "postgres":
        engine = create_engine(request.getfixturevalue("postgres_url"))
        schema = request.getfixturevalue("fresh_schema")
        post = app(str(engine.url), schema)
    else:
        path: Path = request.getfixturevalue("sqlite_path")
        engine = create_engine(f"sqlite:///{path}")
        if request.param == "sqlite":
            sqlite.configure(engine)
        post = app(f"sqlite:///{path}")
    post.check_schema()
    yield post, engine
    post.close()
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
async def ajoined(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Postroad, AsyncEngine]]:
    """An app and a user's async engine on one database."""
    if request.param == "postgres":
        engine = create_async_engine(request.getfixturevalue("postgres_url"))
        post = app(request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema"))
    else:
        path = request.getfixturevalue("sqlite_path")
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        post = app(f"sqlite:///{path}")
    post.check_schema()
    yield post, engine
    post.close()
    await engine.dispose()


def keys(post: Postroad) -> set[str]:
    return {row.key for row in post.dispatches.list()}


def test_rows_come_and_go_with_the_users_transaction(joined: tuple[Postroad, Engine]) -> None:
    """What was sent in a transaction that rolls back never was; in one that commits it stands."""
    post, engine = joined
    with pytest.raises(RuntimeError), engine.begin() as conn:
        with post.join(conn) as tx:
            tx.send(MAIL, {"a": "b"}, key="gone")
        raise RuntimeError
    with engine.begin() as conn, post.join(conn) as tx:
        accepted = tx.send(MAIL, {"a": "b"}, key="there")
    assert keys(post) == {"there"}
    assert accepted.created


def test_a_refusal_leaves_the_users_transaction_usable(joined: tuple[Postroad, Engine]) -> None:
    """A key conflict takes our rows of that block back, and the user's own work can still commit."""
    post, engine = joined
    with engine.begin() as conn, post.join(conn) as tx:
        tx.send(MAIL, {"a": "b"}, key="k")
    with engine.begin() as conn:
        with pytest.raises(KeyConflict), post.join(conn) as tx:
            tx.send(MAIL, {"a": "b"}, key="beside")
            tx.send(MAIL, {"a": "other"}, key="k")
        with post.join(conn) as tx:
            tx.send(MAIL, {"a": "b"}, key="after")
    assert keys(post) == {"k", "after"}


def test_a_block_that_raises_writes_nothing(joined: tuple[Postroad, Engine]) -> None:
    """Leaving the block by an exception discards what was recorded."""
    post, engine = joined
    with engine.begin() as conn, pytest.raises(RuntimeError), post.join(conn) as tx:
        tx.send(MAIL, {"a": "b"}, key="k")
        raise RuntimeError
    assert keys(post) == set()


def test_an_orm_session_joins_as_a_connection_does(joined: tuple[Postroad, Engine]) -> None:
    """A Session's transaction is the user's transaction."""
    post, engine = joined
    with Session(engine) as session:
        with post.join(session) as tx:
            tx.send(MAIL, {"a": "b"}, key="k")
        session.rollback()
        with post.join(session) as tx:
            tx.send(MAIL, {"a": "b"}, key="k2")
        session.commit()
    assert keys(post) == {"k2"}


def test_what_is_no_transaction_is_refused(joined: tuple[Postroad, Engine]) -> None:
    """Engines, autocommit connections and other objects are refused on entering, with the cure."""
    post, engine = joined
    for wrong in (engine, object(), "sqlite:///x.db"):
        with pytest.raises(NotInTransaction), post.join(wrong):
            pass
    with pytest.raises(InvalidInput):
        post.join(None)
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn,
        pytest.raises(NotInTransaction, match="autocommit"),
        post.join(conn),
    ):
        pass


def test_an_async_engine_is_refused_as_the_apps_database() -> None:
    """An AsyncEngine is refused with what to pass instead."""
    engine = create_async_engine("sqlite+aiosqlite:///x.db")
    with pytest.raises(Refused, match="AsyncEngine"):
        Postroad(engine)  # type: ignore[arg-type]


def test_an_unprepared_sqlite_engine_is_refused(sqlite_path: Path) -> None:
    """A SQLite engine as the app's database must have been prepared; the error names the call."""
    post = app(create_engine(f"sqlite:///{sqlite_path}"))
    with pytest.raises(Refused, match=r"sqlite\.configure"):
        post.check_schema()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    """Several connections share the database, so a SQLite database must be a file."""
    for database in (url, sqlite.configure(create_engine(url))):
        with pytest.raises(InvalidInput, match="file"):
            Postroad(database).check_schema()


async def test_async_connections_join(ajoined: tuple[Postroad, AsyncEngine]) -> None:
    """An AsyncConnection's transaction is joined with `async with`."""
    post, engine = ajoined
    async with engine.begin() as conn, post.join(conn) as tx:
        tx.send(MAIL, {"a": "b"}, key="k")
    with pytest.raises(RuntimeError):
        async with engine.begin() as conn:
            async with post.join(conn) as tx:
                tx.send(MAIL, {"a": "b"}, key="gone")
            raise RuntimeError
    assert keys(post) == {"k"}


async def test_async_sessions_join(ajoined: tuple[Postroad, AsyncEngine]) -> None:
    """An AsyncSession's transaction is joined with `async with`, and a refusal leaves it usable."""
    post, engine = ajoined
    async with AsyncSession(engine) as session:
        async with post.join(session) as tx:
            tx.send(MAIL, {"a": "b"}, key="k")
        with pytest.raises(KeyConflict):
            async with post.join(session) as tx:
                tx.send(MAIL, {"a": "other"}, key="k")
        await session.execute(text("select 1"))
        await session.commit()
    assert keys(post) == {"k"}


async def test_colours_do_not_mix(ajoined: tuple[Postroad, AsyncEngine]) -> None:
    """`with` on an async connection and `async with` on nothing of the kind are refused."""
    post, engine = ajoined
    async with engine.connect() as conn:
        with pytest.raises(NotInTransaction, match="async with"), post.join(conn):
            pass
    with pytest.raises(NotInTransaction):
        async with post.join(object()):
            pass


async def test_begin_serves_both_colours(ajoined: tuple[Postroad, AsyncEngine]) -> None:
    """`begin` is a transaction of its own, with `with` and with `async with`."""
    post, _ = ajoined
    async with post.begin() as tx:
        tx.send(MAIL, {"a": "b"}, key="async")
    with post.begin() as tx:
        tx.send(MAIL, {"a": "b"}, key="sync")
    assert keys(post) == {"async", "sync"}


def test_another_database_is_refused(joined: tuple[Postroad, Engine], tmp_path: Path) -> None:
    """A connection to another kind of database than the app's is refused."""
    post, engine = joined
    if engine.dialect.name == "sqlite":
        return
    other = create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    with other.begin() as conn, pytest.raises(Refused, match="same database"), post.join(conn):
        pass
    other.dispose()


def test_the_users_engine_serves_as_the_apps(sqlite_path: Path) -> None:
    """One prepared engine can be the user's and the app's at once."""
    engine = sqlite.configure(create_engine(f"sqlite:///{sqlite_path}"))
    statements: list[Any] = []
    event.listen(engine, "begin", statements.append)
    post = app(engine)
    with engine.begin() as conn, post.join(conn) as tx:
        tx.send(MAIL, {"a": "b"}, key="k")
    assert post.drain().delivered == 1
    post.close()
    engine.dispose()


def test_a_begin_inside_of_one_s_own_sqlite_transaction_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`begin` inside a write transaction of the same program waits in vain; the error names `join`, which works."""
    monkeypatch.setattr(dialects, "BUSY_MILLISECONDS", 20)
    engine = sqlite.configure(create_engine(f"sqlite:///{tmp_path / 'own.db'}"))
    post = Postroad(engine)
    post.kinds(Kind("any", Any))
    post.check_schema()
    with engine.begin() as conn:
        with pytest.raises(DatabaseBusy, match=r"post\.join\(connection\)"), post.begin() as tx:
            tx.send("any", 1)
        with post.join(conn) as tx:
            sent = tx.send("any", 1)
    assert post.dispatches.get(sent.id) is not None
    post.close()
    engine.dispose()
