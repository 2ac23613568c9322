"""What differs between SQLite and Postgres around a transaction: opening, beginning, checking, telling errors apart."""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, Pool, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as NoConnectionFree

from postroad.model.errors import DatabaseBusy, DatabaseReplaced, InvalidInput, Refused, TransactionAborted
from postroad.store import preparing, sqlite_file, sqlite_lock, urls
from postroad.store.statements import OURS_OPTION, READ_OPTION, SCHEMA_OPTION, refusal, refusal_of

GROUP_OPTION = "postroad_group"
TELL_OPTION = "postroad_tell"
LOCK_WAIT_MILLISECONDS = 100
BUSY_MILLISECONDS = 5_000
# The file cannot be written to or opened now: no word about what was to be written.
_SQLITE_NO_FILE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_CONFIGURED = "postroad_configured"
_OURS: Mapping[str, Any] = {OURS_OPTION: True}
_AS_IT_IS: Mapping[str, Any] = {"prepare": False}  # several statements at once cannot be prepared
# These tables never have true statistics: what we look for is few rows, each found through its index. Where a
# planner takes a table for nearly empty, as after a purge, it would read a whole index to hash it.
_NOT_OURS = ("bitmapscan", "seqscan", "hashjoin", "mergejoin")
_DISTRUST = "; ".join(f"SET LOCAL enable_{name} = off" for name in _NOT_OURS)
_TRUST = "; ".join(f"SET LOCAL enable_{name} TO DEFAULT" for name in _NOT_OURS)
_DISTRUST_NOW = "SELECT " + ", ".join(f"set_config('enable_{name}', 'off', true)" for name in _NOT_OURS)
_DISTRUST_SESSION = "; ".join(f"SET enable_{name} = off" for name in _NOT_OURS)
_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_BEGIN_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"


def open_engine(database: str | URL) -> Engine:
    """An engine of our own for a database URL; postgres:// and postgresql:// mean psycopg 3.

    Its errors show no parameters: these are users' payloads, and errors are logged and stored.

    Raises:
        InvalidInput: It is no URL, or of a database that we do not work with. No password is shown.
    """
    url = urls.checked(database)
    if url.get_backend_name() == "sqlite":
        engine = configure_sqlite(
            create_engine(
                url,
                # Ours are more than the driver keeps by itself, and would be parsed again and again.
                connect_args={"timeout": BUSY_MILLISECONDS / 1000, "cached_statements": 512},
                hide_parameters=True,
                execution_options=_OURS,
            )
        )
        return sqlite_file.make_private(engine)  # behind its watch: what was lost is not made anew
    engine = create_engine(
        url,
        execution_options=_OURS,
        isolation_level="AUTOCOMMIT",  # as far as the driver knows: `_begin_postgres` begins
        use_native_hstore=False,  # nothing of ours is one; looking for it costs each process a transaction
        pool_size=12,
        max_overflow=4,
        pool_timeout=30,
        # Errors are logged; what they were about, payloads among it, is nobody's business there.
        hide_parameters=True,
        connect_args={"prepare_threshold": None},  # until it is known that the session is ours
    )
    preparing.where_sessions_are_ours(engine, _DISTRUST_SESSION)
    event.listen(engine, "begin", _begin_postgres)
    event.listen(engine, "commit", _commit_postgres)
    return engine


def _begin_postgres(conn: Connection) -> None:
    """Begin a transaction of our own engine, with all that it needs, in one round trip."""
    raw: Any = conn.connection.dbapi_connection
    if not raw.autocommit or not begins_itself(conn):
        return
    _script(conn, _beginning(conn))


def _commit_postgres(conn: Connection) -> None:
    """Commit a transaction of our own engine that tells others, in one round trip; any other one is SQLAlchemy's."""
    topics = conn.get_execution_options().get(TELL_OPTION)
    if topics and begins_itself(conn):
        conn.execution_options(**{TELL_OPTION: None})
        _script(conn, f"{_tell(conn, topics)}; COMMIT")


