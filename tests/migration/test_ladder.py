"""The ladder: forwards only, one transaction, one process at a time, and the same tables as the schema."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect, text

from postroad.model import failpoints
from postroad.model.clock import FakeClock
from postroad.model.errors import SchemaMismatch
from postroad.store import migrations, schema
from postroad.store.database import Database
from postroad.store.migrations.steps import STEPS, Step
from postroad.store.statements import Statement
from tests.migration import freeze

ADD = Statement("INSERT INTO {p}migrations VALUES (:version, 'later', 0, :oldest_code)")
Open = Callable[[], Database]


@pytest.fixture(params=["sqlite", "postgres"])
def open_database(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens the test's one empty database, each time with connections of its own."""
    opened: list[Database] = []
    if request.param == "sqlite":
        url, name = f"sqlite:///{request.getfixturevalue('sqlite_path')}", None
    else:
        url, name = request.getfixturevalue("postgres_url"), request.getfixturevalue("fresh_schema")

    def open_() -> Database:
        opened.append(Database(url, schema=name, clock=FakeClock()))
        return opened[-1]

    yield open_
    for database in opened:
        database.close()


@pytest.fixture
def database(open_database: Open) -> Database:
    """An empty database: no tables, and on Postgres no schema."""
    return open_database()


@pytest.fixture
def disarm() -> Iterator[None]:
    yield
    failpoints.arm(None)


def tables(conn: Connection, name: str | None) -> dict[str, Any]:
    """Every table with its columns, keys, checks and indexes, as the database itself tells it."""
    seen = inspect(conn)
    found = {}
    for table in sorted(seen.get_table_names(schema=name)):
        found[table] = {
            "columns": [{**c, "type": str(c["type"])} for c in seen.get_columns(table, schema=name)],
            "primary key": seen.get_pk_constraint(table, schema=name)["constrained_columns"],
            "unique": seen.get_unique_constraints(table, schema=name),
            "checks": seen.get_check_constraints(table, schema=name),
            "indexes": indexes(conn, table, name),
            "options": options(conn, table, name),
        }
    return found


def indexes(conn: Connection, table: str, name: str | None) -> list[str]:
    """The text of each index, predicates too."""
    if conn.dialect.name == "sqlite":
        asked = text("SELECT sql FROM sqlite_master WHERE type = 'index' AND tbl_name = :t AND sql IS NOT NULL")
    else:
        asked = text("SELECT replace(indexdef, :s, '') FROM pg_indexes WHERE tablename = :t AND schemaname = :s")
    given = {"t": table} if conn.dialect.name == "sqlite" else {"t": table, "s": name}
    return sorted(conn.execute(asked, given).scalars())


def options(conn: Connection, table: str, name: str | None) -> Any:
    """What a reflected column doesn't say: AUTOINCREMENT, identity caches, collations, fill factors."""
    if conn.dialect.name == "sqlite":
        sql = conn.execute(text("SELECT sql FROM sqlite_master WHERE name = :t"), {"t": table}).scalar_one()
        return "AUTOINCREMENT" in sql
    given = {"t": f'"{name}".{table}'}
    own = conn.execute(text("SELECT reloptions FROM pg_class WHERE oid = CAST(:t AS regclass)"), given).scalar_one()
    columns = conn.execute(
        text("SELECT attname, attcollation, attidentity FROM pg_attribute WHERE attrelid = CAST(:t AS regclass)"),
        given,
    )
    return own, sorted(tuple(column) for column in columns)


def create_all(conn: Connection, name: str | None) -> None:
    if name:
        conn.exec_driver_sql(f'CREATE SCHEMA "{name}"')
    schema.metadata.create_all(conn.execution_options(schema_translate_map={None: name}))


