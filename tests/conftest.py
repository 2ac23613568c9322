"""Fixtures of the whole suite: which SQLite, and one Postgres for the run."""

import importlib
import os

# First: nothing may have imported sqlite3 yet. `stdlib` runs the suite on the standard library's.
SQLITE = os.environ.get("POSTROAD_TEST_SQLITE", "bundled")
if SQLITE == "bundled":
    importlib.import_module("postroad.bundled_sqlite")
elif SQLITE != "stdlib":
    raise ValueError(f"POSTROAD_TEST_SQLITE is bundled or stdlib, not {SQLITE!r}")

import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import psycopg
import pytest

from tests import postgres_server
from tests.contracts.schemas import Schemas

# A shell's job in the background ignores it, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("bounded", deadline=None)  # how long an example takes says what else runs here
hypothesis.settings.load_profile("bounded")
# Before a suite is imported: its assertions then tell what they compared.
pytest.register_assert_rewrite("postroad.testing.contracts", "postroad.testing.zombies")

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

FOLDER = pytest.StashKey[Path]()
CONTROLLER = pytest.StashKey[int]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share what takes long to make stay together."""
    from tests.scheduling import Together

    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None


class SharedServer:
    """Tell xdist's workers which folder and which controller the run's Postgres belongs to."""

    def pytest_configure_node(self, node: "WorkerController") -> None:
        node.workerinput["postgres_folder"] = str(node.config.stash[FOLDER])
        node.workerinput["postgres_controller"] = node.config.stash[CONTROLLER]


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    if given is not None:
        config.stash[FOLDER] = Path(given["postgres_folder"])
        config.stash[CONTROLLER] = given["postgres_controller"]
        return
    config.stash[FOLDER] = postgres_server.make_folder()
    config.stash[CONTROLLER] = os.getpid()
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(SharedServer())


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and FOLDER in config.stash:
        postgres_server.stop(config.stash[FOLDER])


def pytest_report_header(config: pytest.Config) -> str:
    import sqlite3

    return f"SQLite {sqlite3.sqlite_version} ({SQLITE})"


@pytest.fixture(scope="session")
def postgres_url(pytestconfig: pytest.Config) -> str:
    """The URL of a real Postgres: POSTROAD_TEST_DATABASE_URL, else one that the run starts and stops."""
    given = os.environ.get("POSTROAD_TEST_DATABASE_URL")
    if given:
        scheme, rest = given.split("://", 1)
        assert scheme in {"postgres", "postgresql", "postgresql+psycopg"}, "not the URL of a Postgres"
        return f"postgresql+psycopg://{rest}"
    return postgres_server.url_of(pytestconfig.stash[FOLDER], controller=pytestconfig.stash[CONTROLLER])


@pytest.fixture
def own_postgres(monkeypatch: pytest.MonkeyPatch) -> Iterator[postgres_server.Own]:
    """A Postgres that the test may crash and start again."""
    folder = postgres_server.make_folder()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    server = postgres_server.Own(folder)
    yield server
    server.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def fresh_schema(postgres_url: str) -> Iterator[str]:
    """A schema's name that nobody uses; what the test made under it is dropped afterwards."""
    name = f"test_{secrets.token_hex(6)}"
    yield name
    with psycopg.connect(postgres_url.replace("+psycopg", "", 1), autocommit=True) as conn:
        # A connection that the test left inside a transaction fails here instead of hanging.
        conn.execute("SET lock_timeout = '10s'")
        conn.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


@pytest.fixture(scope="session")
def schemas(postgres_url: str) -> Iterator[Schemas]:
    """Schemas with our tables that are used again."""
    kept = Schemas(postgres_url)
    yield kept
    kept.close()


@pytest.fixture(scope="session")
def migrated_schemas(postgres_url: str) -> Iterator[Schemas]:
    """The same, as migrations make them."""
    kept = Schemas(postgres_url)
    yield kept
    kept.close()


@pytest.fixture
def migrated_schema(postgres_url: str, migrated_schemas: Schemas) -> Iterator[str]:
    """A schema with our tables and nothing in them, as migrations make it."""
    with migrated_schemas.lent(lambda name: _migrate(postgres_url, name)) as name:
        yield name


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with our tables and nothing in them, to be copied: that takes a tenth of making them."""
    path = tmp_path_factory.mktemp("template") / "empty.db"
    _migrate(f"sqlite:///{path}", None)
    return path


def _migrate(url: str, schema: str | None) -> None:
    from postroad.store import migrations
    from postroad.store.database import Database

    made = Database(url, schema=schema)
    migrations.migrate(made)
    made.close()


@pytest.fixture
def migrated_path(sqlite_path: Path, sqlite_template: Path) -> Path:
    """A test's SQLite file with our tables and nothing in them."""
    shutil.copyfile(sqlite_template, sqlite_path)
    return sqlite_path


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Path:
    """Where a test's SQLite file goes."""
    return tmp_path / "test.db"