def _script(conn: Connection, sql: str) -> None:
    """Run statements without parameters in one round trip; none of those behind one that fails."""
    raw: Any = conn.connection.dbapi_connection
    cursor = raw.cursor()
    try:
        cursor.execute(sql, **({} if conn.dialect.name == "sqlite" else _AS_IT_IS))
    except conn.dialect.loaded_dbapi.Error as error:
        raise refusal(conn, sql, error) from error
    finally:
        cursor.close()


def begins_itself(conn: Connection) -> bool:
    """Whether it is of our own engine, and begins a transaction although the driver knows of none."""
    options = conn.get_execution_options()
    return bool(options.get(OURS_OPTION)) and "isolation_level" not in options


def _beginning(conn: Connection) -> str:
    """What begins a transaction. One that writes distrusts; a session of ours does already, as others are told to."""
    options, distrusts = conn.get_execution_options(), preparing.is_ours(conn)
    if options.get(READ_OPTION):
        return f"{_BEGIN_READ}; {_TRUST}" if distrusts else _BEGIN_READ
    begin = _BEGIN_WRITE if distrusts else f"{_BEGIN_WRITE}; {_DISTRUST}"
    return f"{begin}; SET LOCAL lock_timeout = {LOCK_WAIT_MILLISECONDS}" if options.get(GROUP_OPTION) else begin


def check_source(database: object) -> None:
    """Refuse what can be neither a database's URL nor an engine, as early as it is given; nothing is connected."""
    if isinstance(database, str | URL):
        urls.parsed(database)
    elif hasattr(database, "sync_engine") or not isinstance(database, Engine):
        check_engine(database)


def check_engine(engine: object) -> Engine:
    """The user's engine, if it is one that we can work with; else Refused with the cure."""
    if hasattr(engine, "sync_engine"):
        raise Refused("Pass a (sync) Engine or a URL, not an AsyncEngine; `join` takes async connections.")
    if not isinstance(engine, Engine):
        raise InvalidInput(f"database must be a URL or an Engine, got {type(engine).__name__}.", field="database")
    if engine.dialect.name == "sqlite" and not getattr(engine, _CONFIGURED, False):
        raise Refused("Prepare this SQLite engine first: engine = postroad.sqlite.configure(engine).")
    if engine.dialect.name == "sqlite":
        urls.refuse_memory(engine.url)
    if engine.dialect.name not in ("sqlite", "postgresql"):
        raise InvalidInput(f"database must be sqlite or postgresql, got {engine.dialect.name}.", field="database")
    return engine


def connect(engine: Engine, beside: Pool | None) -> Connection:
    """A connection of this engine, or of a pool beside it; where there is none to be had, it is SQLAlchemy's error."""
    if beside is None:
        return engine.connect()
    dialect: Any = engine.dialect
    try:
        return Connection(engine, beside.connect())
    except dialect.loaded_dbapi.Error as error:
        raise refusal_of(dialect, None, error) from error


def configure_sqlite(engine: Engine) -> Engine:
    """Prepare a SQLite engine: WAL, synchronous=FULL, and BEGIN IMMEDIATE at the start of each transaction.

    The driver's own transaction handling is switched off, because it begins before the first write only and so
    leaves earlier reads outside the transaction.
    """
    if engine.dialect.name != "sqlite":
        raise InvalidInput(f"engine must be a sqlite one, got {engine.dialect.name}.", field="engine")
    if getattr(engine, _CONFIGURED, False):
        return engine
    sqlite_file.watch(engine)
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)
    setattr(engine, _CONFIGURED, True)
    return engine


def _on_connect(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_MILLISECONDS}")
    sqlite_lock.enter_wal(cursor)
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def _on_begin(conn: Connection) -> None:
    if conn.get_execution_options().get(READ_OPTION):
        _say(conn, "BEGIN")
    else:
        sqlite_lock.begin(conn, milliseconds=BUSY_MILLISECONDS if is_ours(conn) else None)


def _say(conn: Connection, sql: str) -> None:
    """Run a word to SQLite. SQLAlchemy's own way, which hooks of the user's hear, takes many times what SQLite does."""
    if is_ours(conn) and not conn.dispatch.before_cursor_execute:
        _script(conn, sql)
    else:
        conn.exec_driver_sql(sql)


