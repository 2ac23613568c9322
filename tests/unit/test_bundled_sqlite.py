"""The door that puts the wheel's SQLite in place of the standard library's: a process for each test."""

import subprocess
import sys

import pytest


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def output(program: str) -> str:
    done = run(program)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def refusal(program: str) -> str:
    done = run(program)
    assert done.returncode != 0, done.stdout
    return done.stderr


def test_sqlite3_is_the_wheel_afterwards() -> None:
    """After the import, `sqlite3` and its submodules are the wheel's and carry a sound SQLite."""
    program = (
        "import postroad.bundled_sqlite, sqlite3, _sqlite3, pysqlite3\n"
        "from sqlite3 import dbapi2\n"
        "assert sqlite3 is pysqlite3 and dbapi2 is pysqlite3.dbapi2 and _sqlite3 is pysqlite3._sqlite3\n"
        "assert sqlite3.connect is dbapi2.connect\n"
        "assert sqlite3.sqlite_version_info >= (3, 51, 3), sqlite3.sqlite_version\n"
        "print('wheel')"
    )
    assert output(program) == "wheel"


def test_sqlalchemy_uses_the_wheel() -> None:
    """An engine made afterwards runs on the wheel's driver and library."""
    program = (
        "import postroad.bundled_sqlite, pysqlite3\n"
        "from sqlalchemy import create_engine, text\n"
        "engine = create_engine('sqlite://')\n"
        "assert engine.dialect.dbapi.connect is pysqlite3.connect\n"
        "with engine.connect() as conn:\n"
        "    found = conn.execute(text('select sqlite_version()')).scalar()\n"
        "assert found == pysqlite3.sqlite_version\n"
        "print('wheel')"
    )
    assert output(program) == "wheel"


def test_it_loads_neither_sqlalchemy_nor_the_standard_library_s_sqlite() -> None:
    """The door costs one small import, and no second copy of SQLite enters the process."""
    program = (
        "import postroad.bundled_sqlite, sys\n"
        "copies = [name for name, module in sys.modules.items() if name.endswith('_sqlite3')]\n"
        "assert len({id(sys.modules[name]) for name in copies}) == 1, copies\n"
        "assert 'sqlalchemy' not in sys.modules\n"
        "print('light')"
    )
    assert output(program) == "light"


def test_a_second_import_changes_nothing() -> None:
    """Importing it again, even by a reload, is harmless."""
    program = (
        "import importlib, postroad.bundled_sqlite, sqlite3\n"
        "importlib.reload(postroad.bundled_sqlite)\n"
        "import sqlite3 as again\n"
        "print(again is sqlite3)"
    )
    assert output(program) == "True"


@pytest.mark.parametrize("first", ["sqlite3", "sqlite3.dbapi2", "_sqlite3"])
def test_it_refuses_when_sqlite3_came_first(first: str) -> None:
    """When the standard library's SQLite is already loaded, the import is refused and says what to do."""
    error = refusal(f"import {first}, postroad.bundled_sqlite")
    assert "ImportError: sqlite3 was imported before" in error
    assert "the first import of the program" in error


def test_a_missing_wheel_names_the_extra() -> None:
    """Without the wheel the import is refused with the command that installs it."""
    error = refusal("import sys; sys.modules['pysqlite3'] = None\nimport postroad.bundled_sqlite")
    assert "ImportError: postroad.bundled_sqlite needs" in error
    assert "pip install 'postroad[sqlite]'" in error


@pytest.mark.parametrize(
    ("version", "sound"),
    [
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 53, 0), True),
    ],
)
def test_a_wheel_with_the_fault_is_refused(version: tuple[int, int, int], sound: bool) -> None:
    """A pysqlite3 whose own SQLite has the WAL-reset fault is refused; a repaired one is taken."""
    done = run(f"import pysqlite3; pysqlite3.sqlite_version_info = {version}\nimport postroad.bundled_sqlite")
    assert (done.returncode == 0) is sound
    assert sound or "WAL-reset fault" in done.stderr
