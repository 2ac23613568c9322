"""How SQLite's write lock is waited for: anew every few milliseconds, for as long as before."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError

from postroad.sqlite import configure
from postroad.store import dialects
from postroad.store.database import Database
from postroad.store.sqlite_lock import BEGIN, ROUND_MILLISECONDS

PATIENCE = 5 * ROUND_MILLISECONDS


class Heard:
    """What the connections of an engine were told."""

    def __init__(self, engine: Engine) -> None:
        self.said: list[str] = []
        event.listen(engine, "connect", lambda raw, _: raw.set_trace_callback(self.said.append))

    def about_the_lock(self) -> list[str]:
        return [sql for sql in self.said if sql == BEGIN or sql.startswith("PRAGMA busy_timeout")]


@pytest.fixture
def holder(sqlite_path: Path) -> Iterator[Connection]:
    """Another connection, which holds the write lock."""
    engine = configure(create_engine(f"sqlite:///{sqlite_path}"))
    with engine.begin() as conn:
        yield conn
    engine.dispose()


def test_who_waits_asks_anew(sqlite_path: Path, holder: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own wait grows to 100 ms between two questions, and others take the lock in between every time."""
    monkeypatch.setattr(dialects, "BUSY_MILLISECONDS", PATIENCE)
    database = Database(f"sqlite:///{sqlite_path}")
    heard = Heard(database.engine)
    with pytest.raises(OperationalError, match="locked"), database.engine.begin():
        pass
    timeout = "PRAGMA busy_timeout = {}".format
    assert heard.about_the_lock()[-7:] == [timeout(ROUND_MILLISECONDS), *[BEGIN] * 5, timeout(PATIENCE)]
    database.close()


@pytest.mark.parametrize("own", [3 * ROUND_MILLISECONDS, 7, 0])
def test_an_engine_of_the_users_keeps_its_patience(sqlite_path: Path, holder: Connection, own: int) -> None:
    """It waits as long as its `busy_timeout` says, which stays as it is; one of 0 asks once."""
    engine = configure(create_engine(f"sqlite:///{sqlite_path}"))
    event.listen(engine, "connect", lambda raw, _: raw.execute(f"PRAGMA busy_timeout = {own}"))
    heard = Heard(engine)
    with pytest.raises(OperationalError, match="locked"), engine.begin():
        pass
    assert heard.said.count(BEGIN) == max(1, own // ROUND_MILLISECONDS)
    holder.rollback()
    with engine.begin() as conn:
        conn.execute(text("CREATE TABLE t (a)"))
    with engine.connect() as conn:
        raw: Any = conn.connection.dbapi_connection
        assert raw.execute("PRAGMA busy_timeout").fetchone()[0] == own
        conn.rollback()
    engine.dispose()


def test_the_lock_is_had_once_it_is_free(sqlite_path: Path, holder: Connection) -> None:
    """Who has been refused for several rounds gets it all the same."""
    database = Database(f"sqlite:///{sqlite_path}")
    heard = Heard(database.engine)

    def let_go() -> None:
        while heard.said.count(BEGIN) < 3:
            pass
        holder.rollback()

    freeing = threading.Thread(target=let_go)
    freeing.start()
    with database.engine.begin() as conn:
        conn.execute(text("CREATE TABLE t (a)"))
    freeing.join()
    assert heard.said.count(BEGIN) >= 3
    database.close()
