"""What a contract suite needs: a database with our tables, a clock, and a way to run a transaction.

Every test runs on SQLite and on Postgres, in a user's own sync transaction (direct), and in one of two other ways,
which its name decides: in one of ours for async code (atransact), or in a user's own async one (run_sync). With
POSTROAD_TEST_WAYS=all each runs in all three.
"""

import asyncio
import inspect
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine

from postroad.model.clock import FakeClock
from postroad.store import dialects, schema
from postroad.store.database import Database

Run = Callable[..., Any]
DIRECT, *OTHERS = WAYS = ("direct", "atransact", "run_sync")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the third way of each contract test."""
    if os.environ.get("POSTROAD_TEST_WAYS") == "all":
        return
    left_out = [item for item in items if _is_left_out(item)]
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=left_out)


def _is_left_out(item: pytest.Item) -> bool:
    way = item.callspec.params.get("run", DIRECT) if hasattr(item, "callspec") else DIRECT
    name = f"{item.nodeid.partition('[')[0]} {item.callspec.params.get('database')}" if way != DIRECT else ""
    return way in OTHERS and way != OTHERS[zlib.crc32(name.encode()) % len(OTHERS)]


def create_tables(database: Database) -> None:
    """Create the schema, if there is one, and the tables in it."""
    with database.engine.begin() as conn:
        if database.schema:
            conn.exec_driver_sql(f'CREATE SCHEMA "{database.schema}"')
        schema.metadata.create_all(conn.execution_options(schema_translate_map={None: database.schema}))


@pytest.fixture
def clock() -> FakeClock:
    """The clock of the test's database."""
    return FakeClock()


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[Database]:
    """A database with our tables and nothing in them."""
    if request.param == "sqlite":
        made = Database(f"sqlite:///{request.getfixturevalue('migrated_path')}", clock=clock)
        yield made
        made.close()
        return
    url, kept = request.getfixturevalue("postgres_url"), request.getfixturevalue("schemas")
    with kept.lent(lambda name: create_schema(url, name)) as name:
        made = Database(url, schema=name, clock=clock)
        yield made
        made.close()


def create_schema(url: str, name: str) -> None:
    """A schema of that name with our tables."""
    made = Database(url, schema=name)
    create_tables(made)
    made.close()


def call(database: Database, conn: Connection, fn: Run, args: Any, kwargs: Any) -> Any:
    """`fn` over the connection, with the clock's `now` if it takes one and was given none."""
    if "now" in inspect.signature(fn).parameters:
        kwargs = {"now": database.clock.wall(), **kwargs}
    return fn(database.bind(conn), *args, **kwargs)


def run_directly(database: Database) -> Run:
    """Runs in a user's own transaction."""

    def run(fn: Run, *args: Any, **kwargs: Any) -> Any:
        with database.engine.begin() as conn:
            return call(database, conn, fn, args, kwargs)

    return run


def run_atransact(database: Database) -> Run:
    """Runs in one of the database's own transactions, from async code."""

    def run(fn: Run, *args: Any, **kwargs: Any) -> Any:
        def inside(conn: Connection, *, now: int) -> Any:
            return call(database, conn, fn, args, kwargs)

        return asyncio.run(database.atransact(inside))

    return run


@contextmanager
def run_run_sync(database: Database) -> Iterator[Run]:
    """Runs in a user's own transaction of an async engine."""
    url = database.engine.url
    engine = create_async_engine(url.set(drivername="sqlite+aiosqlite") if database.is_sqlite else url)
    if database.is_sqlite:
        dialects.configure_sqlite(engine.sync_engine)

    async def transact(fn: Run, args: Any, kwargs: Any) -> Any:
        async with engine.begin() as conn:
            return await conn.run_sync(lambda plain: call(database, plain, fn, args, kwargs))

    with asyncio.Runner() as runner:
        yield lambda fn, *args, **kwargs: runner.run(transact(fn, args, kwargs))
        runner.run(engine.dispose())


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest, database: Database) -> Iterator[Run]:
    """`run(fn, *args, **kwargs)`: the result of `fn(conn, *args, now=..., **kwargs)`, committed."""
    if request.param == "run_sync":
        with run_run_sync(database) as runs:
            yield runs
    else:
        yield run_directly(database) if request.param == "direct" else run_atransact(database)
