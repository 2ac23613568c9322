"""Databases for plan tests: made once per module, filled by it, and dropped."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection

from postroad.model.clock import FakeClock
from postroad.store import schema
from postroad.store.database import Database

# What the planner was told about the tables: that nothing is there, the truth, or (Postgres) that their pages hold
# next to nothing, as after a purge, or if they are looked at while somebody fills them.
STATISTICS = [
    ("sqlite", "empty"),
    ("sqlite", "true"),
    ("postgres", "empty"),
    ("postgres", "true"),
    ("postgres", "hollow"),
]


@contextmanager
def filled(
    request: pytest.FixtureRequest,
    folders: pytest.TempPathFactory,
    place: tuple[str, str],
    fill: Callable[[Connection], None],
) -> Iterator[Database]:
    """A database of the kind, analyzed while empty and then filled; one of `STATISTICS` says what follows."""
    kind, told = place
    if kind == "sqlite":
        made = Database(f"sqlite:///{folders.mktemp('plans')}/test.db", clock=FakeClock())
    else:
        url = request.getfixturevalue("postgres_url")
        made = Database(url, schema=f"test_plans_{secrets.token_hex(4)}", clock=FakeClock())
    try:
        _create(made)
        with made.engine.begin() as conn:
            fill(made.bind(conn))
            if told == "hollow":
                _analyze(made)
        if told == "true":
            _analyze(made)
        yield made
    finally:
        if made.schema:
            with made.engine.begin() as conn:
                conn.exec_driver_sql(f'DROP SCHEMA IF EXISTS "{made.schema}" CASCADE')
        made.close()


def _analyze(database: Database) -> None:
    """Tell the planner what can be seen now of these tables, and of nobody else's."""
    prefix = f'"{database.schema}".' if database.schema else ""
    with database.engine.begin() as conn:
        for table in schema.metadata.sorted_tables:
            conn.exec_driver_sql(f"ANALYZE {prefix}{table.name}")


def _create(database: Database) -> None:
    with database.engine.begin() as conn:
        if database.schema:
            conn.exec_driver_sql(f'CREATE SCHEMA "{database.schema}"')
        schema.metadata.create_all(conn.execution_options(schema_translate_map={None: database.schema}))
    _analyze(database)
