"""Databases for plan tests: made once per module, filled by it, and dropped."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from postroad.model.clock import FakeClock
from postroad.store import schema
from postroad.store.database import Database


@contextmanager
def filled(
    request: pytest.FixtureRequest, folders: pytest.TempPathFactory, kind: str, fill: Callable[[Database], None]
) -> Iterator[Database]:
    """A database of the kind, its tables analyzed while empty and then filled."""
    if kind == "sqlite":
        made = Database(f"sqlite:///{folders.mktemp('plans')}/test.db", clock=FakeClock())
    else:
        url = request.getfixturevalue("postgres_url")
        made = Database(url, schema=f"test_plans_{secrets.token_hex(4)}", clock=FakeClock())
    try:
        _create(made)
        fill(made)
        yield made
    finally:
        if made.schema:
            with made.engine.begin() as conn:
                conn.exec_driver_sql(f'DROP SCHEMA IF EXISTS "{made.schema}" CASCADE')
        made.close()


def analyze(database: Database) -> None:
    """Tell the planner the truth."""
    with database.engine.begin() as conn:
        conn.exec_driver_sql("ANALYZE")


def _create(database: Database) -> None:
    with database.engine.begin() as conn:
        if database.schema:
            conn.exec_driver_sql(f'CREATE SCHEMA "{database.schema}"')
        schema.metadata.create_all(conn.execution_options(schema_translate_map={None: database.schema}))
        conn.exec_driver_sql("ANALYZE")
