"""The version of this process's SQLite library: a fault that some have, and the warning of it."""

import sqlite3
import sys
import sysconfig
import warnings
from pathlib import Path

# https://www.sqlite.org/wal.html#walresetbug: several connections may corrupt the file.
_WAL_RESET_FIXED = (3, 51, 3)
_WAL_RESET_BACKPORTS = frozenset({(3, 44, 6), (3, 50, 7)})


class SQLiteVersionWarning(UserWarning):
    """This process's SQLite library has a fault with several connections in WAL mode."""


def has_fault() -> bool:
    """Whether this process's SQLite has the WAL-reset fault."""
    version = sqlite3.sqlite_version_info
    return (3, 7, 0) <= version < _WAL_RESET_FIXED and version not in _WAL_RESET_BACKPORTS


def warn_of_sqlite_fault() -> None:
    """Warn if this process's SQLite has the WAL-reset fault, and name the cure."""
    if has_fault():
        file, line = _users_line()
        warnings.warn_explicit(
            f"SQLite {sqlite3.sqlite_version} can corrupt a WAL database that several connections write to "
            "(https://www.sqlite.org/wal.html#walresetbug). Put `import postroad.bundled_sqlite` at the top of "
            "your program or of your app's module (pip install 'postroad[sqlite]'), or use SQLite 3.51.3 or newer.",
            SQLiteVersionWarning,
            file,
            line,
        )


def _users_line() -> tuple[str, int]:
    """The innermost place of the user's own code that called us; ours and libraries' frames are none."""
    not_theirs = (str(Path(__file__).parent.parent), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), "<fr")
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(not_theirs):
        if frame.f_back is None:
            return "postroad", 0
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