def prepare(conn: Connection, *, read: bool = False, grouped: bool = False) -> None:
    """Options that our own transaction needs before it begins."""
    if grouped:
        conn.execution_options(**{GROUP_OPTION: True})
    if conn.dialect.name == "postgresql" and not is_ours(conn):
        level = "REPEATABLE READ" if read else "READ COMMITTED"
        conn.execution_options(isolation_level=level, postgresql_readonly=read)
    elif read:
        conn.execution_options(**{READ_OPTION: True})


def is_ours(conn: Connection) -> bool:
    """Whether the connection is of an engine that we have made."""
    return bool(conn.get_execution_options().get(OURS_OPTION))


@contextmanager
def refusing_writes(conn: Connection) -> Iterator[None]:
    """For a transaction that only reads: SQLite is told in it, Postgres when it begins."""
    if conn.dialect.name != "sqlite":
        yield
        return
    _say(conn, "PRAGMA query_only = ON")
    try:
        yield
    finally:
        if not conn.invalidated:  # else it is thrown away
            _say(conn, "PRAGMA query_only = OFF")


def aborted(conn: Connection) -> bool:
    """Whether the database has aborted this transaction, so that COMMIT would roll back and answer success."""
    if conn.dialect.name != "postgresql":
        return False
    from psycopg.pq import TransactionStatus

    raw: Any = conn.connection.dbapi_connection
    status: TransactionStatus = raw.info.transaction_status
    # Idle: psycopg begins with the first statement, and there was none.
    return status not in (TransactionStatus.INTRANS, TransactionStatus.IDLE)


def is_busy(error: DBAPIError) -> bool:
    """Whether SQLite's write lock could not be had in time."""
    code = getattr(error.orig, "sqlite_errorcode", 0) or 0
    return code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def busy(error: DBAPIError) -> DatabaseBusy:
    """The error of a write lock that could not be had, with the cause that is the caller's own."""
    return DatabaseBusy(
        "If this program has itself a transaction open that writes to this file, it waits for itself. Use "
        "post.join(connection) with that transaction's connection instead of post.begin(); what takes no connection, "
        f"such as post.report, is called after that transaction. ({error.orig})"
    )


def is_transient(error: DBAPIError, *, grouped: bool = False) -> bool:
    """Whether running the same transaction again may succeed and the database says that nothing was written.

    A group (`grouped`) is not run again as it was if it met a lock or a deadlock: one of its members is to blame.
    """
    # A connection that broke before COMMIT has written nothing; another one may stand, as after a server's restart.
    state = getattr(error.orig, "sqlstate", None)
    if error.connection_invalidated or is_busy(error) or state in preparing.CHANGED:
        return True
    return not grouped and state in ("40001", "40P01", "55P03")


def is_away(error: Exception) -> bool:
    """Whether the database could not be reached, not in time, or has no space, before anything was committed."""
    if isinstance(error, DatabaseBusy | DatabaseReplaced | NoConnectionFree):
        return True
    if not isinstance(error, DBAPIError):
        return False
    return error.connection_invalidated or (isinstance(error, OperationalError) and _not_served(error))


def is_cancelled(error: Exception) -> bool:
    """Whether the server cut a statement short: it took longer than it may, or somebody said so."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) == "57014"


def _not_served(error: OperationalError) -> bool:
    # Connecting failed: psycopg has no SQLSTATE then, or one of class 57 (shutdown) or 53 (too many clients; a full
    # disk is of this class too).
    state = getattr(error.orig, "sqlstate", "")
    code = (getattr(error.orig, "sqlite_errorcode", 0) or 0) & 0xFF
    return state is None or state[:2] in ("57", "53", "08") or code in _SQLITE_NO_FILE


def check_server(conn: Connection) -> list[str]:
    """What of this server's settings makes committed work less than durable, as sentences for an operator.

    Raises:
        Refused: It is a standby, which takes no writes.
    """
    if conn.dialect.name != "postgresql":
        return []
    row = conn.exec_driver_sql(
        "SELECT pg_is_in_recovery(), current_setting('fsync'), current_setting('full_page_writes'), "
        "current_setting('synchronous_commit')"
    ).one()
    if row[0]:
        raise Refused("This Postgres is a standby; point Postroad at the primary.")
    told = zip(("fsync", "full_page_writes", "synchronous_commit"), row[1:], strict=True)
    return [
        f"Postgres runs with {name}=off: what was committed can be lost in a crash."
        for name, is_ in told
        if is_ == "off"
    ]


def database_micros(conn: Connection) -> int | None:
    """The database server's clock in microseconds, where there is a server."""
    if conn.dialect.name != "postgresql":
        return None
    stamp = conn.exec_driver_sql("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)").scalar_one()
    return int(stamp)


