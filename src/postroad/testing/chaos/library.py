"""Which SQLite library the processes of a run use: all of them the same one. Imports none itself."""

import os

VARIABLE = "POSTROAD_BUNDLED_SQLITE"


def use_bundled_sqlite() -> None:
    """Take the bundled one if its wheel is there, here and in the processes that this one starts."""
    try:
        import postroad.bundled_sqlite  # noqa: F401
    except ImportError:
        os.environ[VARIABLE] = "0"
    else:
        os.environ[VARIABLE] = "1"
