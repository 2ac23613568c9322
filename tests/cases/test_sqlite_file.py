"""A SQLite file that is removed or replaced under a program that has it open."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from postroad import DatabaseReplaced, Kind, Postroad, sqlite
from tests.cases.apps import idle, until

pytestmark = pytest.mark.filterwarnings("ignore::postroad.store.sqlite_version.SQLiteVersionWarning")
NOTE = Kind("note", dict[str, str])


def app(path: Path, *, own_engine: bool = False) -> tuple[Postroad, list[str]]:
    """An app on a file, and what it sent."""
    engine = sqlite.configure(create_engine(f"sqlite:///{path}")) if own_engine else None
    post = Postroad(engine or f"sqlite:///{path}")
    sent: list[str] = []
    post.sender(NOTE)(lambda d: sent.append(d.key))
    post.check_schema()
    return post, sent


def send(post: Postroad, key: str) -> None:
    with post.begin() as tx:
        tx.send(NOTE, {}, key=key)


def remove(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)


def replace(path: Path) -> None:
    """As a restored backup does it."""
    fresh = path.with_name("backup.db")
    app(fresh)[0].close()
    remove(path)
    os.rename(fresh, path)


@pytest.mark.parametrize("own_engine", [False, True])
def test_what_goes_into_a_removed_file_is_refused(sqlite_path: Path, own_engine: bool) -> None:
    """Nothing is accepted into a file that was removed, time after time, and no empty file is made in its place."""
    post, _ = app(sqlite_path, own_engine=own_engine)
    send(post, "before")
    remove(sqlite_path)
    for n in range(3):
        with pytest.raises(DatabaseReplaced, match="was removed or replaced while it was open") as caught:
            send(post, f"k{n}")
        assert caught.value.path == str(sqlite_path)
    with pytest.raises(DatabaseReplaced):
        post.dispatches.list()
    assert not sqlite_path.exists()
    post.close()


@pytest.mark.parametrize("own_engine", [False, True])
def test_after_a_replacement_the_new_file_is_used(sqlite_path: Path, own_engine: bool) -> None:
    """A replaced file is told of once, to whoever comes first; then the new one is written to and read."""
    post, _ = app(sqlite_path, own_engine=own_engine)
    with post.database.engine.connect(), post.database.engine.connect():
        pass  # two connections in the pool
    replace(sqlite_path)
    with pytest.raises(DatabaseReplaced):
        send(post, "lost")
    send(post, "k")
    assert [row.key for row in post.dispatches.list()] == ["k"]
    other, _ = app(sqlite_path)
    assert [row.key for row in other.dispatches.list()] == ["k"]
    for each in (post, other):
        each.close()


def test_a_replacement_without_our_tables_is_told(sqlite_path: Path) -> None:
    """A new file that has no tables of ours is refused with the cure, and is taken once it has them."""
    post, _ = app(sqlite_path)
    remove(sqlite_path)
    sqlite_path.touch()
    with pytest.raises(DatabaseReplaced):
        send(post, "k0")
    for _ in range(2):
        with pytest.raises(DatabaseReplaced, match="no tables of ours: `postroad migrate`"):
            send(post, "k1")
    assert sqlite_path.stat().st_size == 0
    app(sqlite_path)[0].close()
    send(post, "k2")
    assert [row.key for row in post.dispatches.list()] == ["k2"]
    post.close()


def test_a_commit_into_a_removed_file_is_refused(sqlite_path: Path) -> None:
    """A file that is removed during a transaction, ours or the user's, makes its commit fail."""
    post, _ = app(sqlite_path, own_engine=True)
    with pytest.raises(DatabaseReplaced), post.begin() as tx:
        tx.send(NOTE, {}, key="k")
        tx.write(lambda conn: remove(sqlite_path))
    replace(sqlite_path)
    engine = post.database.engine
    with pytest.raises(DatabaseReplaced), engine.begin() as conn:
        with post.join(conn) as tx:
            tx.send(NOTE, {}, key="k")
        remove(sqlite_path)
    post.close()


async def test_an_async_engine_of_the_users_notices_too(sqlite_path: Path) -> None:
    """The user's own AsyncEngine is told as well, and goes on with the new file."""
    post, _ = app(sqlite_path)
    engine = create_async_engine(f"sqlite+aiosqlite:///{sqlite_path}")
    sqlite.configure(engine.sync_engine)
    async with engine.begin() as conn, post.join(conn) as tx:
        tx.send(NOTE, {}, key="a")
    replace(sqlite_path)
    with pytest.raises(DatabaseReplaced):
        async with engine.begin():
            pass
    async with engine.begin() as conn:
        assert (await conn.exec_driver_sql("SELECT count(*) FROM postroad_outbox")).scalar_one() == 0
    await engine.dispose()
    post.close()


def test_a_file_that_its_owner_removes_after_disposing_is_made_anew(sqlite_path: Path) -> None:
    """Whoever disposes of the engine and removes the file gets a new one, as without us."""
    engine = sqlite.configure(create_engine(f"sqlite:///{sqlite_path}"))
    for _ in range(2):
        with engine.begin() as conn:
            conn.exec_driver_sql("CREATE TABLE mine (id integer)")
        engine.dispose()
        remove(sqlite_path)


@pytest.mark.parametrize("swap", [replace, remove])
def test_running_loops_go_on_with_the_new_file(
    sqlite_path: Path, swap: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Loops say that the file is gone, and send what others put into the new one."""
    post, sent = app(sqlite_path)
    with caplog.at_level(logging.WARNING, "postroad"), post.running():
        send(post, "before")
        until(lambda: sent == ["before"])
        swap(sqlite_path)
        until(lambda: "removed or replaced" in caplog.text)
        other, _ = app(sqlite_path)
        send(other, "after")
        until(lambda: sent == ["before", "after"])
        until(lambda: idle(post))
        other.close()
    post.close()