def distrust_statistics(conn: Connection) -> None:
    """For this transaction, plan by our indexes: these tables never have true statistics."""
    if conn.dialect.name == "postgresql" and not _begins_distrusting(conn):
        conn.exec_driver_sql(_DISTRUST_NOW)


def _begins_distrusting(conn: Connection) -> bool:
    """Whether `_begin_postgres` has said it already."""
    return begins_itself(conn) and not conn.get_execution_options().get(READ_OPTION)


@contextmanager
def users_plans(conn: Connection) -> Iterator[None]:
    """Let code of the user's, which runs in our transaction, plan as the database is set up to."""
    ours = conn.dialect.name == "postgresql" and _begins_distrusting(conn)
    if ours:
        conn.exec_driver_sql(_TRUST)
    yield
    if aborted(conn):
        raise TransactionAborted
    if ours:
        conn.exec_driver_sql(_DISTRUST)


def bound_lock_waits(conn: Connection, *, milliseconds: int) -> None:
    """For this transaction, wait for no row lock longer than that: it is a group, in which others wait with it.

    SQLite has one lock, and whoever has begun has it.
    """
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql(f"SELECT set_config('lock_timeout', '{milliseconds}ms', true)")


def is_lock_timeout(error: DBAPIError) -> bool:
    """Whether a lock could not be had in the time that `bound_lock_waits` gives."""
    return getattr(error.orig, "sqlstate", None) == "55P03"


_NAME_LOCKS = 0x706F7374  # our class of advisory locks; two names that hash alike only wait for each other


def try_lock_names(conn: Connection, names: Sequence[str], *, limit: int) -> list[str]:
    """The first `limit` of the names that nobody else has locked, now locked until the transaction ends.

    For what has no row yet that could be locked; names of another schema's tables are other names. On SQLite the
    transaction is the lock.
    """
    if conn.dialect.name != "postgresql":
        return list(names[:limit])
    found = conn.exec_driver_sql(
        "SELECT value FROM json_array_elements_text(CAST(%s AS json)) "
        "WHERE pg_try_advisory_xact_lock(%s, hashtext(coalesce(%s, current_schema()) || '/' || value)) LIMIT %s",
        (json.dumps(list(names)), _NAME_LOCKS, conn.get_execution_options().get(SCHEMA_OPTION), limit),
    )
    return list(found.scalars())


CHANNEL = "postroad"


def channel(schema: str | None) -> str:
    """The Postgres channel on which processes wake each other: one per schema of our tables."""
    if schema is None:
        return CHANNEL
    return f"{CHANNEL}_{hashlib.sha256(schema.encode()).hexdigest()[:12]}"


def notify_at_commit(conn: Connection, topics: frozenset[str]) -> None:
    """Let a user's COMMIT wake other processes' loops, where the database can (SQLite's are told by its file).

    A queue of notifications that is full, because some session that listens never reads, would fail that COMMIT:
    where it is half full nobody is told, and the loops find out by polling.
    """
    if conn.dialect.name != "postgresql" or not topics:
        return
    if begins_itself(conn):
        conn.execution_options(**{TELL_OPTION: topics | (conn.get_execution_options().get(TELL_OPTION) or set())})
    else:
        conn.exec_driver_sql(_tell(conn, topics))


def _tell(conn: Connection, topics: Set[str]) -> str:
    told = channel(conn.get_execution_options().get(SCHEMA_OPTION))
    return f"SELECT pg_notify('{told}', '{','.join(sorted(topics))}') WHERE pg_notification_queue_usage() < 0.5"
