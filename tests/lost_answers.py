"""Connections that break in COMMIT, seen as the driver sees it."""

import sqlite3
from typing import Any

import psycopg
import pytest

from postroad.store.database import Database


def lose_answers(database: Database, monkeypatch: pytest.MonkeyPatch, *, happened: bool) -> list[object]:
    """Have the connection break in every COMMIT from now on, after it happened or before."""
    dialect, lost = database.engine.dialect, list[object]()
    original = dialect.do_commit

    def do_commit(connection: Any) -> None:
        if happened:
            original(connection)
        lost.append(connection)
        connection.dbapi_connection.close()
        if database.is_sqlite:
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.")
        raise psycopg.OperationalError("the connection is closed")

    monkeypatch.setattr(dialect, "do_commit", do_commit)
    return lost
