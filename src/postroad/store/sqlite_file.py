"""Notices when a SQLite file is removed or replaced while it is open.

SQLite itself does not: the process goes on in a file that has no name any more, and what it commits there is lost
with the process. So each transaction looks, when it begins and before it commits, whether the path still leads to
the file that its connection opened. A file that is overwritten in place cannot be told from one that was written to.
"""

import os
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DisconnectionError

from postroad.model.errors import DatabaseReplaced

_OPENED = "postroad_file"
_OUR_TABLE = "SELECT count(*) FROM sqlite_master WHERE name = 'postroad_migrations'"
Identity = tuple[int, int]


def watch(engine: Engine) -> None:
    """Have the transactions of a SQLite engine raise DatabaseReplaced once its file is another one.

    The connections to the old file are thrown away then, and new ones are to the new file, if that has our tables.
    """
    watched = _Watched()
    event.listen(engine, "do_connect", watched.before_connect)
    event.listen(engine, "connect", watched.connected)
    event.listen(engine, "checkout", watched.checked_out)
    event.listen(engine, "begin", watched.check)
    event.listen(engine, "commit", watched.check)
    event.listen(engine, "engine_disposed", watched.forget)


class _Watched:
    """The file of one engine; `lost`: the path of the one that was seen to be gone, until there is a sound one."""

    def __init__(self) -> None:
        self.lost = ""
        self.told: set[Identity] = set()

    def before_connect(self, *_: object) -> None:
        if self.lost and not os.path.exists(self.lost):
            raise DatabaseReplaced(f"{self.lost} is missing.", path=self.lost)  # connecting would create it

    def connected(self, connection: Any, record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA database_list")
        path = cursor.fetchone()[2]
        if self.lost:
            cursor.execute(_OUR_TABLE)
            if not cursor.fetchone()[0]:
                cursor.close()
                connection.close()
                raise DatabaseReplaced(f"The new {path} has no tables of ours: `postroad migrate`.", path=path)
        cursor.close()
        record.info[_OPENED] = (path, identity(path))
        self.lost = ""

    def checked_out(self, _connection: Any, record: Any, _proxy: object) -> None:
        # Once a transaction has told of it the rest of the pool is quietly renewed.
        path, opened = record.info.get(_OPENED, ("", None))
        if path and opened in self.told and identity(path) != opened:
            raise DisconnectionError

    def check(self, conn: Connection) -> None:
        path, opened = conn.info.get(_OPENED, ("", None))
        if path and identity(path) != opened:
            self.lost = path
            self.told.add(opened)
            error = DatabaseReplaced(path, path=path)
            conn.invalidate(error)
            raise error

    def forget(self, _engine: Engine) -> None:
        self.lost = ""


def identity(path: str) -> Identity | None:
    """Which file a path leads to; None: to none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
