"""Sessions of our own on Postgres: what we say again and again is parsed and planned once for each.

That takes most of what the server has to do for a statement about a few rows. So does setting the planner at the
beginning of each transaction that writes, which is done once for the session as well. A pooler in transaction mode
hands out another session each time, which knows nothing of all this.

Only statements of transactions that write are prepared: these begin with our settings for the planner, so that a plan
that is kept is one by our indexes, whatever the planner knew of the tables that day. psycopg forgets what it has
prepared when it says ROLLBACK.
"""

from typing import Any

from sqlalchemy import Connection, Engine, event

PREPARED_AFTER = 2  # of each statement: a command that ends at once would pay for a round trip more
PREPARED_MAX = 500
_OURS = "postroad_session"
_ANOTHER_SESSION = ("26000", "42P05")  # than that in which a statement was prepared
CHANGED = ("0A000", *_ANOTHER_SESSION)  # or a table has changed since


def where_sessions_are_ours(engine: Engine, settings: str) -> None:
    """Have statements prepared on those of this engine's connections that have a session to themselves.

    `settings` are said there once; `is_ours` tells where.
    """

    def connected(raw: Any, record: Any) -> None:
        if _backend(raw) == raw.info.backend_pid:
            raw.prepare_threshold, raw.prepared_max = PREPARED_AFTER, PREPARED_MAX
            with raw.cursor() as cursor:
                cursor.execute(settings, prepare=False)
            record.info[_OURS] = True

    event.listen(engine, "connect", connected)


def is_ours(conn: Connection) -> bool:
    """Whether this connection's session is ours, with the settings that were said in it."""
    return _OURS in conn.info


def _backend(raw: Any) -> int | None:
    """Who carries out what is said on this connection; a pooler tells its clients of another one."""
    try:
        with raw.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (pid,) = cursor.fetchone()
            return int(pid)
    except raw.Error:  # the next one to use the connection hears of it
        return None


def give_up(conn: Connection, error: Exception) -> None:
    """Take this connection for one without a session of its own if the session has changed under it."""
    if getattr(error, "sqlstate", None) in _ANOTHER_SESSION:
        raw: Any = conn.connection.dbapi_connection
        raw.prepare_threshold = None
        conn.info.pop(_OURS, None)
