"""The first use of a new SQLite file inside a transaction of the user's, which holds the only write lock."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from postroad import Kind, Postroad, SchemaMismatch, sqlite

pytestmark = pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning")

ANY = Kind("any", dict[str, str])


@pytest.fixture
def engine(sqlite_path: Path) -> Iterator[Engine]:
    """The application's engine, over a file that is not there yet."""
    made = sqlite.configure(create_engine(f"sqlite:///{sqlite_path}"))
    yield made
    made.dispose()


@pytest.fixture(params=["by engine", "by URL"])
def post(request: pytest.FixtureRequest, engine: Engine, sqlite_path: Path) -> Iterator[Postroad]:
    """An app on the same file that has not been used yet."""
    made = Postroad(engine if request.param == "by engine" else f"sqlite:///{sqlite_path}")
    made.kinds(ANY)
    with closing(made):
        yield made


def test_the_schema_comes_with_the_users_transaction(post: Postroad, engine: Engine) -> None:
    """A join that comes first brings the tables, inside the user's own transaction, and waits for nobody."""
    with engine.begin() as conn:
        conn.exec_driver_sql("create table orders (id integer)")
        for key in ("a", "b"):
            with post.join(conn) as tx:
                tx.send(ANY, {}, key=key)
    with post.begin() as tx:
        tx.send(ANY, {}, key="c")
    assert {row.key for row in post.dispatches.list()} == {"a", "b", "c"}


def test_a_rollback_takes_the_schema_back_and_harms_nobody(post: Postroad, engine: Engine) -> None:
    """After a first use that was rolled back the next one, joined or not, works as if it were the first."""
    for _ in range(2):
        with engine.connect() as conn:
            conn.begin()
            with post.join(conn) as tx:
                tx.send(ANY, {}, key="a")
            conn.rollback()
            assert conn.exec_driver_sql("select count(*) from sqlite_master").scalar_one() == 0
            conn.rollback()
    with post.begin() as tx:
        assert tx.send(ANY, {}, key="a") is not None
    assert [row.key for row in post.dispatches.list()] == ["a"]


async def test_an_async_transaction_may_come_first_too(post: Postroad, sqlite_path: Path) -> None:
    """The first use may be an AsyncConnection's transaction that has written already."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{sqlite_path}")
    sqlite.configure(engine.sync_engine)
    async with engine.begin() as conn:
        await conn.exec_driver_sql("create table orders (id integer)")
        async with post.join(conn) as tx:
            tx.send(ANY, {}, key="a")
    await engine.dispose()
    assert [row.key for row in post.dispatches.list()] == ["a"]


def test_who_migrates_himself_is_told(engine: Engine) -> None:
    """With migrate=False a join on a file without tables is refused, and says what to do."""
    with closing(Postroad(engine, migrate=False)) as post, engine.begin() as conn:
        with pytest.raises(SchemaMismatch, match="postroad migrate"), post.join(conn):
            pass
        assert conn.exec_driver_sql("select count(*) from sqlite_master").scalar_one() == 0
