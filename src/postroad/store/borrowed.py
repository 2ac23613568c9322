"""Connections that are the user's: whether our rows can be written in their transaction."""

import os
import sqlite3

from sqlalchemy import Connection, Engine

from postroad.model.errors import NotInTransaction, Refused
from postroad.store import dialects


def check_joined(conn: Connection) -> None:
    """Refuse a connection whose transaction could not hold our rows: autocommit, or another SQLite library."""
    raw = conn.connection.dbapi_connection
    if conn.dialect.name == "postgresql":
        if dialects.begins_itself(conn):
            if not conn.in_transaction():
                conn.begin()
        elif getattr(raw, "autocommit", False):
            raise NotInTransaction("This connection is in autocommit mode.")
        return
    driver = conn.connection.driver_connection
    driver = getattr(driver, "_conn", driver)  # aiosqlite wraps the real one
    if not isinstance(driver, sqlite3.Connection):
        raise Refused(
            f"This connection comes from another SQLite library ({type(driver).__module__}); two copies in one "
            "process drop each other's locks. Put `import postroad.bundled_sqlite` first, or use sqlite3."
        )
    if driver.in_transaction:
        return
    if conn.get_execution_options().get("isolation_level") == "AUTOCOMMIT" or driver.isolation_level is None:
        raise NotInTransaction("This connection is in autocommit mode.")
    # The driver would begin at the first INSERT, but a SAVEPOINT before it would commit when it is released.
    conn.exec_driver_sql("BEGIN IMMEDIATE")


def check_same_database(conn: Connection, engine: Engine) -> None:
    """Refuse a connection that is visibly to another database than the engine's."""
    ours = engine.dialect.name
    if conn.dialect.name != ours:
        raise Refused(
            f"This is a {conn.dialect.name} connection, but the app's database is {ours}: "
            "both must be the same database."
        )
    same = same_file(conn, engine)
    if ours == "sqlite" and same is None and not conn.exec_driver_sql("PRAGMA database_list").one()[2]:
        raise Refused("This connection is to a SQLite database in memory, but the app's is a file.", field="connection")
    if ours == "sqlite" and same is False:
        raise Refused(
            f"This connection is to {conn.engine.url.database}, but the app's database is {engine.url.database}."
        )


def same_file(conn: Connection, engine: Engine) -> bool | None:
    """Whether a SQLite connection is to the engine's file; None if their URLs do not say."""
    if conn.engine is engine:
        return True
    theirs, ours = conn.engine.url.database, engine.url.database
    if conn.dialect.name != engine.dialect.name or not theirs or not ours:
        return None
    return os.path.realpath(theirs) == os.path.realpath(ours)
