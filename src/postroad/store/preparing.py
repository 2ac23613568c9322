"""Prepared statements on Postgres: what we say again and again is parsed and planned once for each session.

That takes most of what the server has to do for a statement about a few rows. It needs a session of our own: a pooler
in transaction mode hands out another one each time, which knows nothing of what was prepared.

Only statements of transactions that write are prepared: these begin with our settings for the planner, so that a plan
that is kept is one by our indexes, whatever the planner knew of the tables that day. psycopg forgets what it has
prepared when it says ROLLBACK.
"""

from typing import Any

from sqlalchemy import Engine, event

PREPARED_AFTER = 2  # of each statement: a command that ends at once would pay for a round trip more
PREPARED_MAX = 500
_ANOTHER_SESSION = ("26000", "42P05")  # than that in which a statement was prepared
CHANGED = ("0A000", *_ANOTHER_SESSION)  # or a table has changed since


def where_sessions_are_ours(engine: Engine) -> None:
    """Have statements prepared on those of this engine's connections that have a session to themselves."""
    event.listen(engine, "connect", _on_connect)


def _on_connect(raw: Any, _record: object) -> None:
    if _backend(raw) == raw.info.backend_pid:
        raw.prepare_threshold, raw.prepared_max = PREPARED_AFTER, PREPARED_MAX


def _backend(raw: Any) -> int | None:
    """Who carries out what is said on this connection; a pooler tells its clients of another one."""
    try:
        with raw.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            (pid,) = cursor.fetchone()
            return int(pid)
    except raw.Error:  # the next one to use the connection hears of it
        return None


def give_up(raw: Any, error: Exception) -> None:
    """Prepare nothing on this connection any more if the session has changed under it."""
    if getattr(error, "sqlstate", None) in _ANOTHER_SESSION:
        raw.prepare_threshold = None
