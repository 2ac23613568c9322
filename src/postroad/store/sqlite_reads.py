"""Connections to a SQLite file for transactions that only read.

They are told to refuse writes once, when they are opened: at that word SQLite forgets all that a connection has
compiled, which takes longer than most of what is read, and as much again at the next write.
"""

from typing import Any

from sqlalchemy import Engine, Pool, event


def readers(engine: Engine) -> Pool:
    """Such connections, beside an engine's own and opened as these are."""
    pool = engine.pool.recreate()
    event.listen(pool, "connect", _refuse_writes)
    return pool


def _refuse_writes(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA query_only = ON")
    cursor.close()
