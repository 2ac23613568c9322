"""Put the `pysqlite3` wheel's SQLite in place of the standard library's, for the whole process.

Import it first, before anything that imports `sqlite3`:

    import postroad.bundled_sqlite  # the first import of the program, or of the module that `postroad run` loads

SQLite 3.7.0 to 3.51.2 (but for 3.44.6 and 3.50.7) can lose committed pages when several connections reset
the WAL at once, and the standard library comes with whatever SQLite its build found. Two copies of SQLite in
one process are worse: closing a file in one drops the POSIX locks of the other. So this module replaces
`sqlite3` before anybody has it, or refuses.

Raises ImportError when the wheel is missing, when `sqlite3` was imported before, and when the wheel's own
SQLite has the fault (a `pysqlite3` compiled against an old system library).
"""

import importlib
import sys
from types import ModuleType

_MISSING = "postroad.bundled_sqlite needs the pysqlite3 wheel: pip install 'postroad[sqlite]'"
_TOO_LATE = (
    "sqlite3 was imported before postroad.bundled_sqlite. Make `import postroad.bundled_sqlite` the first "
    "import of the program (under `postroad run`, of the app's package; or start it as `postroad run "
    "--bundled-sqlite`): two copies of SQLite in one process drop each other's locks."
)
_FAULTY = (
    "the installed pysqlite3 carries SQLite {version}, which has the WAL-reset fault. Install a wheel with "
    "3.51.3 or later: pip install --only-binary pysqlite3 'postroad[sqlite]'"
)


def _wheel() -> ModuleType:
    try:
        return importlib.import_module("pysqlite3")
    except ModuleNotFoundError as error:
        raise ImportError(_MISSING) from error


def _is_sound(version: tuple[int, ...]) -> bool:
    """Tell whether a SQLite is free of the WAL-reset fault (repaired in 3.51.3; in 3.44.6 and 3.50.7 too)."""
    return version >= (3, 51, 3) or (3, 44, 6) <= version < (3, 45) or (3, 50, 7) <= version < (3, 51)


def _install() -> None:
    standard = sys.modules.get("_sqlite3")
    ours = sys.modules.get("pysqlite3._sqlite3")
    if standard is not None and standard is not ours:
        raise ImportError(_TOO_LATE)
    wheel = _wheel()
    if not _is_sound(wheel.sqlite_version_info):
        raise ImportError(_FAULTY.format(version=wheel.sqlite_version))
    sys.modules["sqlite3"] = wheel
    sys.modules["sqlite3.dbapi2"] = importlib.import_module("pysqlite3.dbapi2")
    sys.modules["_sqlite3"] = importlib.import_module("pysqlite3._sqlite3")


_install()
