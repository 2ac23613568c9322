"""Faults before chosen statements of a transaction, COMMIT among them, and what all tables hold afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import psycopg
from sqlalchemy import Connection, Table, event

from postroad.store import dialects
from postroad.store.database import Database
from postroad.store.schema import PREFIX, metadata

# The process dies: nothing more is carried out. The connection breaks: the process lives on, and has others.
Way = Literal["dies", "breaks"]
Rows = dict[str, list[Any]]
COMMIT = "COMMIT"


class Crash(Exception):
    """The death of the process."""


@dataclass
class Seen:
    """The statements that were reached, in their order, and the one before which the fault came."""

    statements: list[str] = field(default_factory=list)
    struck: str = ""


@contextmanager
def striking(database: Database, number: int = 0, *, way: Way = "dies") -> Iterator[Seen]:
    """In the block, strike before the statement of this number, counted from 1; 0: only look on."""
    seen = Seen()

    def reach(conn: Connection, said: str) -> None:
        seen.statements.append(said)
        if len(seen.statements) == number:
            seen.struck = said
            if way == "breaks":
                _sever(conn)
        if way == "dies" and 0 < number <= len(seen.statements):
            raise Crash

    def before_statement(conn: Connection, _cursor: object, statement: str, *_: object) -> None:
        reach(conn, statement)

    def before_commit(conn: Connection) -> None:
        reach(conn, COMMIT)

    event.listen(database.engine, "before_cursor_execute", before_statement)
    # First, since our own engine may tell others and commit in one round trip.
    ours = event.contains(database.engine, "commit", dialects._commit_postgres)
    if ours:
        event.remove(database.engine, "commit", dialects._commit_postgres)
    event.listen(database.engine, "commit", before_commit)
    if ours:
        event.listen(database.engine, "commit", dialects._commit_postgres)
    try:
        yield seen
    finally:
        event.remove(database.engine, "before_cursor_execute", before_statement)
        event.remove(database.engine, "commit", before_commit)


def _sever(conn: Connection) -> None:
    """Break the connection: the driver finds out with the next statement, the server has undone all by then."""
    raw: Any = conn.connection.dbapi_connection
    if conn.dialect.name == "sqlite":
        raw.close()
        return
    url = conn.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as operator:
        there = (raw.info.backend_pid,)
        assert operator.execute("SELECT pg_terminate_backend(%s)", there).fetchone() == (True,)
        while operator.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", there).fetchone():
            pass  # to wait for it, as the server itself can, takes 0.1 s


def _bound(database: Database, conn: Connection) -> Connection:
    return conn.execution_options(schema_translate_map={None: database.schema})


def rows_of(database: Database) -> Rows:
    """All rows of all our tables, without the numbers that the database gives out: a fault leaves gaps in these."""
    with database.engine.connect() as conn:
        return {name: list(conn.exec_driver_sql(select)) for name, select in _selects(database).items()}


@cache
def _selects(database: Database) -> dict[str, str]:
    found = {}
    for table in metadata.sorted_tables:
        columns = ", ".join(column.name for column in table.columns if column.identity is None)
        order = ", ".join(column.name for column in table.primary_key.columns)
        found[table.name.removeprefix(PREFIX)] = f"SELECT {columns} FROM {_named(database, table)} ORDER BY {order}"
    return found


def quicken(database: Database) -> None:
    """Have commits wait for no disk: these tests end no machine."""
    said = "PRAGMA synchronous = OFF" if database.is_sqlite else "SET synchronous_commit = off"
    event.listen(database.engine, "connect", lambda raw, _: raw.execute(said))
    database.engine.dispose()


def keep(database: Database) -> None:
    """Keep a copy of all our tables as they are now."""
    _script(database, "CREATE TABLE {kept} AS SELECT * FROM {table}")


def restore(database: Database) -> None:
    """Put all our tables back to what was kept."""
    given = "" if database.is_sqlite else "OVERRIDING SYSTEM VALUE "
    _script(database, "DELETE FROM {table}", f"INSERT INTO {{table}} {given}SELECT * FROM {{kept}}")


def _script(database: Database, *statements: str) -> None:
    """Run these for each of our tables: on Postgres in one round trip."""
    names = [_named(database, table) for table in metadata.sorted_tables]
    script = [one.format(table=name, kept=f'{name[:-1]}_kept"') for name in names for one in statements]
    with database.engine.begin() as conn:
        for part in script if database.is_sqlite else ["; ".join(script)]:
            conn.exec_driver_sql(part)


def _named(database: Database, table: Table) -> str:
    schema = f'"{database.schema}".' if database.schema else ""
    return f'{schema}"{table.name}"'