def test_create_all_equals_replay(database: Database) -> None:
    """The ladder ends with the very tables, columns, keys, checks and indexes that the schema declares."""
    with database.engine.begin() as conn:
        create_all(conn, database.schema)
        declared = tables(conn, database.schema)
        if database.schema:
            conn.exec_driver_sql(f'DROP SCHEMA "{database.schema}" CASCADE')
        else:
            schema.metadata.drop_all(conn)
    migrations.migrate(database)
    with database.engine.begin() as conn:
        replayed = tables(conn, database.schema)
    assert replayed.pop("postroad_migrations")
    hint = "Before the first release: python -m tests.migration.freeze; afterwards add a step."
    assert replayed == declared, hint


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_the_first_step_is_the_schema(dialect: str) -> None:
    """Until the first release the first step is what `python -m tests.migration.freeze` writes."""
    if len(STEPS) == 1:
        assert ";\n".join(STEPS[0].statements(dialect)) + ";\n" == freeze.text(dialect)


def test_migrating_twice_does_nothing(database: Database) -> None:
    """The first call names what it applied, the second applies nothing; the check is content."""
    assert migrations.migrate(database) == [step.title for step in STEPS]
    assert migrations.migrate(database) == []
    assert database.read(migrations.current) == migrations.latest
    database.read(migrations.check)


def test_an_up_to_date_schema_needs_no_lock(open_database: Open) -> None:
    """A process starts while another one writes, for however long."""
    writing, starting = open_database(), open_database()
    migrations.migrate(writing)
    with writing.engine.begin() as conn:
        migrations.lock(conn)
        assert migrations.migrate(starting) == []


def test_two_processes_at_once(open_database: Open) -> None:
    """Of many that migrate an empty database at once, one does it and all succeed."""
    databases, start = [open_database() for _ in range(5)], threading.Barrier(5)

    def migrate(database: Database) -> list[str]:
        start.wait()
        return migrations.migrate(database)

    with ThreadPoolExecutor(5) as pool:
        applied = list(pool.map(migrate, databases))
    assert sorted(map(len, applied)) == [0, 0, 0, 0, len(STEPS)]
    assert databases[0].read(migrations.current) == migrations.latest


@pytest.mark.usefixtures("disarm")
def test_an_interrupted_migration_leaves_nothing(open_database: Open) -> None:
    """Whichever statement it breaks at, nothing of the migration stays, and the next one succeeds."""
    database = open_database()
    count = sum(len(step.statements(database.engine.dialect.name)) for step in STEPS)
    for broken in range(count):
        reached = iter(range(count))

        def fail(name: str, broken: int = broken, reached: Iterator[int] = reached) -> None:
            if name == "migration.statement" and next(reached) == broken:
                raise InterruptedError(name)

        failpoints.arm(fail)
        with pytest.raises(InterruptedError):
            migrations.migrate(database)
        failpoints.arm(None)
        with database.engine.begin() as conn:
            assert not [t for t in inspect(conn).get_table_names(schema=database.schema) if "postroad" in t]
    assert migrations.migrate(database)


def test_a_missing_schema_is_refused(database: Database) -> None:
    """Without tables the check says which command makes them."""
    with pytest.raises(SchemaMismatch, match=r"no tables of Postroad yet.*`postroad migrate`"):
        database.read(migrations.check)
    assert database.read(migrations.current) == 0


