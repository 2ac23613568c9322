"""The connections of simulated processes: kept open, told little, and as strict as a process's own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from postroad.model.clock import FakeClock
from postroad.store.statements import Statement
from postroad.testing.simulation.connections import Shelf
from postroad.testing.simulation.process import Crash
from postroad.testing.simulation.stepped import Onlooker, SteppedDatabase

_MAKE = Statement("CREATE TABLE notes (text TEXT)")
_ALL = Statement("SELECT text FROM notes")
_WRITE = Statement("INSERT INTO notes VALUES (:text)")
_WRITE_NOTHING = Statement("DELETE FROM notes WHERE text = 'none is like this'")


class Mortal(Onlooker):
    """A process that notes its statements, and dies before one that begins like this."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.told: list[str] = []
        self.fatal = "-"

    def at_statement(self, sql: str) -> None:
        if sql.startswith(self.fatal):
            raise Crash
        self.told.append(sql)


Living = tuple[SteppedDatabase, Mortal]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[[], Living]]:
    """Begins processes over one file."""
    shelf = Shelf()
    begun: list[SteppedDatabase] = []

    def begin() -> Living:
        mortal = Mortal(shelf)
        begun.append(SteppedDatabase(f"sqlite:///{tmp_path / 'sim.db'}", clock=FakeClock(), place=mortal))
        return begun[-1], mortal

    first, _ = begin()
    first.transact(lambda conn, *, now: _MAKE(conn))
    yield begin
    for database in begun:
        database.close()
    shelf.close()


def note(conn: Connection, text: str, **_: Any) -> None:
    _WRITE(conn, text=text)


def notes(conn: Connection) -> list[str]:
    return _ALL(conn).scalars()


@pytest.mark.parametrize("statement", [_WRITE_NOTHING, Statement("INSERT INTO notes VALUES ('from a read')")])
def test_a_read_that_writes_is_refused_each_time(live: Callable[[], Living], statement: Statement) -> None:
    """SQLite refuses it the first time and every other time, also after statements that are known to read only."""
    database, _ = live()
    for _ in range(3):
        assert database.read(notes) == []
        with pytest.raises(OperationalError, match="readonly"):
            database.read(lambda conn: (notes(conn), statement(conn)))
    database.transact(note, "written")
    assert database.read(notes) == ["written"]


def test_a_process_that_dies_in_a_transaction_holds_nothing(live: Callable[[], Living]) -> None:
    """Another one writes at once, and what the dead one had written is gone."""
    dying, mortal = live()
    other, _ = live()
    dying.transact(note, "before")
    mortal.fatal = "DELETE"
    with pytest.raises(Crash):
        dying.transact(lambda conn, *, now: (note(conn, "lost"), _WRITE_NOTHING(conn)))
    other.transact(note, "after")
    assert other.read(notes) == ["before", "after"]


@pytest.mark.parametrize("fatal", ["PRAGMA busy_timeout = 5000", "PRAGMA query_only = OFF", "BEGIN"])
def test_a_process_dies_at_each_word_to_sqlite_too(live: Callable[[], Living], fatal: str) -> None:
    """What SQLite is not told here is a place to die all the same; it holds no lock then, and its heir is as new."""
    dying, mortal = live()
    other, _ = live()
    mortal.fatal = fatal
    with pytest.raises(Crash):
        dying.read(notes)
        dying.transact(note, "lost")
    other.transact(note, "meanwhile")
    dying.close()
    heir, _ = live()
    heir.transact(note, "kept")
    assert heir.read(notes) == ["meanwhile", "kept"]


def test_each_statement_is_told_in_its_order(live: Callable[[], Living]) -> None:
    """A process hears of its transactions' statements as the product says them, whatever SQLite hears of them."""
    database, mortal = live()
    for _ in range(2):
        mortal.told.clear()
        database.read(notes)
        assert mortal.told == ["BEGIN", "PRAGMA query_only = ON", "SELECT text FROM notes", "PRAGMA query_only = OFF"]


def test_a_connection_within_another_is_its_own(live: Callable[[], Living]) -> None:
    """Who has a transaction open and opens another one has two connections; afterwards one is kept again."""
    database, _ = live()
    with database.engine.connect() as outer, database.engine.connect() as inner:
        assert outer is not inner
    with database.engine.connect() as first:
        assert first is outer
