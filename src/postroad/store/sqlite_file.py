"""A SQLite file: how one is made, and notices when it is removed or replaced while it is open.

SQLite itself does not: the process goes on in a file that has no name any more, and what it commits there is lost
with the process. So each transaction looks, when it begins and before it commits, whether the path still leads to
the file that its connection opened. A file that is overwritten in place cannot be told from one that was written to.
"""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DisconnectionError

from postroad.model.errors import DatabaseReplaced

_OPENED = "postroad_file"
_OWNER_ONLY = stat.S_IRUSR | stat.S_IWUSR
_OUR_TABLE = "SELECT count(*) FROM sqlite_master WHERE name = 'postroad_migrations'"
Identity = tuple[int, int]


def make_private(engine: Engine) -> Engine:
    """Have an engine make a file that is not there for its owner alone, and not as the umask has it.

    SQLite gives the files beside it (-wal, -shm) the same mode. What is there already stays as it is.
    """
    event.listen(engine, "do_connect", _make)
    return engine


def _make(_dialect: object, _record: object, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    path = _made_at(str(arguments[0]), is_uri=bool(options.get("uri")))
    # Whatever is wrong with the place, SQLite says it next; that another process was quicker is nothing wrong.
    with suppress(OSError):
        os.close(os.open(os.path.realpath(path), os.O_CREAT | os.O_EXCL | os.O_RDWR, _OWNER_ONLY))


def _made_at(name: str, *, is_uri: bool) -> str:
    """The path at which connecting makes a file if there is none; '' if it makes none."""
    if not is_uri or not name.startswith("file:"):
        return name
    given = urlsplit(name)
    mode = dict(parse_qsl(given.query)).get("mode", "rwc")
    return unquote(given.path) if mode == "rwc" and given.netloc in ("", "localhost") else ""


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