def test_an_old_schema_is_refused(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema older than the code is refused with both versions and the command to run."""
    migrations.migrate(database)
    monkeypatch.setattr(migrations, "latest", migrations.latest + 1)
    with pytest.raises(SchemaMismatch, match=r"has schema 1, this code needs 2: run `postroad migrate`"):
        database.read(migrations.check)


@pytest.mark.parametrize(
    ("ahead", "oldest_code", "runs"),
    [(1, 1, True), (1, 2, False), (2, 1, False)],
    ids=["next", "next but the old code may not run on it", "next but one"],
)
def test_code_runs_on_its_schema_and_the_next(database: Database, ahead: int, oldest_code: int, runs: bool) -> None:
    """Code N runs on schema N + 1 unless that step says otherwise, and on nothing beyond it."""
    migrations.migrate(database)
    for version in range(2, 2 + ahead):
        database.transact(lambda conn, *, now, v=version: ADD(conn, version=v, oldest_code=oldest_code))
    if runs:
        database.read(migrations.check)
        assert migrations.migrate(database) == []
    else:
        with pytest.raises(SchemaMismatch, match="this code was written for 1: upgrade postroad"):
            database.read(migrations.check)
        with pytest.raises(SchemaMismatch):
            migrations.migrate(database)


def test_a_pending_step_is_applied(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that has some steps gets the ones that it lacks, and only these."""
    migrations.migrate(database)
    step = Step(version=2, name="more", oldest_code=1)
    monkeypatch.setattr(Step, "statements", lambda self, dialect: ["CREATE TABLE {p}more (id INTEGER)"])
    monkeypatch.setattr(migrations, "STEPS", (*STEPS, step))
    monkeypatch.setattr(migrations, "latest", 2)
    assert [s.applied_at is None for s in database.read(migrations.status)] == [False, True]
    assert migrations.migrate(database) == ["0002_more"]
    database.read(migrations.check)
    with database.engine.begin() as conn:
        assert inspect(conn).has_table("postroad_more", schema=database.schema)


def test_status_lists_each_step(database: Database) -> None:
    """Before and after: every step with its number, its name and when it was applied."""
    assert [(s.version, s.name, s.applied_at) for s in database.read(migrations.status)] == [(1, "tables", None)]
    migrations.migrate(database)
    [step] = database.read(migrations.status)
    assert step.applied_at == database.clock.wall()


def test_the_printed_sql_does_the_same(open_database: Open) -> None:
    """What `migrate sql` prints makes the same tables as migrating, and the code accepts them."""
    database = open_database()
    printed = migrations.sql(database.engine.dialect.name, database.schema)
    with database.engine.connect() as conn:
        raw: Any = conn.connection.driver_connection
        raw.executescript(printed) if database.is_sqlite else raw.execute(printed)
        raw.commit()
    database.read(migrations.check)
    assert migrations.migrate(database) == []
    [step] = database.read(migrations.status)
    assert 0 < (step.applied_at or 0) < 2**62


def test_the_printed_sql_starts_where_it_is_told() -> None:
    """After the last step there is nothing left to print but the frame."""
    assert "postroad_outbox" not in migrations.sql("sqlite", after=migrations.latest)


def test_the_ladder_has_no_holes() -> None:
    """Steps are numbered from 1 without holes, none asks for newer code than itself, each has both texts."""
    assert [step.version for step in STEPS] == list(range(1, len(STEPS) + 1))
    assert all(step.oldest_code <= step.version for step in STEPS)
    for step in STEPS:
        assert step.statements("sqlite")
        assert step.statements("postgresql")


def test_no_file_is_left_over() -> None:
    """Every SQL file beside the ladder belongs to a step."""
    known = {f"{step.title}.{dialect}.sql" for step in STEPS for dialect in ("sqlite", "postgresql")}
    assert {path.name for path in Path(migrations.__file__).parent.glob("*.sql")} == known


def test_a_schema_that_exists_needs_no_right_to_create_one(postgres_url: str, fresh_schema: str) -> None:
    """A role that owns a schema but may not create one migrates it."""
    role = f"role_{fresh_schema}"
    admin = Database(postgres_url)
    with admin.engine.begin() as conn:
        conn.exec_driver_sql(f'CREATE ROLE "{role}" NOLOGIN')
        conn.exec_driver_sql(f'CREATE SCHEMA "{fresh_schema}" AUTHORIZATION "{role}"')
    owner = Database(
        admin.engine.url.update_query_dict({"options": f"-c role={role}"}),
        schema=fresh_schema,
        clock=FakeClock(),
    )
    try:
        assert migrations.migrate(owner)
    finally:
        owner.close()
        with admin.engine.begin() as conn:
            conn.exec_driver_sql(f'DROP SCHEMA "{fresh_schema}" CASCADE')
            conn.exec_driver_sql(f'DROP ROLE "{role}"')
        admin.close()
