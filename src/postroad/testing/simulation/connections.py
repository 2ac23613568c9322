"""The connections of simulated processes: each statement is where a process may die, and nobody waits for a lock.

To open a connection, to hand it out, and to have SQLite compile what it has compiled already would cost more than all
that is done over it. So connections are kept, and SQLite is told only what changes something.
"""

import sqlite3
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import Connection, Engine

_WAIT = "PRAGMA busy_timeout = "
_READ = "PRAGMA query_only = ON"
_WRITE = "PRAGMA query_only = OFF"
_execute = sqlite3.Cursor.execute


class Teller(Protocol):
    """Whose connection it is."""

    def at_statement(self, sql: str) -> None:
        """A statement is about to run: may raise Crash."""

    def shelf(self) -> "Shelf":
        """Where connections lie that dead processes have left."""


class SteppedConnection(sqlite3.Connection):
    """Its statements are where its process may die, once it is of one."""

    reads = False  # whether it must not write

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shelf: Shelf | None = None
        self._functions: set[str] = set()
        self._refuses = False  # whether SQLite knows that it reads: that word makes it forget all that it has compiled

    def of(self, place: Teller) -> None:
        """From now on it is of this process."""
        self.may_write()
        self.shelf = place.shelf()
        self.tell = place.at_statement
        vars(self)["cursor"] = partial(super().cursor, _Cursor)

    def close(self) -> None:
        shelf, self.shelf = self.shelf, None
        vars(self).pop("cursor", None)
        self.rollback()
        if shelf is None or not shelf.put(self):
            super().close()

    def create_function(self, name: str, *args: Any, **options: Any) -> None:
        """Once only: it is the same one for all who have this connection, and made anew forgets what is compiled."""
        if name not in self._functions:
            super().create_function(name, *args, **options)
            self._functions.add(name)

    def refuse_writes(self) -> None:
        """Have SQLite refuse what writes, until it may again."""
        if not self._refuses:
            sqlite3.Cursor(self).execute(_READ)
            self._refuses = True

    def may_write(self) -> None:
        """From now on it may write."""
        self.reads = False
        if self._refuses:
            sqlite3.Cursor(self).execute(_WRITE)
            self._refuses = False


class _Cursor(sqlite3.Cursor):
    connection: SteppedConnection

    def execute(self, sql: str, parameters: Any = (), /) -> "_Cursor":
        connection = self.connection
        connection.tell(sql)
        if sql.startswith("PRAGMA"):
            self._say(sql)
        elif not connection.reads:
            _execute(self, sql, parameters)
        else:
            self._read(connection, sql, parameters)
        return self

    def _say(self, sql: str) -> None:
        """Take a word to SQLite: how long to wait for locks changes nothing here, the others are meant for `_read`."""
        if sql == _READ:
            self.connection.reads = True
        elif sql == _WRITE:
            self.connection.may_write()
        elif not sql.startswith(_WAIT):
            _execute(self, sql)

    def _read(self, connection: SteppedConnection, sql: str, parameters: Any) -> None:
        """Run what must not write. SQLite refuses what does; of each statement it is asked but once in a run."""
        assert connection.shelf is not None
        known = connection.shelf.only_read
        if sql not in known:
            connection.refuse_writes()
        _execute(self, sql, parameters)
        known.add(sql)


class Shelf:
    """The connections of one run that nobody has now, and the statements that are known to write nothing."""

    def __init__(self) -> None:
        self.only_read: set[str] = set()
        self._free: list[SteppedConnection] = []
        self._over = False

    def take(self) -> SteppedConnection | None:
        """One of them, as if it was new."""
        return self._free.pop() if self._free else None

    def put(self, connection: SteppedConnection) -> bool:
        """Lay one aside, unless the run is over; whether that is done."""
        if not self._over:
            self._free.append(connection)
        return not self._over

    def close(self) -> None:
        """The run is over: close them all."""
        self._over = True
        while self._free:
            self._free.pop().close()


class Kept:
    """The connection of an engine that its transactions have one after the other. To be entered in place of one.

    What SQLAlchemy does when a connection is taken and given back takes as long as a small transaction.
    """

    def __init__(self, engine: Engine) -> None:
        self._open = engine.connect
        self._options = engine.get_execution_options()
        self._connection: Connection | None = None
        self._taken = False

    def connect(self) -> "Connection | Kept":
        """What `Engine.connect` gives: this, or another connection while this one is taken."""
        return self._open() if self._taken else self

    def __enter__(self) -> Connection:
        if self._connection is None:
            self._connection = self._open()
        self._taken = True
        return self._connection

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        self._taken = False
        connection = self._connection
        assert connection is not None
        if error is not None or connection.closed or connection.invalidated or connection.in_transaction():
            self.close()
        else:
            # What a transaction has said of itself holds for that one only.
            connection._execution_options = self._options

    def close(self) -> None:
        """Give it back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class Looker:
    """Sees whether anything was written to a file since it looked last."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path)
        self._version: int | None = None

    def changed(self) -> bool:
        """Whether it was; the first time that it looks it was."""
        before, (self._version,) = self._version, self._connection.execute("PRAGMA data_version").fetchone()
        return self._version != before

    def forget(self) -> None:
        """Take it for changed the next time."""
        self._version = None

    def close(self) -> None:
        """Look no more."""
        self._connection.close()
