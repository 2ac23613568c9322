"""Postgres schemas with our tables and nothing in them, used again: to make one takes longer than most tests."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from postroad.store import schema

RESTING = 3  # so many are not used for a while: a thread that a test has left behind may still be at one
MIGRATIONS = schema.PREFIX + "migrations"
ROWS_MAX = 1_000  # what held more than that is not used again: dead rows would slow down the next tests

Connection = psycopg.Connection[Any]
_SHAPE = """
SELECT (SELECT count(*) FROM pg_class WHERE relnamespace = %(name)s::regnamespace),
    (SELECT count(*) FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
     WHERE c.relnamespace = %(name)s::regnamespace AND NOT a.attisdropped),
    (SELECT count(*) FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
     WHERE c.relnamespace = %(name)s::regnamespace)
"""
_RESTART = """
SELECT setval(c.oid::regclass, 1, false) FROM pg_class AS c
WHERE c.relnamespace = %(name)s::regnamespace AND c.relkind = 'S'
"""


class Schemas:
    """The schemas of one test process."""

    def __init__(self, url: str) -> None:
        self._url = url.replace("+psycopg", "", 1)
        self._empty: list[str] = []
        self._shapes: dict[str, object] = {}

    @contextmanager
    def lent(self, create: Callable[[str], None]) -> Iterator[str]:
        """A schema for one test. `create` makes it and its tables, if none is left."""
        name = self._empty.pop(0) if len(self._empty) > RESTING else ""
        if not name:
            name = f"test_{secrets.token_hex(6)}"
            create(name)
            with self._connected() as conn:
                self._shapes[name] = self._shape(conn, name)
        yield name
        self._take_back(name)

    def _take_back(self, name: str) -> None:
        with self._connected() as conn:
            if self._shape(conn, name) == self._shapes[name] and self._emptied(conn, name) <= ROWS_MAX:
                self._empty.append(name)
            else:
                self._drop(conn, name)

    def _connected(self) -> Connection:
        conn = psycopg.connect(self._url, autocommit=True)
        # A connection that the test left inside a transaction fails here instead of hanging.
        conn.execute("SET lock_timeout = '10s'")
        return conn

    @staticmethod
    def _shape(conn: Connection, name: str) -> object:
        """What a test may have added to it."""
        steps = None
        if conn.execute("SELECT to_regclass(%s)", [f'"{name}".{MIGRATIONS}']).fetchone() != (None,):
            counted = sql.SQL("SELECT count(*), max(version) FROM {}").format(sql.Identifier(name, MIGRATIONS))
            steps = conn.execute(counted).fetchone()
        return conn.execute(_SHAPE, {"name": name}).fetchone(), steps

    @staticmethod
    def _drop(conn: Connection, name: str) -> None:
        conn.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))

    @staticmethod
    def _emptied(conn: Connection, name: str) -> int:
        """Empty its tables; how many rows were there."""
        rows = 0
        with conn.transaction():
            for table in schema.metadata.sorted_tables:
                rows += conn.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(name, table.name))).rowcount
            conn.execute(_RESTART, {"name": name})
        return rows

    def close(self) -> None:
        """Drop them all."""
        with self._connected() as conn:
            for name in self._empty:
                self._drop(conn, name)
