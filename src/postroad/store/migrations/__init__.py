"""The schema's ladder: numbered steps, forwards only, each a frozen SQL text per dialect.

All pending steps are one transaction under a lock, so that an interrupted migration leaves nothing and of two
processes one migrates and both succeed. Code that was written for schema N runs on N and on N + 1, unless a
step says otherwise (`oldest_code`): first the schema goes up, then the processes are replaced one by one.
"""

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, inspect

from postroad.model.errors import SchemaMismatch
from postroad.model.failpoints import failpoint
from postroad.store.database import Database
from postroad.store.migrations.steps import STEPS, Step
from postroad.store.schema import PREFIX
from postroad.store.statements import SCHEMA_OPTION, Statement, render

latest = STEPS[-1].version


class StepStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A step as `postroad migrate status` shows it; `applied_at` None: still to come (microseconds)."""

    version: int
    name: str
    applied_at: int | None
    oldest_code: int


_LADDER = """CREATE TABLE {p}migrations (
    version INTEGER NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at BIGINT NOT NULL,
    oldest_code INTEGER NOT NULL
)"""
_APPLIED = Statement("SELECT version, name, applied_at, oldest_code FROM {p}migrations ORDER BY version")
_APPLY = Statement("""
    INSERT INTO {p}migrations (version, name, applied_at, oldest_code)
    VALUES (:version, :name, :now, :oldest_code)
""")
_LOCK = Statement("SELECT pg_advisory_xact_lock(hashtext('postroad.migrations'), hashtext(:schema))")
_SCHEMA_EXISTS = Statement("SELECT 1 FROM pg_namespace WHERE nspname = :schema")
_NOW = {
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
}


def migrate(database: Database) -> list[str]:
    """Bring the schema up to this code's; the names of the steps that were applied, none if it was there.

    Raises:
        SchemaMismatch: The schema is too new for this code.
    """
    if database.read(current) >= latest:  # so that a start waits for nobody who writes
        database.read(check)
        return []
    return database.transact(climb, lock=lock)


def lock(conn: Connection) -> None:
    """Let one migration run at a time. On SQLite the transaction itself has seen to that."""
    if conn.dialect.name == "postgresql":
        _LOCK(conn, schema=_schema(conn) or "")


def climb(conn: Connection, *, now: int) -> list[str]:
    """`migrate` over a connection that holds `lock`; the caller commits."""
    version = current(conn)
    if version >= latest:
        check(conn)
        return []
    if version == 0:
        _create_schema(conn)
        _execute(conn, _LADDER)
    return [_apply(conn, step, now) for step in STEPS if step.version > version]


def current(conn: Connection) -> int:
    """The version of the schema that the database has, 0 when there is none."""
    applied = _applied(conn)
    return applied[-1].version if applied else 0


def check(conn: Connection) -> None:
    """See that this code may run on the database's schema.

    Raises:
        SchemaMismatch: It is missing, older than this code needs, or too new for it; says what to do.
    """
    applied = _applied(conn)
    version = applied[-1].version if applied else 0
    if version < latest:
        found = f"has schema {version}" if version else "has no tables of Postroad yet"
        raise SchemaMismatch(
            f"The database {found}, this code needs {latest}: run `postroad migrate`.", version=version
        )
    if version > latest + 1 or max(step.oldest_code for step in applied) > latest:
        raise SchemaMismatch(
            f"The database has schema {version}, this code was written for {latest}: upgrade postroad.",
            version=version,
        )


def status(conn: Connection) -> list[StepStatus]:
    """Every step that the database has or this code knows, lowest first."""
    applied = _applied(conn)
    done = {step.version for step in applied}
    pending = [
        StepStatus(version=step.version, name=step.name, applied_at=None, oldest_code=step.oldest_code)
        for step in STEPS
        if step.version not in done
    ]
    return sorted([*applied, *pending], key=lambda step: step.version)


def sql(dialect: str, schema: str | None = None, *, after: int = 0) -> str:
    """The text that `migrate` would run on a database at version `after`, for those who run SQL themselves.

    Args:
        dialect: `postgresql` or `sqlite`.
    """
    statements = [f'CREATE SCHEMA IF NOT EXISTS "{schema}"'] if schema else []
    statements.append(_LADDER)
    for step in STEPS[after:]:
        statements += step.statements(dialect)
        statements.append(
            f"INSERT INTO {{p}}migrations (version, name, applied_at, oldest_code)\n"
            f"VALUES ({step.version}, '{step.name}', {_NOW[dialect]}, {step.oldest_code})"
        )
    return "".join(f"{render(statement, dialect, schema)};\n" for statement in ("BEGIN", *statements, "COMMIT"))


def _schema(conn: Connection) -> str | None:
    schema: str | None = conn.get_execution_options().get(SCHEMA_OPTION)
    return schema


def _applied(conn: Connection) -> Sequence[StepStatus]:
    # Asked of the catalogue first: on Postgres a failed SELECT would abort the transaction.
    if not inspect(conn).has_table(PREFIX + "migrations", schema=_schema(conn)):
        return []
    return _APPLIED(conn).into(StepStatus)


def _create_schema(conn: Connection) -> None:
    # Not IF NOT EXISTS: that needs the right to create schemas even where there is nothing to create.
    schema = _schema(conn)
    if schema and not _SCHEMA_EXISTS(conn, schema=schema).all():
        _execute(conn, f'CREATE SCHEMA "{schema}"')


def _apply(conn: Connection, step: Step, now: int) -> str:
    for statement in step.statements(conn.dialect.name):
        failpoint("migration.statement")
        _execute(conn, statement)
    _APPLY(conn, version=step.version, name=step.name, oldest_code=step.oldest_code, now=now)
    return step.title


def _execute(conn: Connection, statement: str) -> None:
    conn.exec_driver_sql(render(statement, conn.dialect.name, _schema(conn)))
