"""Taking SQLite's write lock, for which it asks too seldom by itself.

Its own wait asks ever more seldom, in the end ten times a second, and a process with much to do takes the lock again
within a millisecond of giving it back: another one was seen to wait for three seconds, and to lose its leases by it.
"""

import sqlite3
from typing import Any

from sqlalchemy import Connection

from postroad.store.statements import refusal

BEGIN = "BEGIN IMMEDIATE"
# SQLite asks after 1, 2, 5, 10, 15, 20, 25, 25, 25, 50 and 50 ms, then every 100: so it begins anew. Asking oftener
# costs those who work more than it gives to those who wait.
ROUND_MILLISECONDS = 40


def begin(conn: Connection, *, milliseconds: int | None) -> None:
    """Begin a transaction that holds the write lock; wait for it so long, None: for the connection's `busy_timeout`."""
    raw: Any = conn.connection.dbapi_connection
    cursor = raw.cursor()
    try:
        if milliseconds is None:
            cursor.execute("PRAGMA busy_timeout")
            milliseconds = cursor.fetchone()[0]
        cursor.execute(f"PRAGMA busy_timeout = {min(milliseconds, ROUND_MILLISECONDS)}")
        try:
            _take(cursor, rounds=max(1, milliseconds // ROUND_MILLISECONDS))
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {milliseconds}")
    except conn.dialect.loaded_dbapi.Error as error:
        raise refusal(conn, BEGIN, error) from error
    finally:
        cursor.close()


def enter_wal(cursor: Any) -> None:
    """Have the file be in WAL mode, unless it can only be read."""
    # Entering WAL does not wait for other connections as everything else does; beginning a transaction waits.
    for _ in range(100):
        cursor.execute("PRAGMA journal_mode")  # not chained: aiosqlite's adapter returns another cursor
        if cursor.fetchone()[0] == "wal":
            return
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            code = error.sqlite_errorcode & 0xFF
            if code == sqlite3.SQLITE_READONLY:  # a reader changes nothing of a file, its journal's mode neither
                return
            if code != sqlite3.SQLITE_BUSY:
                raise
            cursor.execute(BEGIN)
            cursor.execute("ROLLBACK")


def _take(cursor: Any, *, rounds: int) -> None:
    for left in reversed(range(rounds)):
        try:
            cursor.execute(BEGIN)
        except sqlite3.OperationalError as error:
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY  # the driver's own have none
            if not busy or not left:
                raise
        else:
            return
